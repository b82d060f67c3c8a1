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


class Found(NamedTuple):
    """What an output already holds, against a plan."""

    published: frozenset[str]  # paths of planned files that are there, whole, of this content
    conflicts: tuple[str, ...]  # sentences: files that this run must not touch
    in_the_way: tuple[Path, ...]  # those files


def look(output: Path, plan: Plan, small_files: dict[str, bytes]) -> Found:
    """Compare the folder `output` (which need not exist) with `plan` and the small files."""
    published: set[str] = set()
    conflicts: list[str] = []
    in_the_way: list[Path] = []

    def conflict(path: Path, text: str) -> None:
        conflicts.append(f"{path} {text}")
        in_the_way.append(path)

    planned = {file.path: file for file in (*plan.files, *plan.others)}
    for path in blob_paths(output):
        name = path.relative_to(output).as_posix()
        problem = _problem(path, planned.get(name), name in plan.expected, plan)
        if problem:
            conflict(path, problem)
        elif name in planned:
            published.add(name)
    for name, content in small_files.items():
        path = output / name
        if path.exists() and not (path.is_file() and path.read_bytes() == content):
            conflict(path, "differs from the source's")
    for path in [*output.glob("*.safetensors"), output / INDEX_NAME]:
        if path.exists():
            conflict(path, "is part of another checkpoint")
    return Found(frozenset(published), tuple(conflicts), tuple(in_the_way))


def blob_paths(output: Path) -> list[Path]:
    """Every blob under `output`, of any layout and parallelism."""
    folders = [output / COMMON_FOLDER, *sorted(output.glob("rank-*-of-*"))]
    return [path for folder in folders for path in sorted(folder.glob("*.safetensors"))]


def _problem(path: Path, file: PlannedFile | None, expected: bool, plan: Plan) -> str | None:
    """Why the blob at `path` is not one of this output, or None."""
    try:
        _, info = read_blob(path)
    except (CheckpointError, OutputError) as error:
        return f"is in the way: {error}"
    target = plan.target
    wanted = (target.layout.NAME, *target.parallelism)
    if (info.layout, info.tp, info.ep) != wanted:
        return (
            f"is for {info.layout} tp {info.tp} ep {info.ep}, this run is for"
            f" {wanted[0]} tp {wanted[1]} ep {wanted[2]}"
        )
    if file is not None and info.fingerprint != file.info.fingerprint:
        return "was made from other weights than this source's (its fingerprint differs)"
    if not expected or (info.repo, info.commit) != (target.repo, target.commit):
        return "is not a file of this conversion"
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
    """Give a written and synced file its final name, durably."""
    os.rename(staged, final)
    fd = os.open(final.parent, os.O_RDONLY)
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
    for name in plan.expected:
        path = output / name
        if path.exists():
            header, info = read_blob(path)
            size = path.stat().st_size
            table[name] = FileEntry(size, digest(header.raw), info.fingerprint)
    return table
