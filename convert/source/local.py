"""A checkpoint in a local folder."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kconvert.convert.progress import Meter
from kconvert.convert.source.protocol import Deliveries
from kconvert.layouts.checkpoint import Checkpoint, Shard, read_checkpoint
from kconvert.layouts.errors import CheckpointError

_SAMPLES = 64
_SAMPLE_BYTES = 4096


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
