"""`kconvert bench validate`: a whole validation from disk against only reading what it reads."""

import os
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kconvert.convert.bench.conversion import cpu_seconds, synth_apart
from kconvert.convert.bench.machine import PeakMemory, machine, seconds_of
from kconvert.convert.prepare import Options, prepare
from kconvert.convert.run import run

_READ_BYTES = 8 << 20


def bench_validate(
    folder: Path, check: Callable[[Path, Path], bool], experts: int = 384, pairs: int = 3
) -> dict[str, Any]:
    """Validating a K2.6 MoE layer of true size (tp 8, marlin) against its source with `check`, and
    reading both sides' files once, in turn; the page cache is dropped before each. The first turn
    is not counted: it compiles kernels and loads torch. Raises RuntimeError if `check` finds a
    difference.

    Works in a new folder under `folder`, which needs 50 MB an expert meanwhile. If that is tmpfs
    there is no cache to drop, and both read memory. Peak private memory is that of this process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kconvert-bench-", dir=folder) as made:
        source, output = Path(made) / "source", Path(made) / "output"
        synth_apart(source, "k2.6-layer", experts=experts)
        run(prepare(source, output, Options(tp=8)))
        files = [*source.rglob("*.safetensors"), *output.rglob("*.safetensors")]
        size = sum(file.stat().st_size for file in files)
        turns, found = [], list[bool]()

        def validate() -> None:
            found.append(check(output, source))

        for turn in range(pairs + 1):
            _drop(files)
            before = cpu_seconds()
            reading = seconds_of(lambda: _read(files))
            read_spent = (cpu_seconds() - before) / (size / 1e9)
            _drop(files)
            before = cpu_seconds()
            with PeakMemory() as memory:
                validating = seconds_of(validate)
            if not all(found):
                raise RuntimeError("a fresh conversion differs from its source")
            spent = (cpu_seconds() - before) / (size / 1e9)
            if turn > 0:
                turns.append((validating, reading, spent, read_spent, memory.peak))
    medians = [statistics.median(column) for column in zip(*turns, strict=True)]
    return {
        "bench": "validate", "machine": machine(), "pairs": pairs, "experts": experts,
        "bytes": size,
        "seconds": medians[0], "gbps": size / medians[0] / 1e9,
        "read_seconds": medians[1], "read_gbps": size / medians[1] / 1e9,
        "ratio_to_reading": statistics.median(turn[1] / turn[0] for turn in turns),
        "core_seconds_per_gb": medians[2], "read_core_seconds_per_gb": medians[3],
        "peak_private_bytes": max(turn[4] for turn in turns),
        "runs": [turn[0] for turn in turns],
    }  # fmt: skip


def _threads() -> int:
    """Two a core: more do not read faster."""
    return 2 * len(os.sched_getaffinity(0))


def _drop(files: list[Path]) -> None:
    """Drop the files from the page cache; synced first, as only clean pages go."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _read(files: list[Path]) -> None:
    """Read every byte once, each thread into a buffer of its own."""

    def read(file: Path) -> None:
        buffer = bytearray(_READ_BYTES)
        with open(file, "rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass

    with ThreadPoolExecutor(_threads()) as pool:
        list(pool.map(read, files))
