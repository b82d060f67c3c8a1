"""`kconvert bench repack` and `bench convert`: ratios, measured pair by pair in one run.

Machines are noisy and shared, so a time alone says little. Every figure is the median of
interleaved pairs: ours, then the yardstick (a copy of the same bytes), in turn.
"""

import mmap
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kconvert.convert import probe
from kconvert.convert.prepare import Options, prepare
from kconvert.convert.run import run
from kconvert.convert.synth import synth
from kconvert.layouts.marlin import pack_weight_into, weight_shape

_COPY_BYTES = 8 << 20
# (name, rows of the matrix, columns of it, rows packed, columns packed): one expert of K2.6, tp 8.
_SLICES = (
    ("w13", 2048, 7168, range(256, 512), range(7168)),
    ("w2", 7168, 2048, range(7168), range(256, 512)),
)


def machine() -> dict[str, Any]:
    """What a figure depends on."""
    cpu = probe.cpu()
    return {
        "cpu": cpu["model"],
        "cores": cpu["cores"],
        "numba": version("numba"),
        "numpy": version("numpy"),
        "date": time.strftime("%Y-%m-%d"),
    }


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
        shape = weight_shape(len(rows), len(columns))
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
        pack_weight_into(self._sources[at], self._rows, self._columns, self._outs[at], 0)
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
            alone = _seconds(lambda: rounds(workers[0]))
            together = _seconds(lambda: list(pool.map(rounds, workers)))
            ratios.append(len(workers) * alone / together)
    return statistics.median(ratios)


def bench_convert(folder: Path, pairs: int = 5) -> dict[str, Any]:
    """Converting one true-size K2.6 MoE layer (tp 8, marlin) against copying its shard with sync:
    as `cp` does, and past the page cache as the converter writes, which is the disk's own limit.

    Works in a new folder under `folder`, which needs 20 GB for the while and is deleted. Peak
    private memory is of this process, which is the only one.
    """
    with tempfile.TemporaryDirectory(prefix="kconvert-bench-", dir=folder) as work:
        return _bench_convert(Path(work), pairs)


def _bench_convert(work: Path, pairs: int) -> dict[str, Any]:
    source, output, copied = work / "source", work / "output", work / "copy"
    (shard,) = synth(source, "k2.6", layers=[1])
    size = shard.stat().st_size
    options = Options(tp=8, layers=[1])
    rows, peak = [], 0
    for turn in range(pairs + 1):
        before = _cpu_seconds()
        with PeakMemory() as memory:
            converting = _seconds(lambda: run(prepare(source, output, options)) and None)
        cpu = _cpu_seconds() - before
        shutil.rmtree(output)
        copying = _seconds(lambda: _copy(shard, copied, 0))
        copied.unlink()
        direct = _seconds(lambda: _copy(shard, copied, os.O_DIRECT))
        copied.unlink()
        if turn > 0:  # the first one compiles or loads the kernels and warms the page cache
            rows.append((converting, copying, direct, cpu / (size / 1e9)))
            peak = max(peak, memory.peak)
    conversions, copies, directs, cpus = zip(*rows, strict=True)
    return {
        "bench": "convert",
        "machine": machine(),
        "pairs": pairs,
        "source_bytes": size,
        "convert_seconds": statistics.median(conversions),
        "copy_seconds": statistics.median(copies),
        "direct_copy_seconds": statistics.median(directs),
        "ratio_to_copy": statistics.median(row[0] / row[1] for row in rows),
        "ratio_to_direct_copy": statistics.median(row[0] / row[2] for row in rows),
        "core_seconds_per_gb": statistics.median(cpus),
        "peak_private_bytes": peak,
        "runs": [
            dict(zip(("convert", "copy", "direct_copy"), row[:3], strict=True)) for row in rows
        ],
    }


def bench_plan(runs: int = 5) -> dict[str, Any]:
    """Planning all of K2.6 (`convert --dry-run`, tp 8) and `--help`, each as a whole process."""
    with tempfile.TemporaryDirectory(prefix="kconvert-bench-") as work:
        source = Path(work) / "source"
        synth(source, "k2.6", sparse=True)
        plan = ["convert", str(source), f"{work}/out", "--tp", "8", "--dry-run", "--quiet"]
        plans = [_process(plan) for _ in range(runs)]
        helps = [_process(["--help"]) for _ in range(runs)]
    return {
        "bench": "plan",
        "machine": machine(),
        "pairs": runs,
        "plan_seconds": statistics.median(seconds for seconds, _ in plans),
        "plan_peak_bytes": max(peak for _, peak in plans),
        "help_seconds": statistics.median(seconds for seconds, _ in helps),
    }


def _process(arguments: list[str]) -> tuple[float, int]:
    """Seconds and peak resident bytes of a kconvert command, its start included."""
    code = "from kconvert.convert import cli; cli.main()"
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        raise RuntimeError(f"kconvert {arguments[0]} ended with status {status}")
    return seconds, 1024 * usage.ru_maxrss


class PeakMemory:
    """Samples this process's private memory every 5 ms: `start` and `peak` in bytes."""

    def __enter__(self) -> "PeakMemory":
        self.start = self.peak = _private_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(0.005):
            self.peak = max(self.peak, _private_bytes())


def _private_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    kilobytes = next(s for s in status.splitlines() if s.startswith("RssAnon")).split()[1]
    return 1024 * int(kilobytes)


def _copy(source: Path, target: Path, flags: int) -> None:
    """Copy through a reused buffer and sync: `cp` and `sync FILE`, or with O_DIRECT in `flags`."""
    buffer = memoryview(mmap.mmap(-1, _COPY_BYTES))  # on a page
    out = os.open(target, os.O_CREAT | os.O_WRONLY | flags, 0o644)
    rest = os.open(target, os.O_WRONLY)  # for the last piece, which is no whole page
    try:
        with open(source, "rb", buffering=0) as file:
            at = 0
            while count := file.readinto(buffer):
                at += os.pwrite(rest if count % mmap.PAGESIZE else out, buffer[:count], at)
        os.fsync(rest)
    finally:
        os.close(out)
        os.close(rest)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


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
