"""The output folder: what is published in it, what is in the way, and how a file gets there.

A file is written under a temporary name in OUT/.kconvert, its header last, then synced, renamed
and its folder synced. What has a final name is therefore whole.
"""

import contextlib
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from kconvert.convert.owner import owned
from kconvert.convert.plan import Plan, PlannedFile
from kconvert.layouts.blob import COMMON_FOLDER, digest, read_blob
from kconvert.layouts.checkpoint import INDEX_NAME
from kconvert.layouts.errors import CheckpointError, OutputError, UnavailableError
from kconvert.layouts.manifest import WORK_FOLDER, FileEntry

_LOG_NAME = "runs.jsonl"
_PARTIAL = ".partial"


class Conflict(NamedTuple):
    """A file that this run must not touch. `ours`: --overwrite may replace or remove it."""

    path: Path
    text: str
    ours: bool


class Found(NamedTuple):
    """What an output already holds, against a plan."""

    published: frozenset[str]  # paths of planned files that are there, whole, of this content
    conflicts: tuple[Conflict, ...]


def look(output: Path, plan: Plan, small_files: dict[str, bytes]) -> Found:
    """Compare the folder `output` (which need not exist) with `plan` and the small files."""
    published: set[str] = set()
    conflicts: list[Conflict] = []
    planned = {file.path: file for file in (*plan.files, *plan.others)}
    for path in blob_paths(output):
        name = path.relative_to(output).as_posix()
        conflict = _compare(path, planned.get(name), name in plan.expected, plan)
        if conflict is not None:
            conflicts.append(conflict)
        elif name in planned:
            published.add(name)
    for name, content in small_files.items():
        path = output / name
        if path.exists() and not (path.is_file() and path.read_bytes() == content):
            conflicts.append(Conflict(path, "differs from the source's", path.is_file()))
    for path in [*output.glob("*.safetensors"), output / INDEX_NAME]:
        if path.exists():
            conflicts.append(Conflict(path, "is part of another checkpoint", False))
    return Found(frozenset(published), tuple(conflicts))


def refuse_conflicts(found: Found, overwrite: bool) -> None:
    """Raise OutputError where the output holds what this run must not touch."""
    foreign = [conflict for conflict in found.conflicts if not conflict.ours]
    conflicts = foreign if overwrite else [*foreign, *found.conflicts]
    if conflicts:
        first, count = conflicts[0], len(set(conflicts))
        more = f" (and {count - 1} more)" if count > 1 else ""
        advice = ", or replace what is there with --overwrite" if first.ours else ""
        raise OutputError(f"{first.path} {first.text}{more}: choose another output{advice}.")


def blob_paths(output: Path) -> list[Path]:
    """Every blob under `output`, of any layout and parallelism."""
    folders = [output / COMMON_FOLDER, *sorted(output.glob("rank-*-of-*"))]
    return [path for folder in folders for path in sorted(folder.glob("*.safetensors"))]


def _compare(path: Path, file: PlannedFile | None, expected: bool, plan: Plan) -> Conflict | None:
    """Why the blob at `path` is not one of this output, or None."""
    try:
        _, info = read_blob(path)
    except OutputError:
        return Conflict(path, "was not written by this version of kconvert", False)
    except CheckpointError as error:
        return Conflict(path, f"is damaged ({str(error).rstrip('.')})", file is not None)
    target = plan.target
    wanted = (target.layout.NAME, *target.parallelism)
    if (info.layout, info.tp, info.ep) != wanted:
        text = (
            f"is for {info.layout} tp {info.tp} ep {info.ep}, this run is for"
            f" {wanted[0]} tp {wanted[1]} ep {wanted[2]}"
        )
        return Conflict(path, text, True)
    if file is not None and info.fingerprint != file.info.fingerprint:
        text = "was made from other weights than this source's (its fingerprint differs)"
        return Conflict(path, text, True)
    if (file is None and not expected) or (info.repo, info.commit) != (target.repo, target.commit):
        return Conflict(path, "is not a file of this conversion", True)
    return None


def overlap(source: Path, shards: Iterable[Path], output: Path) -> None:
    """Raise OutputError where source and output lie in one another, links followed."""
    out, src = output.resolve(), source.resolve()
    if out == src or src in out.parents:
        raise OutputError(f"output {output} lies in the source {source}: choose another folder.")
    inside = next((shard for shard in (src, *shards) if out in shard.parents), None)
    if inside is not None:
        raise OutputError(f"source {inside} lies in the output {output}: choose another folder.")


@contextlib.contextmanager
def working_in(output: Path) -> Iterator[None]:
    """Make `output`, own it, and clear what earlier runs left half-done; the run is logged."""
    work = output / WORK_FOLDER
    work.mkdir(parents=True, exist_ok=True)
    with owned(work):
        _clear(output)
        started, outcome = time.time(), "done"
        try:
            yield
        except BaseException as error:
            outcome = type(error).__name__
            raise
        finally:
            _clear(output)
            _log(work, started, outcome)


def _log(work: Path, started: float, outcome: str) -> None:
    entry = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(started)),
        "seconds": round(time.time() - started, 3),
        "host": socket.gethostname(),
        "command": sys.argv,
        "outcome": outcome,
    }
    # The log must not turn a finished conversion into a failed one (a full disk, say).
    with contextlib.suppress(OSError), open(work / _LOG_NAME, "a") as file:
        file.write(json.dumps(entry) + "\n")


def _clear(output: Path) -> None:
    for work in (output / WORK_FOLDER, *output.glob(f"*/{WORK_FOLDER}")):
        for path in work.glob(f"*{_PARTIAL}"):
            path.unlink(missing_ok=True)


def check_space(output: Path, sizes: dict[str, int]) -> None:
    """Raise UnavailableError unless the files `sizes` (path → bytes) fit, on each file system."""
    for folder, needed in needed_by_device(output, sizes).items():
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise UnavailableError(
                f"{folder} has {free:,} bytes free, {needed:,} are needed"
                f" ({needed - free:,} more): free some space or choose another output."
            )


def needed_by_device(output: Path, sizes: dict[str, int]) -> dict[Path, int]:
    """Bytes to be written on each file system, by one folder that is on it."""
    needed: dict[int, int] = {}
    folder_of: dict[int, Path] = {}
    for name, size in sizes.items():
        folder = (output / name).parent
        while not folder.exists():
            folder = folder.parent
        device = folder.stat().st_dev
        folder_of.setdefault(device, folder)
        needed[device] = needed.get(device, 0) + size
    return {folder_of[device]: size for device, size in needed.items()}


def remove(output: Path, paths: Iterable[Path]) -> None:
    """Delete files of `output`, and the folders that are empty then."""
    for path in paths:
        path.unlink()
        if path.parent != output and not any(path.parent.iterdir()):
            path.parent.rmdir()


def staging_path(output: Path, name: str) -> Path:
    """The temporary name for the file `name`: in OUT/.kconvert, or in a `.kconvert` of its own
    folder where that is on another file system (a disk a rank), as a rename cannot cross them."""
    folder = (output / name).parent
    folder.mkdir(parents=True, exist_ok=True)
    base = output if folder.stat().st_dev == output.stat().st_dev else folder
    (base / WORK_FOLDER).mkdir(exist_ok=True)
    return base / WORK_FOLDER / (name.replace("/", "--") + _PARTIAL)


def publish(staged: Path, final: Path) -> None:
    """Give a written and synced file its final name, durably: its folder may be new as well."""
    os.rename(staged, final)
    for folder in (final.parent, final.parent.parent):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def write_file(output: Path, name: str, content: bytes) -> None:
    """Publish a small file; one that is there with the same bytes is left as it is."""
    final = output / name
    if final.is_file() and final.read_bytes() == content:
        return
    staged = staging_path(output, name)
    with open(staged, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    publish(staged, final)


def entries(output: Path, plan: Plan, small_files: dict[str, bytes]) -> dict[str, FileEntry]:
    """What the manifest says of every published file: read from what lies on disk."""
    table = {name: FileEntry(len(data), digest(data)) for name, data in small_files.items()}
    for name in {*plan.expected, *(file.path for file in plan.others)}:
        path = output / name
        if path.exists():
            header, info = read_blob(path)
            size = path.stat().st_size
            table[name] = FileEntry(size, digest(header.raw), info.fingerprint)
    return table
