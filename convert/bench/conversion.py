"""`kconvert bench convert`: converting true-size layers against copying their files."""

import mmap
import multiprocessing
import os
import resource
import shutil
import statistics
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kconvert.convert.bench.machine import PeakMemory, machine, seconds_of
from kconvert.convert.bench.raw import raw_rates
from kconvert.convert.prepare import Options, prepare
from kconvert.convert.progress import Meter
from kconvert.convert.run import run
from kconvert.convert.synth.write import synth

_COPY_BYTES = 8 << 20
_RAW_BYTES = 4 << 30
_MEMORY = Path("/dev/shm")


class Case(NamedTuple):
    """`layers` layers of `experts` experts each, of K2.6's size."""

    name: str
    layers: int
    experts: int
    in_memory: bool = False  # source and output on tmpfs


def cases() -> list[Case]:
    """One layer and several on the disk; four in memory, as large as fits there twice."""
    several = [Case("one layer", 1, 384), Case("three layers", 3, 128)]
    free = shutil.disk_usage(_MEMORY).free if _MEMORY.is_dir() else 0
    for experts in (384, 128, 32):
        if 2 * 4 * experts * 26_000_000 < free:
            return [*several, Case("four layers, tmpfs", 4, experts, in_memory=True)]
    return several


def bench_convert(folder: Path, pairs: int = 5) -> dict[str, Any]:
    """Converting true-size K2.6 MoE layers (tp 8, marlin) against copying their files with sync:
    as `cp` does, and past the page cache as the converter writes; beside them the raw rates.

    Works in new folders under `folder`, which needs 20 GB meanwhile, and in /dev/shm; they are
    deleted. Planning is timed apart. Peak private memory is that of this process and its workers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kconvert-bench-", dir=folder) as work:
        raw = {"disk": raw_rates(Path(work), _RAW_BYTES)}
    rows = []
    for case in cases():
        where = _MEMORY if case.in_memory else folder
        with tempfile.TemporaryDirectory(prefix="kconvert-bench-", dir=where) as work:
            if case.in_memory:
                raw["tmpfs"] = raw_rates(Path(work), _RAW_BYTES)
            rows.append(_bench_case(case, Path(work), pairs))
    return {"bench": "convert", "machine": machine(), "pairs": pairs, "raw": raw, "rows": rows}


def _bench_case(case: Case, work: Path, pairs: int) -> dict[str, Any]:
    source, output, copied = work / "source", work / "output", work / "copy"
    layers = [*range(1, case.layers + 1)]
    synth_apart(source, "k2.6", layers=layers, experts=case.experts)
    shards = sorted(source.glob("*.safetensors"))
    size = sum(shard.stat().st_size for shard in shards)
    options = Options(tp=8, layers=layers)
    turns = []
    for turn in range(pairs + 1):
        planning = seconds_of(lambda: prepare(source, output, options) and None)
        prepared, meter, before = prepare(source, output, options), Meter(), cpu_seconds()
        with PeakMemory() as memory:
            converting = seconds_of(partial(run, prepared, meter))
        figures = {
            "plan_seconds": planning,
            "convert_seconds": converting,
            "core_seconds_per_gb": (cpu_seconds() - before) / (size / 1e9),
            "peak_private_bytes": memory.peak,
            "workers": prepared.workers,
            "stages": {name: asdict(stage) for name, stage in meter.stages().items()},
        }
        shutil.rmtree(output)
        if not case.in_memory:
            for name, flags in (("copy_seconds", 0), ("direct_copy_seconds", os.O_DIRECT)):
                figures[name] = sum(
                    seconds_of(partial(copy_file, shard, copied, flags)) for shard in shards
                )
                copied.unlink()
        if turn > 0:  # the first one compiles or loads the kernels and touches the memory
            turns.append(figures)
    return {"case": case.name, **case._asdict(), "source_bytes": size, **_summary(turns, size)}


def synth_apart(source: Path, preset: str, **sizes: Any) -> None:
    """Run `synth` in a process of its own: its memory is gone when the conversion's is measured."""
    make = partial(synth, source, preset, **sizes)
    process = multiprocessing.get_context("spawn").Process(target=make)
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"synth ended with {process.exitcode}")


def _summary(turns: list[dict[str, Any]], size: int) -> dict[str, Any]:
    """Medians; ratios turn by turn, to the better of the two copies; and where time went."""
    summary: dict[str, Any] = {
        name: statistics.median(turn[name] for turn in turns)
        for name in turns[0]
        if name.endswith("_seconds") or name == "core_seconds_per_gb"
    }
    if "copy_seconds" in turns[0]:
        better = [min(turn["copy_seconds"], turn["direct_copy_seconds"]) for turn in turns]
        summary["ratio_to_copy"] = statistics.median(
            turn["convert_seconds"] / copy for turn, copy in zip(turns, better, strict=True)
        )
    summary["gbps"] = size / summary["convert_seconds"] / 1e9
    summary["peak_private_bytes"] = max(turn["peak_private_bytes"] for turn in turns)
    summary["workers"] = turns[0]["workers"]
    summary["workers_time"] = {
        stage: statistics.median(
            turn["stages"][stage]["thread_seconds"] / (turn["workers"] * turn["convert_seconds"])
            for turn in turns
        )
        for stage in ("read", "convert", "write")
    }
    summary["runs"] = [turn["convert_seconds"] for turn in turns]
    return summary


def copy_file(source: Path, target: Path, flags: int) -> None:
    """Copy through a reused buffer and sync: `cp` and `sync FILE`, or with O_DIRECT in `flags`."""
    buffer = memoryview(mmap.mmap(-1, _COPY_BYTES))  # on a page
    out = os.open(target, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | flags, 0o644)
    rest = os.open(target, os.O_WRONLY)  # for the last piece, which is not whole pages
    try:
        with open(source, "rb", buffering=0) as file:
            at = 0
            while count := file.readinto(buffer):
                at += os.pwrite(rest if count % mmap.PAGESIZE else out, buffer[:count], at)
        os.fsync(rest)
    finally:
        os.close(out)
        os.close(rest)


def cpu_seconds() -> float:
    """CPU seconds of this process, and of its workers once they have ended."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)
