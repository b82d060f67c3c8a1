"""`kconvert bench plan`: planning all of K2.6 and K3, and --help, as whole processes."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kconvert.convert.bench.machine import machine
from kconvert.convert.synth.write import synth


def bench_plan(runs: int = 5) -> dict[str, Any]:
    """Planning all of K2.6 and of Kimi K3 (`convert --dry-run`, tp 8) and `--help`, each as a whole
    process."""
    plans = {preset: _plans(preset, runs) for preset in ("k2.6", "k3")}
    helps = [_process(["--help"]) for _ in range(runs)]
    seconds = {preset: statistics.median(s for s, _ in pairs) for preset, pairs in plans.items()}
    peaks = {preset: max(peak for _, peak in pairs) for preset, pairs in plans.items()}
    return {
        "bench": "plan",
        "machine": machine(),
        "pairs": runs,
        "plan_seconds": seconds["k2.6"],
        "plan_peak_bytes": peaks["k2.6"],
        "k3_plan_seconds": seconds["k3"],
        "k3_plan_peak_bytes": peaks["k3"],
        "help_seconds": statistics.median(seconds for seconds, _ in helps),
    }


def _plans(preset: str, runs: int) -> list[tuple[float, int]]:
    with tempfile.TemporaryDirectory(prefix="kconvert-bench-") as work:
        source = Path(work) / "source"
        synth(source, preset, sparse=True)
        plan = ["convert", str(source), f"{work}/out", "--tp", "8", "--dry-run", "--quiet"]
        return [_process(plan) for _ in range(runs)]


def _process(arguments: list[str]) -> tuple[float, int]:
    """Seconds and peak resident bytes of a kconvert command, its start included."""
    code = "from kconvert.convert.cli.main import main; main()"
    start = time.perf_counter()
    nowhere = subprocess.DEVNULL
    command = [sys.executable, "-c", code, *arguments]
    process = subprocess.Popen(command, stdout=nowhere, stderr=nowhere)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if os.waitstatus_to_exitcode(status) not in (0, 3):  # 3: no room for 595 GB, which is no matter
        raise RuntimeError(f"kconvert {arguments[0]} ended with status {status}")
    return seconds, 1024 * usage.ru_maxrss
