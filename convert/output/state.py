"""An output folder compared with a plan: what is published, what is in the way."""

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from kconvert.convert.output.disk import read_file
from kconvert.convert.output.outline import Earlier, read_earlier
from kconvert.convert.output.publish import PROBE
from kconvert.convert.plan import Plan
from kconvert.convert.planned import PlannedFile
from kconvert.layouts.blob import COMMON_FOLDER, read_blob
from kconvert.layouts.checkpoint import INDEX_NAME
from kconvert.layouts.errors import (
    CheckpointError,
    KconvertError,
    MissingFileError,
    OccupiedOutputError,
    OutputError,
)
from kconvert.layouts.manifest import MANIFEST_NAME, WORK_FOLDER
from kconvert.layouts.model import layer_numbers, ranges


class Conflict(NamedTuple):
    """A file that this run must not touch. `ours`: --overwrite may replace or remove it."""

    path: Path
    text: str
    ours: bool


class OutputState(NamedTuple):
    """What an output already holds, compared with a plan."""

    published: frozenset[str]  # paths of planned files that are there, whole, of this content
    trusted: frozenset[str]  # paths of files whose shards are not here: they cannot be compared
    conflicts: tuple[Conflict, ...]
    foreign: tuple[str, ...]  # paths of what no conversion has made: left alone


EMPTY = OutputState(frozenset(), frozenset(), (), ())


def read_state(output: Path, plan: Plan, small_files: dict[str, bytes]) -> OutputState:
    """Compare the folder `output` (which need not exist) with `plan` and the small files."""
    published: set[str] = set()
    trusted: dict[str, str] = {}  # path → fingerprint
    conflicts: list[Conflict] = []
    earlier = read_earlier(output)
    planned = {file.path: file for file in (*plan.files, *plan.others)}
    for path in blob_paths(output):
        name = path.relative_to(output).as_posix()
        outcome = _compare(path, planned.get(name), name in plan.expected, plan)
        if isinstance(outcome, Conflict):
            conflicts.append(outcome)
        elif name in planned:
            published.add(name)
        else:
            trusted[name] = outcome
    for name in _from_other_sources(trusted, planned, earlier):
        text = "was not made from this source, as far as can be told: its shards are missing"
        conflicts.append(Conflict(output / name, text, False))
        del trusted[name]
    for name, content in small_files.items():
        path = output / name
        if path.exists() and not (path.is_file() and read_file(path) == content):
            conflicts.append(Conflict(path, "differs from the source's", path.is_file()))
    for name in sorted(earlier.small_files - small_files.keys()):
        if (output / name).is_file():
            text = "is a small file of an earlier conversion, which this source does not have"
            conflicts.append(Conflict(output / name, text, True))
    for path in [*output.glob("*.safetensors"), output / INDEX_NAME]:
        if path.exists():
            conflicts.append(Conflict(path, "is part of another checkpoint", False))
    if (output / MANIFEST_NAME).is_dir():
        conflicts.append(Conflict(output / MANIFEST_NAME, "is a folder", False))
    ours = small_files.keys() | earlier.small_files
    return OutputState(
        published=frozenset(published),
        trusted=frozenset(trusted),
        conflicts=tuple(conflicts),
        foreign=tuple(_foreign(output, ours)),
    )


def _from_other_sources(
    trusted: dict[str, str], planned: dict[str, PlannedFile], earlier: Earlier
) -> list[str]:
    """The `trusted` blobs that must not be taken for this source's: those with another fingerprint
    than an earlier run expected, or all if the output was begun from another source, as a common
    blob's fingerprint tells."""
    known = earlier.fingerprints
    if any(
        file.fingerprint != known.get(path, file.fingerprint)
        for path, file in planned.items()
        if file.rank is None
    ):
        return list(trusted)
    return [name for name, found in trusted.items() if found != known.get(name, found)]


def _foreign(output: Path, ours: Collection[str]) -> Iterator[str]:
    """What no conversion has made; for a folder, only its name."""
    folders = _blob_folders(output)
    ours = {*ours, MANIFEST_NAME, *(folder.name for folder in folders)}
    for folder in (output, *folders):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            blob = folder != output and path.suffix == ".safetensors"
            known = blob or (folder == output and path.name in ours)
            if not known and path.name != WORK_FOLDER and not path.name.startswith(PROBE):
                yield path.relative_to(output).as_posix()


def refuse_missing(plan: Plan, state: OutputState) -> None:
    """Raise CheckpointError if shards are missing whose files are not published either."""
    lacking = [
        group for group in plan.absent if group.wanted and not state.trusted.issuperset(group.paths)
    ]
    if not lacking:
        return
    first = lacking[0]
    shards = {shard for group in lacking for shard in group.shards}
    more = f" ({len(shards)} shards are)" if len(shards) > 1 else ""
    layers = layer_numbers(job.group.name for job in plan.jobs)
    part = f", or convert what is there with --layers {ranges(layers)}" if layers else ""
    rest = "the repository lacks it" if plan.target.repo else "download the rest"
    raise MissingFileError(
        f"{first.name} needs {first.shards[0]}, which is missing{more}: {rest}{part}."
    )


def refuse_reserved(small_files: Iterable[str]) -> None:
    """Raise CheckpointError if a small file of the source has the name of one of ours."""
    ours = (MANIFEST_NAME, COMMON_FOLDER)
    name = next((n for n in small_files if n in ours or n.startswith("rank-")), None)
    if name is not None:
        raise CheckpointError(
            f"the source holds {name}, which is a name of kconvert's own: if it is an output of"
            " kconvert, give the checkpoint it was made from; else rename the file."
        )


def refuse_conflicts(state: OutputState, overwrite: bool) -> None:
    """Raise OutputError if the output holds what this run must not touch."""
    foreign = [conflict for conflict in state.conflicts if not conflict.ours]
    conflicts = foreign if overwrite else [*foreign, *state.conflicts]
    if conflicts:
        first, count = conflicts[0], len(set(conflicts))
        more = f" (and {count - 1} more)" if count > 1 else ""
        advice = ", or replace what is there with --overwrite" if first.ours else ""
        raise OccupiedOutputError(
            f"{first.path} {first.text}{more}: choose another output{advice}."
        )


def blob_paths(output: Path) -> list[Path]:
    """Every blob under `output`, of any layout and parallelism."""
    folders = _blob_folders(output)
    return [path for folder in folders for path in sorted(folder.glob("*.safetensors"))]


def _blob_folders(output: Path) -> list[Path]:
    return [output / COMMON_FOLDER, *sorted(output.glob("rank-*-of-*"))]


def commit_of_blobs(output: Path, repo: str) -> str | None:
    """The commit of the repository from which the blobs in `output` were made, if any is there."""
    for path in blob_paths(output):
        with contextlib.suppress(KconvertError):  # what lies there is compared later
            _, info = read_blob(path)
            if info.repo == repo:
                return info.commit
    return None


def _compare(path: Path, file: PlannedFile | None, expected: bool, plan: Plan) -> Conflict | str:
    """Why the blob at `path` is not one of this output, or its fingerprint."""
    try:
        _, info = read_blob(path)
    except OutputError:
        return Conflict(path, "was not written by this version of kconvert", False)
    except CheckpointError as error:
        ours = file is not None and path.is_file()
        return Conflict(path, f"is damaged ({str(error).rstrip('.')})", ours)
    target = plan.target
    cut, wanted = info.sharding, (target.layout.name, *target.parallelism)
    if cut is not None and (cut.layout, cut.tp, cut.ep) != wanted:
        text = (
            f"is for {cut.layout} tp {cut.tp} ep {cut.ep}, this run is for"
            f" {wanted[0]} tp {wanted[1]} ep {wanted[2]}"
        )
        return Conflict(path, text, True)
    if file is not None and info.fingerprint != file.fingerprint:
        text = "was made from other weights than this source's (its fingerprint differs)"
        return Conflict(path, text, True)
    if (info.repo, info.commit) != (target.repo, target.commit):
        return Conflict(path, f"was made from {_origin(info.repo, info.commit)}", True)
    if not expected:
        text = "would be left out by --text-only" if file else "is not a file of this conversion"
        return Conflict(path, text, True)
    return info.fingerprint


def _origin(repo: str | None, commit: str | None) -> str:
    return f"{repo} at {commit}" if repo else "a local folder"


def refuse_overlap(source: Path, shards: Iterable[Path], output: Path) -> None:
    """Raise OutputError if source or output lies in the other, links followed."""
    out, src = (Path(os.path.realpath(path)) for path in (output, source))
    if out == src or src in out.parents:
        raise OutputError(f"output {output} lies in the source {source}: choose another folder.")
    inside = next((shard for shard in (src, *shards) if out in shard.parents), None)
    if inside is not None:
        raise OutputError(f"source {inside} lies in the output {output}: choose another folder.")
