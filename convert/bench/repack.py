"""`kconvert bench repack`: packing against a plain copy of the same bytes."""

import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kconvert.convert.bench.machine import machine, seconds_of
from kconvert.layouts.marlin import Marlin
from kconvert.layouts.quantization import Quantization

_LAYOUT = Marlin(Quantization(32))
# (name, rows of the matrix, columns of it, rows packed, columns packed): one expert of K2.6, tp 8.
_SLICES = (
    ("w13", 2048, 7168, range(256, 512), range(7168)),
    ("w2", 7168, 2048, range(7168), range(256, 512)),
)


def bench_repack(pairs: int = 96) -> dict[str, Any]:
    """Marlin packing of one rank's slices against a plain copy of the same bytes, on one core and
    on more at once. Buffers (≥ 0.2 GB a core) are rotated past the last-level cache.

    `on_cores`: how much faster that many threads are than one, packing and copying: where the
    copy does not get faster either, memory is the limit.
    """
    cores = len(os.sched_getaffinity(0))
    rows = []
    for name, n, k, packed_rows, packed_columns in _SLICES:
        workers = [_Slice(n, k, packed_rows, packed_columns) for _ in range(cores)]
        for _ in range(3):
            workers[0].repack()
        times = [(workers[0].repack(), workers[0].copy()) for _ in range(pairs)]
        rows.append(
            {
                "slice": name,
                "bytes": workers[0].nbytes,
                "repack_gbps": workers[0].nbytes / statistics.median(t for t, _ in times) / 1e9,
                "copy_gbps": workers[0].nbytes / statistics.median(t for _, t in times) / 1e9,
                "ratio_to_copy": statistics.median(copy / repack for repack, copy in times),
                "on_cores": {
                    count: {
                        "repack_speedup": _speedup(workers[:count], _Slice.repack),
                        "copy_speedup": _speedup(workers[:count], _Slice.copy),
                    }
                    for count in _core_counts(cores)
                },
            }
        )
    return {"bench": "repack", "machine": machine(), "pairs": pairs, "rows": rows}


def _core_counts(cores: int) -> list[int]:
    """2, 4, 8 … and all of them."""
    return sorted({*(1 << i for i in range(1, cores.bit_length()) if 1 << i <= cores), cores} - {1})


class _Slice:
    """One core's buffers: a slice to pack, and as many bytes to copy, rotated with each turn."""

    def __init__(self, n: int, k: int, rows: range, columns: range) -> None:
        self._rows, self._columns = rows, columns
        self.nbytes = len(rows) * len(columns) // 2
        count = max(3, -(-(200 << 20) // (n * k // 2)))
        shape = _LAYOUT.shape("code", len(rows), len(columns))
        self._sources = [_random((n, k // 8)) for _ in range(count)]
        self._outs = [_aligned(shape) for _ in range(count)]
        # As many bytes as the packing touches, so that both come from memory.
        self._plain = [_random(shape) for _ in range(-(-(200 << 20) // self.nbytes))]
        self._turn = 0

    def repack(self) -> float:
        """Seconds to pack the next slice."""
        self._turn += 1
        at = self._turn % len(self._sources)
        start = time.perf_counter()
        _LAYOUT.pack_into("code", self._sources[at], self._rows, self._columns, self._outs[at], 0)
        return time.perf_counter() - start

    def copy(self) -> float:
        """Seconds to copy as many bytes."""
        self._turn += 1
        at = 2 * self._turn % len(self._plain)
        start = time.perf_counter()
        np.copyto(self._plain[at], self._plain[at - 1])
        return time.perf_counter() - start


def _speedup(workers: list[_Slice], work: Callable[[_Slice], float]) -> float:
    """How much more a thread a worker gets done than one: median of interleaved rounds."""

    def rounds(worker: _Slice) -> None:
        for _ in range(200):
            work(worker)

    ratios = []
    with ThreadPoolExecutor(len(workers)) as pool:
        for _ in range(9):
            alone = seconds_of(lambda: rounds(workers[0]))
            together = seconds_of(lambda: list(pool.map(rounds, workers)))
            ratios.append(len(workers) * alone / together)
    return statistics.median(ratios)


def _aligned(shape: tuple[int, ...]) -> NDArray[np.int32]:
    """On a cache line, as the converter's own buffers are; touched, so that no page is new."""
    size = int(np.prod(shape))
    raw = np.zeros(size + 16, np.int32)
    start = -raw.ctypes.data % 64 // 4
    return raw[start : start + size].reshape(shape)


def _random(shape: tuple[int, ...]) -> NDArray[np.int32]:
    array = _aligned(shape)
    array[...] = np.random.default_rng(0).integers(-(1 << 31), 1 << 31, shape, np.int32)
    return array
