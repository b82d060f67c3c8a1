"""`kconvert bench convert`: converting true-size layers against copying their file."""

import mmap
import os
import resource
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from kconvert.convert.bench.machine import PeakMemory, machine, seconds_of
from kconvert.convert.prepare import Options, prepare
from kconvert.convert.run import run
from kconvert.convert.synth.write import synth

_COPY_BYTES = 8 << 20


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
            converting = seconds_of(lambda: run(prepare(source, output, options)) and None)
        cpu = _cpu_seconds() - before
        shutil.rmtree(output)
        copying = seconds_of(lambda: _copy(shard, copied, 0))
        copied.unlink()
        direct = seconds_of(lambda: _copy(shard, copied, os.O_DIRECT))
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


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
