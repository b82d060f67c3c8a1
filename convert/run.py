"""A whole conversion: read the source, plan, look at the output, carry out, write the manifest."""

import gc
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from kconvert.convert import output as judge
from kconvert.convert import publish
from kconvert.convert.execute import execute, memory_bound
from kconvert.convert.outline import OUTLINE_NAME, Outline, read_outline
from kconvert.convert.output import Found
from kconvert.convert.plan import Plan, Target, make_plan
from kconvert.convert.progress import Meter, Stage, Work
from kconvert.convert.share import Share
from kconvert.convert.source import COMMIT, REPO_ID, Source, open_hub, open_local
from kconvert.layouts.blob import digest
from kconvert.layouts.errors import OutputError, UnsupportedError
from kconvert.layouts.manifest import (
    MANIFEST_NAME,
    WORK_FOLDER,
    Manifest,
    encode_manifest,
    read_manifest,
)
from kconvert.layouts.model import read_model
from kconvert.layouts.registry import layout_named
from kconvert.layouts.sharding import Parallelism

MAX_WORKERS = 16  # more are not fed by one file system
BUFFER_BYTES = 1 << 30  # for all workers together, where their number is not asked for


@dataclass(frozen=True)
class Options:
    """What a conversion is asked for; the command line's options by the same names."""

    layout: str = "marlin"
    tp: int = 1
    ep: int = 1
    layers: Collection[int] | None = None
    ranks: Collection[int] | None = None
    text_only: bool = False
    overwrite: bool = False
    workers: int | None = None  # None: see Prepared.workers
    revision: str | None = None  # of a Hub repository; None: main
    cache_dir: Path | None = None  # huggingface_hub's; None: its own default
    keep_shards: bool = False  # download into the cache, and delete nothing
    share: Share | None = None  # of several runs on one output


@dataclass(frozen=True)
class Prepared:
    """A conversion that is ready to run: nothing was written yet."""

    source: Source
    output: Path
    plan: Plan  # all of it
    found: Found
    small_files: dict[str, bytes] = field(repr=False)
    options: Options

    @property
    def place(self) -> publish.Place:
        """Where this run works."""
        return publish.Place(self.output, self.options.share)

    @property
    def rest(self) -> Plan:
        """What is not published yet."""
        return self.plan.without(self.found.published)

    @property
    def outline(self) -> Outline:
        """What the whole output will hold."""
        plan, target = self.plan, self.plan.target
        blobs = dict.fromkeys(plan.expected) | {
            file.path: file.info.fingerprint for file in (*plan.files, *plan.others)
        }
        small = {name: digest(content) for name, content in self.small_files.items()}
        return Outline(
            target.layout.NAME, *target.parallelism, self.options.text_only,
            target.repo, target.commit, self.options.revision, blobs, small,
        )  # fmt: skip

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of every file that is still to be written, by path."""
        sizes = {file.path: file.nbytes for file in self.rest.files}
        replaced = self.replaced
        for name, content in self.small_files.items():
            if name in replaced or not (self.output / name).exists():
                sizes[name] = len(content)
        return sizes

    @property
    def download(self) -> dict[str, int]:
        """Bytes that are still to be downloaded, by shard."""
        shards = {shard for job in self.rest.jobs for shard in job.shards}
        return self.source.to_download(shards, self.place.work)

    @property
    def work(self) -> Work:
        """What is left to do, in bytes."""
        return Work(
            sum(self.download.values()), sum(f.nbytes - f.header_bytes for f in self.rest.files)
        )

    @property
    def disk(self) -> dict[str, int]:
        """Bytes by file of everything that will lie on a disk at one time."""
        order = [job.shards for job in self.rest.jobs]
        downloads = self.source.disk_for(order, self.place.work)
        return self.sizes | {str(path): size for path, size in downloads.items()}

    @property
    def replaced(self) -> dict[str, int]:
        """--overwrite: bytes of every file that will be replaced or removed, by path."""
        paths = [conflict.path for conflict in self.found.conflicts]
        return {path.relative_to(self.output).as_posix(): path.stat().st_size for path in paths}

    @property
    def workers(self) -> int:
        """Threads: as asked for, or two a core (one packs while the other waits for the disk) as
        far as their buffers fit."""
        if self.options.workers is not None:
            return self.options.workers
        most = max(1, BUFFER_BYTES // max(1, memory_bound(self.plan, 1)))
        return min(MAX_WORKERS, 2 * len(os.sched_getaffinity(0)), most)

    def disks(self) -> list[tuple[Path, int, int]]:
        """(folder, bytes needed, bytes free) of each file system that will be written."""
        needed = publish.needed_by_device(self.output, self.disk)
        return [(folder, size, shutil.disk_usage(folder).free) for folder, size in needed.items()]


@dataclass(frozen=True)
class Conversion:
    """What a conversion did."""

    output: Path
    files_written: int
    files_kept: int
    bytes_read: int
    bytes_written: int
    complete: bool
    replaced: dict[str, int]  # --overwrite: bytes of the files that were there, by path
    trusted: tuple[str, ...]  # published files that could not be compared: their shards are gone
    ignored: tuple[str, ...]  # sentences on what the source has and nobody read
    left_out: tuple[str, ...]  # groups that this run was not asked for
    repo: str | None  # of the Hub, and the commit
    commit: str | None
    share: str | None  # of several runs
    seconds: float
    stages: dict[str, Stage]  # where they went


def prepare(source: str | Path, output: str | Path, options: Options) -> Prepared:
    """Read the source's headers, plan, and compare with the output; writes nothing.

    Raises the KconvertErrors of what it calls: the source, the options or what lies in the output
    are refused.
    """
    output = Path(output)
    if options.share and options.overwrite:
        raise UnsupportedError(
            "--overwrite is nothing for a share (--shard, or what a launcher has set): none knows"
            " what the others have replaced; delete the old output first."
        )
    with _without_collection():
        opened = _open(str(source), output, options)
        checkpoint = opened.checkpoint
        judge.refuse_reserved(checkpoint.small_files)
        judge.overlap(opened.folder, map(opened.path, checkpoint.shards), output)
        plan = make_plan(
            read_model(checkpoint),
            opened.contents,
            Target(
                layout_named(options.layout),
                Parallelism(options.tp, options.ep),
                opened.name,
                opened.commit,
            ),
            layers=options.layers,
            ranks=options.ranks,
            text_only=options.text_only,
        )
    if options.share:
        plan = plan.share(options.share)
    small = {name: opened.path(name).read_bytes() for name in checkpoint.small_files}
    return _looked_at(Prepared(opened, output, plan, judge.NOTHING, small, options))


def _open(source: str, output: Path, options: Options) -> Source:
    """The folder `source`, or the Hub's repository of that name."""
    if Path(source).exists() or not REPO_ID.fullmatch(source):
        hub_only = options.revision or options.cache_dir or options.keep_shards
        if hub_only and Path(source).is_dir():
            raise UnsupportedError(
                f"{source} is a folder here: --revision, --cache-dir and --keep-shards are for a"
                " repository of the Hub."
            )
        return open_local(Path(source))
    revision = options.revision
    if not options.overwrite and not COMMIT.fullmatch(revision or ""):
        revision = _begun_at(output, source, revision) or revision
    return open_hub(source, revision, options.cache_dir, options.keep_shards)


def _begun_at(output: Path, repo: str, revision: str | None) -> str | None:
    """The commit from which the same was begun in `output`: a branch may have moved since."""
    with suppress(OutputError):
        outline = read_outline(output)
        if outline.repo == repo and revision in (None, outline.revision):
            return outline.commit
    return judge.commit_of_blobs(output, repo) if revision is None else None


def _looked_at(prepared: Prepared) -> Prepared:
    """With what the output holds now; refused where this run must not go on."""
    found = judge.look(prepared.output, prepared.plan, prepared.small_files)
    judge.refuse_missing(prepared.plan, found)
    judge.refuse_conflicts(found, prepared.options.overwrite)
    return replace(prepared, found=found)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Hold the garbage collector off: 208,550 tensors are a million objects that all stay, and
    looking through them again and again is half of the plan's time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def run(prepared: Prepared, meter: Meter | None = None) -> Conversion:
    """Carry out a prepared conversion; `meter` sees how far it is.

    Raises UnavailableError for lack of space or another run, CheckpointError for faults in the
    data, OutputError where something came into the output meanwhile.
    """
    place, output, meter = prepared.place, prepared.output, meter or Meter()
    with publish.working_in(place):
        prepared = _looked_at(prepared)  # another run may have ended since
        publish.check_space(output, prepared.disk)
        rest, replaced, outline = prepared.rest, prepared.replaced, _outline(prepared)
        _leave_outline(place, outline)
        if replaced:
            publish.withdraw(output / MANIFEST_NAME)
        bytes_read = execute(rest, prepared.source, place, prepared.workers, meter)
        # The last share to end writes what belongs to no share.
        last = place.share is None or not outline.missing_blobs(output)
        if last or prepared.options.share.index == 0:
            for name, content in prepared.small_files.items():
                publish.write_file(place, name, content)
        written = {file.path for file in rest.files} | prepared.small_files.keys()
        publish.remove(output, (output / name for name in replaced if name not in written))
        manifest = outline.manifest(output) if last else None
        if manifest:
            _write_manifest(place, manifest)
    return Conversion(
        output,
        len(rest.files),
        len(prepared.found.published & {file.path for file in prepared.plan.files}),
        bytes_read,
        sum(file.nbytes for file in rest.files),
        manifest is not None and manifest.complete,
        replaced,
        tuple(sorted(prepared.found.trusted)),
        prepared.source.checkpoint.ignored,
        prepared.plan.left_out,
        prepared.source.name,
        prepared.source.commit,
        place.share and place.share.name,
        meter.seconds,
        meter.stages(),
    )


def _outline(prepared: Prepared) -> Outline:
    """Vision may also be wanting because an earlier run was told to leave it out."""
    before, outline = _manifest_there(prepared.output), prepared.outline
    text_only = outline.text_only or (before is not None and before.text_only)
    return replace(outline, text_only=text_only)


def finish(output: Path) -> Manifest:
    """Write the manifest of an output that the shares of several runs have made.

    Raises OutputError where something is wanting, UnavailableError where a run is at work.
    """
    before = _manifest_there(output)
    if before is not None and before.complete:
        return before
    outline, place = read_outline(output), publish.Place(output)
    with publish.working_in(place):
        missing = [*outline.missing_blobs(output), *outline.missing_small_files(output)]
        if missing:
            raise OutputError(
                f"{output} lacks {missing[0]}"
                + (f" and {len(missing) - 1} other files" if missing[1:] else "")
                + ": run the shares that have not ended once more."
            )
        manifest = outline.manifest(output)
        _write_manifest(place, manifest)
    return manifest


def _leave_outline(place: publish.Place, outline: Outline) -> None:
    path = place.output / WORK_FOLDER / OUTLINE_NAME
    if place.share and path.exists() and path.read_bytes() != outline.encode():
        raise OutputError(
            f"{path} is of a conversion from another source or with other options: give all shares"
            " the same command, or delete that file."
        )
    publish.write_file(place, f"{WORK_FOLDER}/{OUTLINE_NAME}", outline.encode())


def _write_manifest(place: publish.Place, manifest: Manifest) -> None:
    publish.write_file(place, MANIFEST_NAME, encode_manifest(manifest))
    if manifest.complete:
        (place.output / WORK_FOLDER / OUTLINE_NAME).unlink(missing_ok=True)


def _manifest_there(output: Path) -> Manifest | None:
    try:
        return read_manifest(output)
    except OutputError:
        return None
