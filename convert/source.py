"""Where a checkpoint comes from: a local folder, or a repository of the Hub at a commit."""

import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import xxhash

from kconvert.convert.progress import Meter
from kconvert.layouts.checkpoint import (
    CONFIG_NAME,
    INDEX_NAME,
    Checkpoint,
    Shard,
    assemble,
    read_checkpoint,
)
from kconvert.layouts.errors import CheckpointError, UnavailableError

if TYPE_CHECKING:
    from kconvert.convert.hub import Repo

T = TypeVar("T")
REPO_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
COMMIT = re.compile(r"[0-9a-f]{40}")
INCOMING = "incoming"  # in the work folder: what is downloaded
WINDOW = 2  # shards that are held at once: one is converted while the next one comes
_SAMPLES = 64
_SAMPLE_BYTES = 4096
_REQUESTS = 8  # at once


class Deliveries(Protocol):
    """The shards of a run's jobs, job after job: `take`, convert, `check`, publish, `release`."""

    def take(self, job: int) -> None:
        """Wait until a job's shards are there."""

    def path(self, shard: str) -> Path:
        """Where a taken shard lies."""

    def check(self, job: int) -> None:
        """Raise CheckpointError where a shard is not what it was when the plan was made."""

    def release(self, job: int, forget: Callable[[str], object]) -> None:
        """The job's blobs are published. `forget` is told the shards that no later job needs."""


class Source(Protocol):
    """A checkpoint that is ready to be converted."""

    checkpoint: Checkpoint
    contents: dict[str, str]  # shard → identity of its content
    name: str | None  # repository and commit, of a Hub source
    commit: str | None

    @property
    def folder(self) -> Path:
        """Where small files lie, and shards as far as they are there."""

    def path(self, name: str) -> Path:
        """A file in `folder`, with links followed."""

    def deliveries(
        self, order: list[set[str]], work: Path, meter: Meter
    ) -> AbstractContextManager[Deliveries]:
        """`order[i]`: the shards that job i needs. `work`: for what is downloaded."""

    def to_download(self, shards: set[str], work: Path) -> dict[str, int]:
        """Bytes that are missing of those of the shards that are not all here."""

    def disk_for(self, order: list[set[str]], work: Path) -> dict[Path, int]:
        """Bytes that downloading for the jobs takes at a time, by the files they go into."""


@dataclass(frozen=True)
class LocalSource:
    """A checkpoint folder, with the identity of every shard that is there."""

    folder: Path
    checkpoint: Checkpoint
    contents: dict[str, str]  # shard → content_id
    stamps: dict[str, tuple[int, ...]]  # shard → what changes when its file does
    name: None = None
    commit: None = None

    def path(self, name: str) -> Path:
        return (self.folder / name).resolve()

    def deliveries(
        self, order: list[set[str]], work: Path, meter: Meter
    ) -> AbstractContextManager[Deliveries]:
        return nullcontext(_Here(self, order))

    def to_download(self, shards: set[str], work: Path) -> dict[str, int]:
        return {}

    def disk_for(self, order: list[set[str]], work: Path) -> dict[Path, int]:
        return {}


@dataclass(frozen=True)
class _Here:
    """Shards that lie in a folder; what somebody else does to them is noticed."""

    source: LocalSource
    order: list[set[str]]

    def take(self, job: int) -> None:
        pass

    def path(self, shard: str) -> Path:
        return self.source.path(shard)

    def check(self, job: int) -> None:
        for name in self.order[job]:
            if _stamp(self.path(name)) != self.source.stamps[name]:
                raise CheckpointError(
                    f"{name} was changed while it was being converted: wait until nobody writes to"
                    " it, then run the same command again."
                )

    def release(self, job: int, forget: Callable[[str], object]) -> None:
        pass


@dataclass(frozen=True)
class HubSource:
    """A repository at a commit. Small files are in the cache, shards may be."""

    repo: "Repo"
    folder: Path
    checkpoint: Checkpoint
    contents: dict[str, str]  # shard → the Hub's hash
    keep_shards: bool

    @property
    def name(self) -> str:
        return self.repo.name

    @property
    def commit(self) -> str:
        return self.repo.commit

    def path(self, name: str) -> Path:
        return (self.folder / name).resolve()

    def deliveries(
        self, order: list[set[str]], work: Path, meter: Meter
    ) -> AbstractContextManager[Deliveries]:
        from kconvert.convert.arrivals import Arrivals

        return Arrivals(self.repo, self.checkpoint.shards, order, work, meter, self.keep_shards)

    def to_download(self, shards: set[str], work: Path) -> dict[str, int]:
        repo, incoming = self.repo, work / INCOMING
        return {
            name: repo.files[name].size
            - (0 if self.keep_shards else repo.bytes_there(incoming, name))
            for name in shards
            if repo.cached(name) is None
        }

    def disk_for(self, order: list[set[str]], work: Path) -> dict[Path, int]:
        missing = self.to_download(set().union(*order), work)
        if self.keep_shards:
            return {self.folder / name: size for name, size in missing.items()}
        # A job's shards lie there until it is published, when those of the next are there too.
        together = [a | b for a, b in pairwise([*order, set()])]
        together.append(set(sorted(missing, key=lambda name: -missing[name])[:WINDOW]))
        most = max(together, key=lambda names: sum(missing.get(name, 0) for name in names))
        return {work / INCOMING / name: missing[name] for name in most if name in missing}


def open_local(folder: Path) -> LocalSource:
    """Read headers and sampled blocks of the checkpoint in `folder`.

    Raises CheckpointError, also where the folder does not exist.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is neither a folder here nor the name of a repository on the Hub, like"
            " moonshotai/Kimi-K2.6: give one of them."
        )
    checkpoint = read_checkpoint(folder)
    stamps = {name: _stamp(folder / name) for name in checkpoint.shards}
    contents = {name: content_id(folder / name, s) for name, s in checkpoint.shards.items()}
    return LocalSource(folder, checkpoint, contents, stamps)


def open_hub(
    name: str, revision: str | None, cache_dir: Path | None = None, keep_shards: bool = False
) -> HubSource:
    """Get small files and headers of the Hub's repository `name` at `revision`.

    Raises CheckpointError and UnavailableError.
    """
    try:
        from kconvert.convert.hub import open_repo  # takes as long to import as all else
    except ValueError:  # the client's own, of an endpoint that it cannot take apart
        raise UnavailableError("HF_ENDPOINT or a proxy variable is no URL; correct it.") from None

    repo = open_repo(name, revision, cache_dir and cache_dir.absolute())
    folder = repo.fetch_checked(CONFIG_NAME).parent
    if INDEX_NAME in repo.files:
        repo.fetch_checked(INDEX_NAME)
    sizes = {file: entry.size for file, entry in repo.files.items()}
    checkpoint = assemble(
        folder,
        sizes,
        lambda names: dict(zip(names, _at_once(repo.read_header, names), strict=True)),
    )
    _at_once(repo.fetch_checked, checkpoint.small_files)
    if repo.offline:
        note = f"HF_HUB_OFFLINE: the {len(sizes)} files that the cache has are taken for all"
        checkpoint = replace(checkpoint, ignored=(*checkpoint.ignored, note))
    contents = {shard: repo.files[shard].oid for shard in checkpoint.shards}
    return HubSource(repo, folder, checkpoint, contents, keep_shards)


def _at_once(call: Callable[[str], T], names: Iterable[str]) -> list[T]:
    """What some requests bring, or the first that fails, not waiting for the others."""
    pool = ThreadPoolExecutor(_REQUESTS)
    try:
        futures = [pool.submit(call, name) for name in names]
        for future in wait(futures, return_when=FIRST_EXCEPTION).done:
            future.result()
        return [future.result() for future in futures]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _stamp(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def content_id(path: Path, shard: Shard) -> str:
    """Which content a local shard has: xxh3_128 of its header and of 64 blocks spread over it.

    Headers alone would not do: K2.5, K2.6 and K2.7 share every name and shape.
    """
    state = xxhash.xxh3_128(shard.header)
    last = max(shard.data_start, shard.size - _SAMPLE_BYTES)
    fd = os.open(path, os.O_RDONLY)
    try:
        for i in range(_SAMPLES):
            at = shard.data_start + (last - shard.data_start) * i // (_SAMPLES - 1)
            state.update(os.pread(fd, _SAMPLE_BYTES, at))
    finally:
        os.close(fd)
    return state.hexdigest()
