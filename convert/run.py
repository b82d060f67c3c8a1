"""A whole conversion: read the source, plan, look at the output, carry out, write the manifest."""

import gc
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from kconvert.convert import output as out
from kconvert.convert.execute import execute
from kconvert.convert.plan import Plan, Target, make_plan
from kconvert.convert.source import LocalSource, open_source
from kconvert.layouts.blob import COMMON_FOLDER
from kconvert.layouts.manifest import MANIFEST_NAME, Manifest, encode_manifest
from kconvert.layouts.model import VISION, read_model
from kconvert.layouts.registry import layout_named
from kconvert.layouts.sharding import Parallelism

MAX_WORKERS = 16  # a worker takes 36 MB (K2.6, tp 8); more are not fed by one file system


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
    workers: int | None = None  # None: two a core, one packs while the other waits for the disk


@dataclass(frozen=True)
class Prepared:
    """A conversion that is ready to run: nothing was written yet."""

    source: LocalSource
    output: Path
    plan: Plan  # all of it
    found: out.Found
    small_files: dict[str, bytes] = field(repr=False)
    options: Options = field(default_factory=Options)

    @property
    def rest(self) -> Plan:
        """What is not published yet."""
        return self.plan.without(self.found.published)

    def disks(self) -> list[tuple[Path, int, int]]:
        """(folder, bytes needed, bytes free) of each file system that will be written."""
        needed = out.needed_by_device(self.output, self.sizes)
        return [(folder, size, shutil.disk_usage(folder).free) for folder, size in needed.items()]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of every file that is still to be written, by path."""
        sizes = {file.path: file.nbytes for file in self.rest.files}
        missing = (name for name in self.small_files if not (self.output / name).exists())
        return sizes | {name: len(self.small_files[name]) for name in missing}


@dataclass(frozen=True)
class Conversion:
    """What a conversion did."""

    output: Path
    files_written: int
    files_kept: int
    bytes_read: int
    bytes_written: int
    complete: bool
    ignored: tuple[str, ...]  # sentences on what the source has and nobody read
    left_out: tuple[str, ...]


def prepare(source: str | Path, output: str | Path, options: Options) -> Prepared:
    """Read the source's headers, plan, and compare with the output; writes nothing.

    Raises the KconvertErrors of what it calls: the source or the options are refused.
    """
    output = Path(output)
    with _without_collection():
        opened = open_source(source)
        checkpoint = opened.checkpoint
        out.overlap(opened.folder, map(opened.path, checkpoint.shards), output)
        plan = make_plan(
            read_model(checkpoint),
            opened.contents,
            Target(layout_named(options.layout), Parallelism(options.tp, options.ep)),
            layers=options.layers,
            ranks=options.ranks,
            text_only=options.text_only,
        )
    small = {name: opened.path(name).read_bytes() for name in checkpoint.small_files}
    return Prepared(opened, output, plan, out.look(output, plan, small), small, options)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Hold the garbage collector off: 208,550 tensors are a million objects that all stay, and
    looking through them again and again is half of the plan's time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def run(prepared: Prepared, progress: Callable[[int], None] = lambda _: None) -> Conversion:
    """Carry out a prepared conversion; `progress` is told the bytes written, as they are.

    Raises OutputError where the output holds something else (unless overwriting),
    UnavailableError for lack of space or another run, CheckpointError for faults in the data.
    """
    output, options = prepared.output, prepared.options
    with out.working_in(output):
        # Another run may have published files, or ended, since this one looked.
        found = out.look(output, prepared.plan, prepared.small_files)
        prepared = replace(prepared, found=found)
        out.refuse_conflicts(found, options.overwrite)
        out.check_space(output, prepared.sizes)
        if found.conflicts:
            (output / MANIFEST_NAME).unlink(missing_ok=True)
        rest = prepared.rest
        workers = options.workers or min(MAX_WORKERS, 2 * len(os.sched_getaffinity(0)))
        bytes_read = execute(rest, prepared.source.path, output, workers, progress)
        for name, content in prepared.small_files.items():
            out.write_file(output, name, content)
        written = {output / name for name in prepared.sizes} | {
            output / name for name in prepared.small_files
        }
        out.remove(output, {conflict.path for conflict in found.conflicts} - written)
        manifest = _manifest(prepared)
        out.write_file(output, MANIFEST_NAME, encode_manifest(manifest))
    return Conversion(
        output,
        len(rest.files),
        len(found.published & {file.path for file in prepared.plan.files}),
        bytes_read,
        sum(file.nbytes for file in rest.files),
        manifest.complete,
        prepared.source.checkpoint.ignored,
        prepared.plan.left_out,
    )


def _manifest(prepared: Prepared) -> Manifest:
    plan = prepared.plan
    files = out.entries(prepared.output, plan, prepared.small_files)
    return Manifest(
        layout=plan.target.layout.NAME,
        tp=plan.target.parallelism.tp,
        ep=plan.target.parallelism.ep,
        complete=files.keys() >= set(plan.expected),
        text_only=f"{COMMON_FOLDER}/{VISION}.safetensors" not in files,
        repo=plan.target.repo,
        commit=plan.target.commit,
        files=files,
    )
