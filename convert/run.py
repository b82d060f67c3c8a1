"""A whole conversion: read the source, plan, look at the output, carry out, write the manifest."""

import gc
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from kconvert.convert import output as judge
from kconvert.convert import publish
from kconvert.convert.execute import execute, memory_bound
from kconvert.convert.output import Found
from kconvert.convert.plan import Plan, Target, make_plan
from kconvert.convert.progress import Meter, Stage, Work
from kconvert.convert.source import COMMIT, REPO_ID, Source, open_hub, open_local
from kconvert.layouts.blob import COMMON_FOLDER
from kconvert.layouts.errors import OutputError, UnsupportedError
from kconvert.layouts.manifest import (
    MANIFEST_NAME,
    WORK_FOLDER,
    Manifest,
    encode_manifest,
    read_manifest,
)
from kconvert.layouts.model import VISION, read_model
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
    def rest(self) -> Plan:
        """What is not published yet."""
        return self.plan.without(self.found.published)

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
    def shards(self) -> set[str]:
        """What is still to be read."""
        return {tensor.shard for job in self.rest.jobs for tensor in job.source_tensors}

    @property
    def download(self) -> dict[str, int]:
        """Bytes that are still to be downloaded, by shard."""
        return self.source.to_download(self.shards, self.output / WORK_FOLDER)

    @property
    def work(self) -> Work:
        """What is left to do, in bytes."""
        return Work(
            sum(self.download.values()), sum(f.nbytes - f.header_bytes for f in self.rest.files)
        )

    @property
    def disk(self) -> dict[str, int]:
        """Bytes by file of everything that will lie on a disk at one time."""
        downloads = self.source.disk_for(self.shards, self.output / WORK_FOLDER)
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
    seconds: float
    stages: dict[str, Stage]  # where they went


def prepare(source: str | Path, output: str | Path, options: Options) -> Prepared:
    """Read the source's headers, plan, and compare with the output; writes nothing.

    Raises the KconvertErrors of what it calls: the source, the options or what lies in the output
    are refused.
    """
    output = Path(output)
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
    if revision is None or not COMMIT.fullmatch(revision):
        # A branch may have moved since the output was begun.
        revision = judge.recorded_commit(output, source) or revision
    return open_hub(source, revision, options.cache_dir, options.keep_shards)


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
    output, meter = prepared.output, meter or Meter()
    with publish.working_in(output):
        prepared = _looked_at(prepared)  # another run may have ended since
        publish.check_space(output, prepared.disk)
        rest, replaced, before = prepared.rest, prepared.replaced, _manifest_there(output)
        if replaced:
            (output / MANIFEST_NAME).unlink(missing_ok=True)
        bytes_read = execute(rest, prepared.source, output, prepared.workers, meter)
        for name, content in prepared.small_files.items():
            publish.write_file(output, name, content)
        written = {file.path for file in rest.files} | prepared.small_files.keys()
        publish.remove(output, (output / name for name in replaced if name not in written))
        manifest = _manifest(prepared, before)
        publish.write_file(output, MANIFEST_NAME, encode_manifest(manifest))
    return Conversion(
        output,
        len(rest.files),
        len(prepared.found.published & {file.path for file in prepared.plan.files}),
        bytes_read,
        sum(file.nbytes for file in rest.files),
        manifest.complete,
        replaced,
        tuple(sorted(prepared.found.trusted)),
        prepared.source.checkpoint.ignored,
        prepared.plan.left_out,
        prepared.source.name,
        prepared.source.commit,
        meter.seconds,
        meter.stages(),
    )


def _manifest_there(output: Path) -> Manifest | None:
    try:
        return read_manifest(output)
    except OutputError:
        return None


def _manifest(prepared: Prepared, before: Manifest | None) -> Manifest:
    """The manifest of what lies there now. Vision may be wanting where this or an earlier run was
    told to leave it out."""
    plan = prepared.plan
    files = judge.entries(prepared.output, plan, prepared.small_files)
    vision = f"{COMMON_FOLDER}/{VISION}.safetensors"
    asked = prepared.options.text_only or (before is not None and before.text_only)
    text_only = asked and vision not in files
    expected = set(plan.expected) - ({vision} if text_only else set())
    return Manifest(
        layout=plan.target.layout.NAME,
        tp=plan.target.parallelism.tp,
        ep=plan.target.parallelism.ep,
        complete=files.keys() >= expected,
        text_only=text_only,
        repo=plan.target.repo,
        commit=plan.target.commit,
        files=files,
    )
