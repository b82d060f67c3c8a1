"""Where a checkpoint comes from: a local folder (a Hub repository is not read yet)."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import xxhash

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

    def path(self, name: str) -> Path:
        """The file called `name`, with links followed."""
        return (self.folder / name).resolve()

    def check_unchanged(self, shards: Iterable[str]) -> None:
        """Raise CheckpointError where a shard is not the file any more whose content was taken."""
        for name in shards:
            if _stamp(self.path(name)) != self.stamps[name]:
                raise CheckpointError(
                    f"{name} was changed while it was being converted: wait until nobody writes to"
                    " it, then run the same command again."
                )


def open_source(source: str | os.PathLike[str]) -> LocalSource:
    """Read headers and sampled blocks of the checkpoint in the folder `source`.

    Raises CheckpointError, also where the folder does not exist.
    """
    folder = Path(source)
    if not folder.is_dir():
        raise CheckpointError(
            f"{source} is not a folder here: give the folder of a downloaded checkpoint."
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
