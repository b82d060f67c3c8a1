"""`kconvert bench load`: blobs into a GPU's memory, from the page cache and from disk.

The engine's own filler, beside what the machine does at best in the same run: preads into pinned
buffers that go no further, and reads past the page cache (O_DIRECT). Started by torchrun, every
rank loads its own blobs at the same time, and the rates are the host's.
"""

import ctypes
import mmap
import os
import re
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kconvert.layouts.blob import read_blob
from kconvert.layouts.errors import DeviceMemoryError, UnavailableError, UnsupportedError
from kconvert.layouts.header import TensorEntry
from kconvert.layouts.reader import NUMPY_BITS
from kconvert.layouts.stored.slicing import Span
from kconvert.runtime.distributed import Ranks, all_ranks_from_environment
from kconvert.runtime.filling.device import memory_on
from kconvert.runtime.filling.filler import CHUNK_BYTES, Filler, Transfer

GOALS = {"page cache": 0.9, "page cache, digests": 0.75, "disk": 0.95}  # of the best rate
GOAL_GBPS = 30  # from the page cache, without digests
PASSES = {"page cache": 5, "disk": 2}
_THREADS = (4, 8, 12, 16)  # no more than cores
_IN_FLIGHT = (4, 16)  # reads that a disk has at a time, whatever the number of cores
_RANK = re.compile(r"rank-(\d{5})-of-\d{5}")
_ROOM = 1 << 30  # of the device's memory, beside the blobs


class Loaded(NamedTuple):
    """A blob and where it goes."""

    path: Path
    image: Tensor  # uint8, its data
    transfers: list[Transfer]

    @property
    def nbytes(self) -> int:
        return self.image.numel()


def bench_load(
    paths: Sequence[Path], device: str = "auto", report: Callable[[str], object] = print
) -> dict[str, Any]:
    """GB/s of the blobs at `paths` (files, or folders of them), a file and a folder at a time, with
    digests and without; the median of the passes, of all ranks together.

    `device` "cpu" measures the host's part: into its own memory. Raises UnavailableError if
    there is no GPU or too little of its memory, UnsupportedError if there are no blobs.
    """
    if device != "cpu" and not torch.cuda.is_available():
        raise UnavailableError(
            "bench load needs an NVIDIA GPU, and torch finds none here: --device cpu measures the"
            " host's part, into its own memory."
        )
    ranks = all_ranks_from_environment()
    where = torch.device("cpu")
    if device != "cpu":
        ranks = ranks.on_gpus()
        where = torch.device("cuda", torch.cuda.current_device())
    blobs = [_load(path, where) for path in _mine(blobs_of(paths), ranks)]
    report = report if ranks.rank == 0 else lambda _: None
    bench = _Bench(blobs, where, ranks, report)
    best = bench.best("page cache", 0)
    rows = bench.rows("page cache", best["gbps"])
    raw = bench.raw()
    if raw is not None:
        rows += bench.rows("disk", raw["gbps"])
    return {
        "bench": "load",
        "rank": ranks.rank,
        "ranks": ranks.size,
        "device": where.type,
        "card": torch.cuda.get_device_name() if where.type == "cuda" else None,
        "cores": len(os.sched_getaffinity(0)),
        "date": datetime.now(UTC).date().isoformat(),
        "files": len(blobs),
        "bytes": sum(blob.nbytes for blob in blobs),
        "buffer_bytes": bench.buffer_bytes,
        "best_pread": best,
        "raw_direct": raw,
        "goals": GOALS | {"GB/s": GOAL_GBPS},
        "rows": rows,
    }


def blobs_of(paths: Sequence[Path]) -> list[Path]:
    """The blobs among these files, and in these folders and the folders below them."""
    found: list[Path] = []
    for path in paths:
        found += sorted(path.rglob("*.safetensors")) if path.is_dir() else [path]
    if not found:
        raise UnsupportedError(
            f"{', '.join(map(str, paths))}: no blob (*.safetensors) found: name a rank's folder."
        )
    return found


def _mine(paths: list[Path], ranks: Ranks) -> list[Path]:
    """What this rank loads: its folders, in turn if there are more, and all that is in none."""
    mine = []
    for path in paths:
        folder = _RANK.fullmatch(path.parent.name)
        if folder is None or int(folder[1]) % ranks.size == ranks.rank:
            mine.append(path)
    if not mine:
        raise UnsupportedError(
            f"of {len(paths)} blob(s) none is rank {ranks.rank}'s of {ranks.size}: give each rank"
            " some, or start fewer."
        )
    return mine


def _load(path: Path, device: torch.device) -> Loaded:
    """Room for a blob's data in one piece, and every tensor's way there."""
    header, info = read_blob(path)
    nbytes = path.stat().st_size - header.data_start
    if device.type == "cuda" and nbytes + _ROOM > (free := torch.cuda.mem_get_info()[0]):
        raise DeviceMemoryError(
            f"{path} needs {nbytes / 1e9:.1f} GB of the GPU's memory beside what was given before"
            f" it, {free / 1e9:.1f} GB are free: give fewer blobs."
        )
    image = torch.empty(nbytes, dtype=torch.uint8, device=device)
    transfers = [
        _transfer(path, entry, info.expert_digests.get(name) or [info.digests[name]],
                  image[entry.start - header.data_start :][: entry.nbytes])
        for name, entry in header.tensors.items() if entry.nbytes
    ]  # fmt: skip
    return Loaded(path, image, transfers)


def _transfer(path: Path, entry: TensorEntry, digests: list[str], memory: Tensor) -> Transfer:
    if entry.dtype not in NUMPY_BITS:
        raise UnsupportedError(f"{path}, tensor {entry.name} is {entry.dtype}, which is not read.")
    experts = len(digests)
    bits = torch.int32 if np.dtype(NUMPY_BITS[entry.dtype]).itemsize == 4 else torch.int16
    target = memory.view(bits).view(experts, -1, entry.shape[-1] if experts > 1 else 1)
    rows = target.shape[1]
    return Transfer(
        path, entry._replace(shape=tuple(target.shape)), digests, range(experts),
        target.numpy() if memory.device.type == "cpu" else target, 0, 1,
        (Span(slice(0, rows), slice(0, rows)),),
    )  # fmt: skip


class _Bench:
    """One rank's blobs, and the passes over them, which all ranks make together."""

    def __init__(
        self, blobs: list[Loaded], device: torch.device, ranks: Ranks, report: Callable[[str], Any]
    ) -> None:
        self._blobs, self._device, self._ranks, self._report = blobs, device, ranks, report
        self._bytes = sum(blob.nbytes for blob in blobs)
        self.buffer_bytes = 0  # of the host's memory, that loading took

    def rows(self, source: str, best: float) -> list[dict[str, Any]]:
        """Each way of loading from there, and its share of the best rate."""
        table = []
        for digests in (False, True):
            memory = memory_on(self._device)
            with Filler(memory, digests) as filler:
                self._fill(filler, self._blobs)  # makes the buffers
                self.buffer_bytes = max(self.buffer_bytes, memory.buffer_bytes)
                for unit in ("file", "folder"):
                    groups = [[b] for b in self._blobs] if unit == "file" else [self._blobs]
                    rates = self._passes(source, partial(self._fill_each, filler, groups))
                    row = {"from": source, "at_a_time": unit, "digests": digests,
                           "threads": filler.threads, **rates,
                           "of_best": round(rates["gbps"] / best, 3)}  # fmt: skip
                    self._report(
                        f"{source:<10} a {unit:<6} at a time{', digests' if digests else ''}:"
                        f" {row['gbps']:.2f} GB/s, {row['of_best']:.2f} of the best"
                    )
                    table.append(row)
        return table

    def best(self, source: str, flags: int) -> dict[str, Any]:
        """The best rate of preads into pinned buffers, by the number of threads."""
        found: dict[str, Any] = {"gbps": 0.0}
        cores = len(os.sched_getaffinity(0))
        for threads in _IN_FLIGHT if flags else sorted({min(t, cores) for t in _THREADS}):
            with self._reading(threads, flags) as read:
                if source == "page cache":
                    read()  # it is there afterwards
                rates = self._passes(source, read)
            self._report(
                f"{source:<10} {'O_DIRECT' if flags else 'pread'} into buffers alone, {threads}"
                f" threads: {rates['gbps']:.2f} GB/s"
            )
            if rates["gbps"] > found["gbps"]:
                found = {"threads": threads, "block_bytes": CHUNK_BYTES, **rates}
        return found

    def raw(self) -> dict[str, Any] | None:
        """The best rate past the page cache; None if the disk cannot be measured."""
        kept = self._forget()
        if kept > 0.01:
            self._report(f"disk: not measured, {kept:.0%} of the files stay in memory (tmpfs?)")
            return None
        try:
            return self.best("disk", os.O_DIRECT)
        except OSError as error:
            self._report(f"disk: not measured, the file system has no O_DIRECT ({error.strerror})")
            return None

    def _passes(self, source: str, work: Callable[[], object]) -> dict[str, Any]:
        """GB/s of all ranks together, and of the slowest and the fastest of them, the median."""
        sums, slowest, fastest = [], [], []
        for _ in range(PASSES[source]):
            if source == "disk":
                self._forget()
            self._ranks.gather(np.zeros(1))  # all begin together
            begin = time.perf_counter()
            work()
            mine = np.array([time.perf_counter() - begin, self._bytes])
            seconds, nbytes = np.array(self._ranks.gather(mine)).T
            sums.append(nbytes.sum() / seconds.max() / 1e9)
            slowest.append((nbytes / seconds).min() / 1e9)
            fastest.append((nbytes / seconds).max() / 1e9)
        table = {"gbps": sums, "slowest_rank": slowest, "fastest_rank": fastest}
        return {name: round(statistics.median(rates), 3) for name, rates in table.items()}

    def _fill_each(self, filler: Filler, groups: Iterable[Sequence[Loaded]]) -> None:
        for group in groups:
            self._fill(filler, group)

    def _fill(self, filler: Filler, blobs: Sequence[Loaded]) -> None:
        for blob in blobs:
            for transfer in blob.transfers:
                filler.add(transfer)
        filler.wait()

    def _forget(self) -> float:
        """Drop the files from the page cache; the share of them that is still there, on the rank
        that has the most."""
        kept = 0
        for blob in self._blobs:
            fd = os.open(blob.path, os.O_RDONLY)
            try:
                os.fsync(fd)  # what is not yet written cannot be dropped
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                kept += _resident(fd)
            finally:
                os.close(fd)
        share = np.array([kept / self._bytes])
        return float(np.array(self._ranks.gather(share)).max())

    @contextmanager
    def _reading(self, threads: int, flags: int) -> Iterator[Callable[[], object]]:
        """A pass of `threads` over all files, block by block, each into a buffer of its own."""
        buffers = [self._buffer() for _ in range(threads)]
        files = [os.open(blob.path, os.O_RDONLY | flags) for blob in self._blobs]
        blocks = [(fd, at) for fd, blob in zip(files, self._blobs, strict=True)
                  for at in range(0, blob.path.stat().st_size, CHUNK_BYTES)]  # fmt: skip

        def read(thread: int) -> None:
            for fd, at in blocks[thread::threads]:
                os.preadv(fd, [buffers[thread]], at)

        try:
            with ThreadPoolExecutor(threads) as pool:
                yield lambda: deque(pool.map(read, range(threads)), maxlen=0)
        finally:
            for fd in files:
                os.close(fd)

    def _buffer(self) -> memoryview:
        """A buffer that begins on a page, as O_DIRECT requires."""
        if self._device.type == "cpu":
            return memoryview(mmap.mmap(-1, CHUNK_BYTES))
        return torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True).numpy().data


def _resident(fd: int) -> int:
    """How many bytes of a file are in the page cache (mincore, which reads none of it)."""
    size = os.fstat(fd).st_size
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        code = libc.mincore(
            ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size),
            ctypes.c_void_p(pages.ctypes.data),
        )  # fmt: skip
        del view  # or the map could not be closed
    if code:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int((pages & 1).sum()) * mmap.PAGESIZE
