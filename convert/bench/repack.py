"""`kconvert bench repack`: packing against a plain copy of the same bytes."""

import math
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kconvert.convert.bench.machine import machine, seconds_of
from kconvert.layouts.formats.transpose import transpose_into
from kconvert.layouts.marlin import Marlin
from kconvert.layouts.quantization import Quantization, Role
from kconvert.layouts.reader import Scratch

_ROTATED = 200 << 20  # bytes a core, past the last-level cache


class _Case(NamedTuple):
    """A rank's slice of an expert's matrix [n, k]: its rows, its columns, what is packed of it."""

    name: str
    quantization: Quantization
    n: int
    k: int
    rows: range
    columns: range
    roles: tuple[Role, ...]
    transposed: bool = False  # as GPTQ stores it: the whole matrix is transposed first


def _cases(kind: str, quantization: Quantization, n: int, k: int) -> tuple[_Case, _Case]:
    """gate and down of an expert at tp 8, with everything that is stored of them."""
    part, roles = range(n // 8, n // 4), quantization.roles
    return (
        _Case(f"w13 {kind}", quantization, n, k, part, range(k), roles),
        _Case(f"w2 {kind}", quantization, k, n, range(k), part, roles),
    )


_K26, _GPTQ = Quantization(32), Quantization(128)
_CASES = (
    # Only the codes of one expert of K2.6, tp 8; then each format, with scales and zero points.
    _Case("w13", _K26, 2048, 7168, range(256, 512), range(7168), ("code",)),
    _Case("w2", _K26, 7168, 2048, range(7168), range(256, 512), ("code",)),
    *_cases("INT8", Quantization(128, 8), 2048, 7168),
    *_cases("INT4 zp", Quantization(32, zero_point=True), 2048, 7168),
    *_cases("MXFP4", Quantization(32, scheme="mxfp4"), 3072, 3584),
    _Case("w13 GPTQ", _GPTQ, 1536, 4096, range(1536), range(4096), _GPTQ.roles, True),
)


def bench_repack(pairs: int = 96) -> dict[str, Any]:
    """Marlin packing of one rank's slices against a plain copy of the same bytes, on one core and
    on more at once. Buffers (≥ 0.2 GB a core) are rotated past the last-level cache.

    `on_cores`: how much faster that many threads are than one, packing and copying: if the copy
    does not get faster either, memory is the limit.
    """
    cores = len(os.sched_getaffinity(0))
    rows = []
    for case in _CASES:
        workers = [_Slice(case) for _ in range(cores)]
        for _ in range(3):
            workers[0].repack()
        times = [(workers[0].repack(), workers[0].copy()) for _ in range(pairs)]
        rows.append(
            {
                "slice": case.name,
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

    def __init__(self, case: _Case) -> None:
        self._case, self._layout = case, Marlin(case.quantization)
        q, n, k = case.quantization, case.n, case.k
        dtypes = {role: _dtype(role, q) for role in case.roles}
        stored = {role: q.plain_shape(role, n, k) for role in case.roles}
        packed = {
            role: self._layout.shape(role, len(case.rows), len(case.columns)) for role in case.roles
        }
        self.nbytes = sum(_nbytes(shape, dtypes[role]) for role, shape in packed.items())
        whole = sum(_nbytes(shape, dtypes[role]) for role, shape in stored.items())
        count = max(3, -(-_ROTATED // whole))
        turned = slice(None, None, -1 if case.transposed else 1)
        self._sources = [
            {role: _random(shape[turned], dtypes[role]) for role, shape in stored.items()}
            for _ in range(count)
        ]
        self._outs = [
            {role: _aligned(shape, dtypes[role]) for role, shape in packed.items()}
            for _ in range(count)
        ]
        # As many bytes as the packing touches, so that both come from memory.
        words = (self.nbytes // 4,)
        self._plain = [_random(words, np.int32) for _ in range(-(-_ROTATED // self.nbytes))]
        self._scratch = Scratch()
        self._turn = 0

    def repack(self) -> float:
        """Seconds to pack the next slice."""
        self._turn += 1
        at = self._turn % len(self._sources)
        case, outs = self._case, self._outs[at]
        start = time.perf_counter()
        for role, source in self._sources[at].items():
            if case.transposed:
                plain = self._scratch.take(role, source.shape[::-1], source.dtype)
                transpose_into(source, plain)
                source = plain
            self._layout.pack_into(role, source, case.rows, case.columns, outs[role], 0)
        return time.perf_counter() - start

    def copy(self) -> float:
        """Seconds to copy as many bytes."""
        self._turn += 1
        at = 2 * self._turn % len(self._plain)
        start = time.perf_counter()
        np.copyto(self._plain[at], self._plain[at - 1])
        return time.perf_counter() - start


def _speedup(workers: list[_Slice], work: Callable[[_Slice], float]) -> float:
    """How much more all workers, a thread each, get done than one: median of interleaved rounds."""

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


def _dtype(role: Role, quantization: Quantization) -> Any:
    if role != "scale":
        return np.int32
    return np.uint8 if quantization.scheme == "mxfp4" else np.uint16


def _nbytes(shape: tuple[int, ...], dtype: Any) -> int:
    return math.prod(shape) * int(np.dtype(dtype).itemsize)


def _aligned(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """On a cache line, as the converter's own buffers are; touched, so that no page is new."""
    raw = np.zeros(_nbytes(shape, dtype) + 64, np.uint8)
    start = -raw.ctypes.data % 64
    array: NDArray[Any] = raw[start : start + _nbytes(shape, dtype)].view(dtype).reshape(shape)
    return array


def _random(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    array = _aligned(shape, dtype)
    array.view(np.uint8)[...] = np.random.default_rng(0).integers(
        0, 256, array.view(np.uint8).shape, np.uint8
    )
    return array
