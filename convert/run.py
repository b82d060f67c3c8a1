"""A whole conversion, carried out: the jobs, then what belongs to no job, the manifest last."""

from dataclasses import dataclass, replace
from pathlib import Path

from kconvert.convert.execute import execute
from kconvert.convert.link import link_finished
from kconvert.convert.output import publish
from kconvert.convert.output.disk import sync_folder
from kconvert.convert.output.outline import OUTLINE_NAME, Outline, read_outline
from kconvert.convert.prepare import Prepared, with_current_state
from kconvert.convert.progress import Meter, Stage
from kconvert.layouts.errors import OutputError, UnfinishedOutputError
from kconvert.layouts.manifest import (
    MANIFEST_NAME,
    WORK_FOLDER,
    Manifest,
    encode_manifest,
    read_manifest,
)


@dataclass(frozen=True)
class Conversion:
    """What a conversion did."""

    output: Path
    files_written: int
    files_linked: int  # to files of the output that is the source: they take no space here
    files_kept: int
    bytes_read: int
    bytes_written: int
    complete: bool
    replaced: dict[str, int]  # --overwrite: bytes of the files that were there, by path
    foreign: tuple[str, ...]  # what no conversion has made and was left alone
    trusted: tuple[str, ...]  # published files that could not be compared: their shards are gone
    ignored: tuple[str, ...]  # sentences on what the source has and nobody reads
    warnings: tuple[str, ...]  # sentences on what may be wrong with it
    verified: bool  # contents were compared with the hashes that they should have
    left_out: tuple[str, ...]  # groups that this run was not asked for
    repo: str | None  # on the Hub
    commit: str | None
    share: str | None  # which, if this run was a share
    seconds: float
    stages: dict[str, Stage]  # where the time went


def run(prepared: Prepared, meter: Meter | None = None) -> Conversion:
    """Carry out a prepared conversion; `meter` tells how far it is.

    Raises UnavailableError for lack of space or another run, CheckpointError for faults in the
    data, OutputError if something came into the output meanwhile.
    """
    output, meter = prepared.output, meter or Meter()
    with publish.working_in(prepared.workspace) as workspace:
        prepared = with_current_state(prepared)  # another run may have ended since
        publish.check_space(output, prepared.disk)
        rest, replaced, outline = prepared.rest, prepared.replaced, _outline(prepared)
        _leave_outline(workspace, outline)
        if replaced:
            publish.remove(workspace, [MANIFEST_NAME])  # before what it tells of is changed
        linked = link_finished(rest, prepared.source, workspace, prepared.workers, meter)
        rest = rest.without(linked)
        done = execute(rest, prepared.source, workspace, prepared.workers, meter)
        # The last share to end writes what belongs to no share.
        last = workspace.share is None or not outline.missing_blobs(output)
        if last or (workspace.share and workspace.share.index == 0):
            for name, content in prepared.small_files.items():
                publish.write_file(workspace, name, content)
        publish.remove(workspace, outline.former)
        manifest = outline.manifest(output) if last else None
        if manifest:
            _write_manifest(workspace, manifest)
    planned = {file.path for file in prepared.plan.files}
    return Conversion(
        output=output,
        files_written=len(rest.files),
        files_linked=len(linked),
        files_kept=len(prepared.state.published & planned),
        bytes_read=done.bytes_read,
        bytes_written=sum(file.nbytes for file in rest.files),
        complete=manifest is not None and manifest.complete,
        replaced=replaced,
        foreign=prepared.state.foreign,
        trusted=tuple(sorted(prepared.state.trusted)),
        ignored=prepared.ignored,
        warnings=(*prepared.warnings, *done.warnings),
        verified=prepared.source.verified,
        left_out=prepared.plan.left_out,
        repo=prepared.source.name,
        commit=prepared.source.commit,
        share=workspace.name or None,
        seconds=meter.seconds,
        stages=meter.stages(),
    )


def _outline(prepared: Prepared) -> Outline:
    """The outline with the files that are to be removed: they must be known after an interruption
    too, when the manifest that names them is gone. Vision may also be missing because an earlier
    run left it out of an output that is complete without it."""
    before, outline, replaced = (
        _manifest_there(prepared.output),
        prepared.outline,
        prepared.replaced,
    )
    complete_before = before is not None and before.complete and before.text_only and not replaced
    written = {file.path for file in prepared.rest.files} | prepared.small_files.keys()
    return replace(
        outline,
        text_only=outline.text_only or complete_before,
        former=tuple(sorted(replaced.keys() - written)),
    )


def finish(output: Path) -> Manifest:
    """Write the manifest of an output that the shares of several runs have made.

    Raises OutputError if something is missing, UnavailableError if a run is at work.
    """
    before = _manifest_there(output)
    begun = (output / WORK_FOLDER / OUTLINE_NAME).exists()  # a run that did not end
    if before is not None and before.complete and not begun:
        return before
    outline = read_outline(output)
    with publish.working_in(publish.Workspace(output)) as workspace:
        left = [name for name in outline.former if (output / name).exists()]
        if left:
            raise OutputError(
                f"{output} still holds {left[0]} of an earlier conversion: run the conversion that"
                " was to replace it once more."
            )
        missing = [*outline.missing_blobs(output), *outline.missing_small_files(output)]
        if missing:
            raise UnfinishedOutputError(
                f"{output} lacks {missing[0]}"
                + (f" and {len(missing) - 1} other files" if missing[1:] else "")
                + ": run the shares that have not ended once more."
            )
        manifest = outline.manifest(output)
        _write_manifest(workspace, manifest)
    return manifest


def _leave_outline(workspace: publish.OwnedWorkspace, outline: Outline) -> None:
    path = workspace.output / WORK_FOLDER / OUTLINE_NAME
    if (
        workspace.share
        and path.exists()
        and _same(read_outline(workspace.output)) != _same(outline)
    ):
        raise OutputError(
            f"{path} belongs to a conversion from another source or with other options: give all"
            " shares the same command, or delete that file."
        )
    publish.write_file(workspace, f"{WORK_FOLDER}/{OUTLINE_NAME}", outline.encode())


def _same(outline: Outline) -> Outline:
    """What the outlines of all shares have in common: nothing was there before them."""
    return replace(outline, former=())


def _write_manifest(workspace: publish.OwnedWorkspace, manifest: Manifest) -> None:
    # A file that is there may have been renamed by a run that was killed before its sync, or by a
    # share that has yet to make it.
    for folder in {(workspace.output / name).parent for name in manifest.files}:
        sync_folder(folder)
    publish.write_file(workspace, MANIFEST_NAME, encode_manifest(manifest))
    if manifest.complete:
        publish.remove(workspace, [f"{WORK_FOLDER}/{OUTLINE_NAME}"])


def _manifest_there(output: Path) -> Manifest | None:
    try:
        return read_manifest(output)
    except OutputError:
        return None
