"""A checkpoint in a local folder."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import xxhash

from kconvert.convert.progress import Meter
from kconvert.convert.source.hashes import known_oid, oid_of
from kconvert.convert.source.protocol import Deliveries
from kconvert.layouts.checkpoint import INDEX_NAME, Checkpoint, Shard, read_checkpoint
from kconvert.layouts.errors import ChangedFileError, CheckpointError, OptionError
from kconvert.layouts.fields import CONFIG_NAME
from kconvert.layouts.manifest import MANIFEST_NAME

_SAMPLES = 64
_SAMPLE_BYTES = 4096
_BLANK = bytes(4096)


@dataclass(frozen=True)
class LocalSource:
    """A checkpoint folder, with the identity of every shard that is there."""

    folder: Path
    checkpoint: Checkpoint
    contents: dict[str, str]  # shard → content_id, for a conversion
    stamps: dict[str, tuple[int, ...]]  # shard → what changes when its file does
    warnings: tuple[str, ...]
    oids: dict[str, str] | None  # shard → the hash it must have; None: nothing is compared
    name: str | None = None  # repository and commit, if they are known
    commit: str | None = None

    @property
    def verified(self) -> bool:
        """Whether contents are compared with the hashes that they should have."""
        return self.oids is not None

    def path(self, name: str) -> Path:
        return (self.folder / name).resolve()

    def deliveries(
        self, order: list[set[str]], work: Path, meter: Meter
    ) -> AbstractContextManager[Deliveries]:
        return _Here(self, order, meter)

    def to_download(self, shards: set[str], work: Path) -> dict[str, int]:
        return {}

    def disk_for(self, order: list[set[str]], work: Path) -> dict[Path, int]:
        return {}

    def finished(self, path: str, fingerprint: str) -> Path | None:
        return None


class _Here:
    """Shards that lie in a folder; if another program changes them, that is noticed. If hashes are
    known, a thread compares a job's shards while it is converted."""

    def __init__(self, source: LocalSource, order: list[set[str]], meter: Meter) -> None:
        self._source, self._order, self._meter = source, order, meter
        self._checker = ThreadPoolExecutor(1, thread_name_prefix="check")
        self._checks: dict[str, Future[None]] = {}
        self._stop = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._checker.shutdown(cancel_futures=True)

    def ready(self, job: int) -> bool:
        return True

    def take(self, job: int) -> None:
        if self._source.oids is not None:
            for name in sorted(self._order[job] - self._checks.keys()):
                oid = self._source.oids[name]
                self._checks[name] = self._checker.submit(self._compare, name, oid)

    def path(self, shard: str) -> Path:
        return self._source.path(shard)

    def check(self, job: int) -> None:
        for name in sorted(self._order[job]):
            if name in self._checks:
                self._checks[name].result()
            if stamp(self.path(name)) != self._source.stamps[name]:
                raise ChangedFileError(
                    f"{name} was changed while it was being read: wait until nobody writes to"
                    " it, then run the same command again."
                )

    def release(self, job: int, forget: Callable[[str], object]) -> None:
        pass

    def _compare(self, name: str, oid: str) -> None:
        with self._meter.busy("check", self._source.checkpoint.shards[name].size):
            refuse_other_content(self.path(name), name, oid, self._go_on)

    def _go_on(self) -> None:
        if self._stop.is_set():
            raise CancelledError


def refuse_other_content(
    path: Path, name: str, oid: str, go_on: Callable[[], object] = lambda: None
) -> None:
    """Raise ChangedFileError if a file has another hash than it was downloaded with."""
    found = oid_of(path, oid, go_on)
    if found != oid:
        raise ChangedFileError(
            f"{name} has the hash {found}, expected {oid}: it is damaged; download it again."
        )


def hashes_at_hand(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The hash that each file must have, for --verify.

    Raises OptionError if the hash of one is not known here.
    """
    oids = {name: known_oid(folder / name) for name in names}
    unknown = [name for name, oid in oids.items() if oid is None]
    if unknown:
        more = f" (nor of {len(unknown) - 1} others)" if unknown[1:] else ""
        raise OptionError(
            f"--verify: no hash of {folder / unknown[0]} is at hand{more}: hashes come with"
            " huggingface_hub's cache or its downloads into a folder; give the repository's name as"
            " the source, or leave --verify out."
        )
    return {name: oid for name, oid in oids.items() if oid is not None}


def _small_files(folder: Path, checkpoint: Checkpoint) -> list[str]:
    names = (CONFIG_NAME, INDEX_NAME, *checkpoint.small_files)
    return [name for name in dict.fromkeys(names) if (folder / name).is_file()]


def open_local(folder: Path, verify: bool = False) -> LocalSource:
    """The source of a conversion: as `read_local`, and sampled blocks of each shard too."""
    source = read_local(folder, verify)
    shards = source.checkpoint.shards
    return replace(
        source,
        contents={name: content_id(folder / name, shard) for name, shard in shards.items()},
        warnings=tuple(_blank_tails(folder, source.checkpoint)),
    )


def read_local(folder: Path, verify: bool = False) -> LocalSource:
    """Read headers of the checkpoint in `folder`; `verify`: also compare small files with the
    hashes at hand, and shards as they are read.

    Raises CheckpointError, also if the folder does not exist; OptionError if there is nothing to
    verify with.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is neither a folder here nor the name of a repository on the Hub, like"
            " moonshotai/Kimi-K2.6: give one of them."
        )
    if (folder / MANIFEST_NAME).exists():
        raise CheckpointError(
            f"{folder} holds {MANIFEST_NAME}: it is an output of kconvert, not a checkpoint; give"
            " the checkpoint it was made from, or use `kconvert reshard` or `kconvert export`."
        )
    checkpoint = read_checkpoint(folder)
    oids = None
    if verify:
        small = _small_files(folder, checkpoint)
        oids = hashes_at_hand(folder, [*small, *checkpoint.shards])
        for name in small:
            refuse_other_content(folder / name, name, oids[name])
    return LocalSource(
        folder=folder,
        checkpoint=checkpoint,
        contents={},
        stamps={name: stamp(folder / name) for name in checkpoint.shards},
        warnings=(),
        oids=oids,
    )


def _blank_tails(folder: Path, checkpoint: Checkpoint) -> Iterator[str]:
    """A sentence on shards that end in zeros, as a file does that was never filled. Padded rows may
    be zero too, so this is a warning."""
    blank = [n for n, shard in checkpoint.shards.items() if _tail(folder / n, shard) == _BLANK]
    if blank:
        others = f" and of {len(blank) - 1} other shards" if blank[1:] else ""
        yield (
            f"the last {len(_BLANK):,} bytes of {blank[0]}{others} are all zero: was it ever"
            " whole? --verify compares hashes if they are at hand"
        )


def _tail(path: Path, shard: Shard) -> bytes:
    """The last 4 KiB of a shard's data, or all of it if it has less."""
    with open(path, "rb") as file:
        file.seek(max(shard.data_start, shard.size - len(_BLANK)))
        return file.read(len(_BLANK))


def stamp(path: Path) -> tuple[int, ...]:
    """What changes when a file does."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def content_id(path: Path, shard: Shard) -> str:
    """The identity of a local shard's content: xxh3_128 of its header and of 64 blocks of its data.

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
