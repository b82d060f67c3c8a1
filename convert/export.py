"""A finished output, back in the checkpoint's own format: shards, their index, the small files."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from kconvert.convert.execute import execute
from kconvert.convert.output import publish, state
from kconvert.convert.output.disk import read_file
from kconvert.convert.output.outline import EXPORT_RECORD
from kconvert.convert.plan import Plan
from kconvert.convert.planned import PlannedFile
from kconvert.convert.prepare import without_collection, worker_count
from kconvert.convert.progress import Meter, Stage, Work
from kconvert.convert.shards import plan_export
from kconvert.convert.source.stored import StoredSource, open_stored
from kconvert.layouts.blob import digest
from kconvert.layouts.checkpoint import INDEX_NAME
from kconvert.layouts.errors import (
    KconvertError,
    OccupiedOutputError,
    OutputError,
    UnsupportedError,
)
from kconvert.layouts.header import read_header
from kconvert.layouts.manifest import WORK_FOLDER


@dataclass(frozen=True)
class PreparedExport:
    """An export that is ready to run: nothing was written yet."""

    source: StoredSource
    folder: Path
    plan: Plan  # all of it
    identity: str  # of what is exported
    small_files: dict[str, bytes]  # the index among them, last
    workers: int
    published: frozenset[str]  # shards that are there already

    @property
    def rest(self) -> Plan:
        """What is not published yet."""
        return self.plan.without(self.published)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of every file that is still to be written, by path."""
        small = {
            name: len(data)
            for name, data in self.small_files.items()
            if not (self.folder / name).exists()
        }
        return {file.path: file.nbytes for file in self.rest.files} | small

    @property
    def work(self) -> Work:
        """What is left to do, in bytes."""
        return Work(0, sum(file.nbytes - file.header_bytes for file in self.rest.files))


@dataclass(frozen=True)
class Exported:
    """What an export did."""

    folder: Path
    shards: int
    tensors: int
    files_written: int
    files_kept: int
    bytes_written: int
    warnings: tuple[str, ...]
    seconds: float
    stages: dict[str, Stage]


def prepare_export(
    output: str | Path, folder: str | Path, workers: int | None = None
) -> PreparedExport:
    """Plan the export of `output` into `folder`; writes nothing.

    Raises what `open_stored` does, and OutputError if `folder` holds anything else.
    """
    folder = Path(folder)
    with without_collection():
        source, model = open_stored(Path(output))
        state.refuse_overlap(source.folder, map(source.path, source.checkpoint.shards), folder)
        if source.cast:
            raise UnsupportedError(
                f"{output}: its scales were cast when it was converted (--scale-dtype), and what"
                " they were is not kept: only an output that keeps them can be exported."
            )
        plan = plan_export(model)
    contents = [group.identity({}) for group in model.groups.values()]
    small = {name: read_file(source.path(name)) for name in source.checkpoint.small_files}
    prepared = PreparedExport(
        source=source,
        folder=folder,
        plan=plan,
        identity=digest(json.dumps([contents, [*map(digest, small.values())]]).encode()),
        small_files=small | {INDEX_NAME: _index(plan)},
        workers=worker_count(plan, workers),
        published=frozenset(),
    )
    return _with_current_state(prepared)


def run_export(prepared: PreparedExport, meter: Meter | None = None) -> Exported:
    """Carry out a prepared export: shard after shard, the index last.

    Raises UnavailableError for lack of space or another run, CheckpointError if a blob was
    changed.
    """
    folder, meter = prepared.folder, meter or Meter()
    with publish.working_in(publish.Workspace(folder)) as workspace:
        prepared = _with_current_state(prepared)  # another run may have ended since
        publish.check_space(folder, prepared.sizes)
        record = json.dumps({"export": prepared.identity}).encode() + b"\n"
        publish.write_file(workspace, f"{WORK_FOLDER}/{EXPORT_RECORD}", record)
        rest = prepared.rest
        execute(rest, prepared.source, workspace, prepared.workers, meter)
        for name, content in prepared.small_files.items():
            publish.write_file(workspace, name, content)
    vision = ["the output was converted with --text-only: the vision tower is not in it"]
    return Exported(
        folder=folder,
        shards=len(prepared.plan.files),
        tensors=sum(len(file.blob_tensors) for file in prepared.plan.files),
        files_written=len(rest.files),
        files_kept=len(prepared.published),
        bytes_written=sum(file.nbytes for file in rest.files),
        warnings=tuple(vision if prepared.source.manifest.text_only else ()),
        seconds=meter.seconds,
        stages=meter.stages(),
    )


def _index(plan: Plan) -> bytes:
    """As Hugging Face's writers have it."""
    shard_of = {tensor.name: file.path for file in plan.files for tensor in file.blob_tensors}
    size = sum(tensor.nbytes for file in plan.files for tensor in file.blob_tensors)
    table = {"metadata": {"total_size": size}, "weight_map": dict(sorted(shard_of.items()))}
    return json.dumps(table, indent=2).encode() + b"\n"


def _with_current_state(prepared: PreparedExport) -> PreparedExport:
    """With the shards that are there. Raises OutputError if the folder holds anything that this
    export has not made."""
    folder = prepared.folder
    if not folder.exists():
        return prepared
    inside = [path for path in sorted(folder.iterdir()) if path.name != WORK_FOLDER]
    if inside and _recorded(folder) != prepared.identity:
        raise OccupiedOutputError(f"{inside[0]} is not of this export: choose another folder.")
    planned = {file.path: file for file in prepared.plan.files}
    published = set()
    for path in inside:
        if path.name in planned:
            if not _is_published(path, planned[path.name]):
                raise OutputError(f"{path} is damaged: delete it and run the same command again.")
            published.add(path.name)
        elif not path.is_file() or prepared.small_files.get(path.name) != read_file(path):
            raise OccupiedOutputError(f"{path} is not of this export: choose another folder.")
    return replace(prepared, published=frozenset(published))


def _recorded(folder: Path) -> str | None:
    """The identity of what was exported into a folder, if it is an export."""
    try:
        return str(json.loads((folder / WORK_FOLDER / EXPORT_RECORD).read_bytes())["export"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_published(path: Path, file: PlannedFile) -> bool:
    try:
        return read_header(path).raw == file.header({}, {})
    except KconvertError:
        return False
