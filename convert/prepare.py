"""Before anything is written: the source opened, the plan made, the output compared with it."""

import gc
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from kconvert.convert.accounts import check_accounts
from kconvert.convert.execute import memory_bound
from kconvert.convert.output import publish, state
from kconvert.convert.output.disk import read_file
from kconvert.convert.output.outline import Outline, read_outline
from kconvert.convert.output.state import OutputState
from kconvert.convert.plan import Plan, Target, make_plan
from kconvert.convert.progress import Work
from kconvert.convert.share import Share
from kconvert.convert.source import (
    COMMIT,
    HubName,
    Source,
    hub_name,
    open_hub,
    open_local,
    revision_of,
)
from kconvert.layouts.blob import digest
from kconvert.layouts.checkpoint import Checkpoint
from kconvert.layouts.errors import OptionError, OutputError
from kconvert.layouts.families.config_keys import UnknownKey, mention_of, warnings_of
from kconvert.layouts.families.known import unknown_config_keys
from kconvert.layouts.header import refuse_lfs_pointer
from kconvert.layouts.model import Model, read_model
from kconvert.layouts.registry import layout_named
from kconvert.layouts.sharding import Parallelism

TOKENIZERS = ("tiktoken.model", "tokenizer.json", "tokenizer.model")
MAX_WORKERS = 16  # one file system does not feed more
BUFFER_BYTES = 1 << 30  # for all workers together, if no number of them is asked for


@dataclass(frozen=True)
class Options:
    """What a conversion is asked for: the command line's options, by the same names."""

    layout: str = "marlin"
    tp: int = 1
    ep: int = 1
    layers: Collection[int] | None = None
    ranks: Collection[int] | None = None
    text_only: bool = False
    overwrite: bool = False
    workers: int | None = None  # None: see worker_count
    revision: str | None = None  # of a Hub repository; None: main
    cache_dir: Path | None = None  # huggingface_hub's; None: its own default
    keep_shards: bool = False  # download into the cache, and delete nothing
    share: Share | None = None  # of several runs on one output
    verify: bool = False  # compare a folder's files with the hashes at hand
    scale_dtype: str | None = None  # "bfloat16": cast the experts' scales to it; None: keep them


@dataclass(frozen=True)
class Prepared:
    """A conversion that is ready to run: nothing was written yet."""

    source: Source
    output: Path
    plan: Plan  # all of it
    state: OutputState
    small_files: dict[str, bytes] = field(repr=False)
    options: Options
    ignored: tuple[str, ...]  # sentences on what the source has and nobody reads
    warnings: tuple[str, ...]  # sentences on what may be wrong with it

    @property
    def workspace(self) -> publish.Workspace:
        """Where this run works."""
        return publish.Workspace(self.output, self.options.share)

    @property
    def rest(self) -> Plan:
        """What is not published yet."""
        return self.plan.without(self.state.published)

    @property
    def outline(self) -> Outline:
        """What the whole output will hold."""
        plan, target = self.plan, self.plan.target
        blobs = dict.fromkeys(plan.expected) | {
            file.path: file.fingerprint for file in (*plan.files, *plan.others)
        }
        small = {name: digest(content) for name, content in self.small_files.items()}
        return Outline(
            layout=target.layout.name,
            tp=target.parallelism.tp,
            ep=target.parallelism.ep,
            text_only=self.options.text_only,
            repo=target.repo,
            commit=target.commit,
            revision=self.options.revision,
            blobs=blobs,
            small_files=small,
        )

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
        return self.source.to_download(shards, self.workspace.work)

    @property
    def work(self) -> Work:
        """What is left to do, in bytes."""
        return Work(
            sum(self.download.values()), sum(f.nbytes - f.header_bytes for f in self.rest.files)
        )

    @property
    def disk(self) -> dict[str, int]:
        """Bytes by file of everything that will lie on disk at one time."""
        order = [job.shards for job in self.rest.jobs]
        downloads = self.source.disk_for(order, self.workspace.work)
        return self.sizes | {str(path): size for path, size in downloads.items()}

    @property
    def replaced(self) -> dict[str, int]:
        """--overwrite: bytes of every file that will be replaced or removed, by path."""
        paths = [conflict.path for conflict in self.state.conflicts]
        return {path.relative_to(self.output).as_posix(): path.stat().st_size for path in paths}

    @property
    def workers(self) -> int:
        """See `worker_count`."""
        return worker_count(self.plan, self.options.workers)

    def disks(self) -> list[tuple[Path, int, int]]:
        """(folder, bytes needed, bytes free) of each file system that will be written."""
        needed = publish.needed_by_device(self.output, self.disk)
        return [(folder, size, shutil.disk_usage(folder).free) for folder, size in needed.items()]


def worker_count(plan: Plan, asked: int | None) -> int:
    """The number of workers: as asked for, or two a core (one packs while the other waits for the
    disk) as far as their buffers fit."""
    if asked is not None:
        return asked
    most = max(1, BUFFER_BYTES // max(1, memory_bound(plan, 1)))
    return min(MAX_WORKERS, 2 * len(os.sched_getaffinity(0)), most)


def prepare(source: str | Path, output: str | Path, options: Options) -> Prepared:
    """Read the source's headers, plan, and compare with the output; writes nothing.

    Raises a KconvertError if the source, the options or what lies in the output is refused.
    """
    output = Path(output)
    if options.share and options.overwrite:
        raise OptionError(
            "--overwrite cannot be given to a share (--share, or what a launcher has set): no share"
            " knows what the others have replaced; delete the old output first."
        )
    layout_named(options.layout)  # before anything is fetched
    with without_collection():
        name, options = _named(str(source), options)
        opened = _open(name or Path(source), output, options)
        state.refuse_reserved(opened.checkpoint.small_files)
        return prepare_opened(opened, read_model(opened.checkpoint), output, options)


def prepare_opened(opened: Source, model: Model, output: Path, options: Options) -> Prepared:
    """`prepare` for a source that is open, and the model in it."""
    checkpoint = opened.checkpoint
    state.refuse_overlap(opened.folder, map(opened.path, checkpoint.shards), output)
    plan = make_plan(
        model,
        opened.contents,
        Target(
            layout=layout_named(options.layout)(model.dims.quantization),
            parallelism=Parallelism(options.tp, options.ep),
            repo=opened.name,
            commit=opened.commit,
            scale_dtype=_scale_dtype(options.scale_dtype, model),
        ),
        layers=options.layers,
        ranks=options.ranks,
        text_only=options.text_only,
    )
    check_accounts(plan)
    if options.share:
        plan = plan.share(options.share)
    small = _small_files(opened)
    unknown = unknown_config_keys(checkpoint.config)
    return with_current_state(
        Prepared(
            source=opened,
            output=output,
            plan=plan,
            state=state.EMPTY,
            small_files=small,
            options=options,
            ignored=_ignored(checkpoint, model, unknown),
            warnings=(
                *opened.warnings,
                *model.family.warnings,
                *warnings_of(unknown),
                *_no_tokenizer(checkpoint),
            ),
        )
    )


def _ignored(checkpoint: Checkpoint, model: Model, unknown: list[UnknownKey]) -> tuple[str, ...]:
    """Sentences on what the source has and nobody reads."""
    notes = [*checkpoint.ignored]
    if model.skipped:
        notes.append(f"{len(model.skipped)} rotary buffers (inv_freq): computed, not read")
    if model.quantized_beside:
        notes.append(
            f"{model.quantized_beside} matrices beside the experts are quantized too: they stay"
            " whole and as they are"
        )
    return (*notes, *mention_of(unknown))


def _scale_dtype(asked: str | None, model: Model) -> str | None:
    """The safetensors dtype that scales are cast to; OptionError if that cannot be done."""
    if asked is None:
        return None
    if asked != "bfloat16":
        raise OptionError(f"--scale-dtype {asked}: scales are cast to bfloat16 or kept.")
    if model.dims.quantization.scheme == "mxfp4":
        raise OptionError(
            "--scale-dtype bfloat16: MXFP4's scales are powers of two in a byte, and stay so: leave"
            " the option out."
        )
    return "BF16"


def _no_tokenizer(checkpoint: Checkpoint) -> list[str]:
    if any(name in checkpoint.small_files for name in TOKENIZERS):
        return []
    return [f"the source has no tokenizer ({', '.join(TOKENIZERS)}): text cannot be read or made"]


def _small_files(source: Source) -> dict[str, bytes]:
    """The small files' contents. Raises CheckpointError if one is a Git LFS pointer."""
    contents = {}
    for name in source.checkpoint.small_files:
        contents[name] = read_file(source.path(name))
        refuse_lfs_pointer(name, contents[name])
    return contents


def _named(source: str, options: Options) -> tuple[HubName | None, Options]:
    """The repository that `source` names, None if it is a path; the options with its revision."""
    name = hub_name(source)
    if name is None:
        return name, options
    return name, replace(options, revision=revision_of(name, options.revision))


def _open(source: HubName | Path, output: Path, options: Options) -> Source:
    """Open the folder or the Hub's repository that is the source."""
    if isinstance(source, Path):
        hub_only = options.revision or options.cache_dir or options.keep_shards
        if hub_only and source.is_dir():
            raise OptionError(
                f"{source} is a folder here: --revision, --cache-dir and --keep-shards are for a"
                " repository of the Hub."
            )
        return open_local(source, options.verify)
    repo, revision = source.repo, options.revision
    if not options.overwrite and not COMMIT.fullmatch(revision or ""):
        revision = _begun_at(output, repo, revision) or revision
    return open_hub(repo, revision, options.cache_dir, options.keep_shards)


def _begun_at(output: Path, repo: str, revision: str | None) -> str | None:
    """The commit from which the same conversion was begun in `output`: a branch may have moved
    since."""
    with suppress(OutputError):
        outline = read_outline(output)
        if outline.repo == repo and revision in (None, outline.revision):
            return outline.commit
    return state.commit_of_blobs(output, repo) if revision is None else None


def with_current_state(prepared: Prepared) -> Prepared:
    """`prepared` with what the output holds now. Raises MissingFileError or OccupiedOutputError if
    this run must not go on."""
    now = state.read_state(prepared.output, prepared.plan, prepared.small_files)
    state.refuse_missing(prepared.plan, now)
    state.refuse_conflicts(now, prepared.options.overwrite)
    return replace(prepared, state=now)


@contextmanager
def without_collection() -> Iterator[None]:
    """Hold the garbage collector off: 208,550 tensors are a million objects that all stay, and
    looking through them again and again is half of the plan's time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
