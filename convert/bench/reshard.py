"""`kconvert bench reshard`: making an output from another, and exporting one, against copying."""

import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kconvert.convert.bench.conversion import copy_file, cpu_seconds, synth_apart
from kconvert.convert.bench.machine import machine, seconds_of
from kconvert.convert.export import prepare_export, run_export
from kconvert.convert.prepare import Options, prepare
from kconvert.convert.reshard import prepare_reshard
from kconvert.convert.run import run


class Kind(NamedTuple):
    """An output: its layout and parallelism."""

    layout: str
    tp: int
    ep: int = 1


# (name, what is there, what is made from it); None: the checkpoint.
_CASES: tuple[tuple[str, Kind, Kind | None], ...] = (
    ("tp 8 → tp 4", Kind("marlin", 8), Kind("marlin", 4)),
    ("tp 4 → tp 8", Kind("marlin", 4), Kind("marlin", 8)),
    ("tp 8 → ep 8", Kind("marlin", 8), Kind("marlin", 8, 8)),
    ("marlin → w4a16", Kind("marlin", 8), Kind("w4a16", 8)),
    ("export of w4a16", Kind("w4a16", 8), None),
    ("export of marlin", Kind("marlin", 8), None),
)


def bench_reshard(folder: Path, experts: int = 128, pairs: int = 3) -> dict[str, Any]:
    """Resharding and exporting a K2.6 MoE layer of true size, with `experts` experts, against
    copying the files that are written, with sync, as `cp` does and past the page cache, in turns.

    What outputs have in common is linked, and does not count as written. Works in a new folder
    under `folder`, which needs 5 times the layer (25 MB an expert) meanwhile.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kconvert-bench-", dir=folder) as made:
        work = Path(made)
        synth_apart(work / "source", "k2.6-layer", experts=experts)
        first = Kind("marlin", 8)
        run(prepare(work / "source", work / "have", Options(*first)))
        shutil.rmtree(work / "source")
        rows = []
        for case, have, want in _CASES:
            held = work / "have"
            if have != first:
                held = work / "other"
                run(prepare_reshard(work / "have", held, **have._asdict()))
            rows.append({"case": case, **_bench_case(held, work, want, pairs)})
            if held.name == "other":
                shutil.rmtree(held)
    return {"bench": "reshard", "machine": machine(), "experts": experts, "pairs": pairs,
            "rows": rows}  # fmt: skip


def _task(have: Path, new: Path, want: Kind | None) -> Callable[[], object]:
    """What is timed; planning is not."""
    if want is None:
        return partial(run_export, prepare_export(have, new))
    return partial(run, prepare_reshard(have, new, **want._asdict()))


def _bench_case(have: Path, work: Path, want: Kind | None, pairs: int) -> dict[str, Any]:
    new, turns = work / "new", []
    for turn in range(pairs + 1):
        task = _task(have, new, want)
        before = cpu_seconds()
        seconds = seconds_of(task)
        spent = cpu_seconds() - before
        files = [*new.glob("rank-*/*"), *new.glob("*.safetensors")]
        size = sum(file.stat().st_size for file in files)
        copies = []
        for flags in (0, os.O_DIRECT):
            copies.append(
                sum(seconds_of(partial(copy_file, file, work / "copy", flags)) for file in files)
            )
            (work / "copy").unlink()
        shutil.rmtree(new)
        if turn > 0:  # the first one compiles or loads the kernels
            turns.append((seconds, *copies, spent / (size / 1e9)))
    medians = [statistics.median(column) for column in zip(*turns, strict=True)]
    return {
        "bytes": size,
        "seconds": medians[0],
        "gbps": size / medians[0] / 1e9,
        "copy_seconds": medians[1],
        "direct_copy_seconds": medians[2],
        "ratio_to_copy": statistics.median(
            min(turn[1:3]) / turn[0] for turn in turns
        ),  # above 1: quicker
        "core_seconds_per_gb": medians[3],
        "runs": [turn[0] for turn in turns],
    }
