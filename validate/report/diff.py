"""The page of a `diff`: where two models differ, and how much."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.errors import one_line
from kconvert.layouts.model import layer_numbers
from kconvert.validate.diff import Diff
from kconvert.validate.report.page import Picture, counted, fill, made, write_whole
from kconvert.validate.report.pictures import bars, heat_map

_SHOWN = 2000  # tensors and files
_REACH = [
    "What is counted is how many codes, scales and values differ, bit for bit, not how far apart"
    " they are.",
    "Names of shards, and layout, tp and ep of outputs, do not count as differences.",
    "No model was run.",
]


def write_diff_report(result: Diff, target: Path) -> None:
    """Write the page to `target`. Raises OSError as the system gives it."""
    write_whole(render_diff(result), target)


def render_diff(result: Diff, label: str = "") -> str:
    """The page; `label`: a line at its top, if it compares nothing real."""
    sums = result.sums()
    others = [d for d in result.differences if d.expert is None]
    return fill(
        "diff.html",
        name=f"{Path(result.a).name} and {Path(result.b).name}",
        command="diff",
        label=label,
        ok=result.equal,
        verdict=_verdict(result, len(others)),
        limits=(),
        made=made(),
        commands=[one_line(shlex.join(["kconvert", "diff", result.a, result.b]))],
        reach=_REACH,
        result=result,
        layers=sorted(sums.items()),
        kinds=list(dict.fromkeys(what for here in sums.values() for what in here.counts)),
        others=others,
        shown=_SHOWN,
        pictures=list(_pictures(result)),
    )


def _verdict(result: Diff, others: int) -> str:
    if result.equal:
        return "Equal: every code, scale, tensor and file."
    sums = result.sums()
    experts = sum(len(here.experts) for here in sums.values())
    parts = [f"{counted(experts, 'expert')} in {counted(len(sums), 'layer')}"] if experts else []
    parts += [counted(others, "other difference")] if others else []
    return f"Different: {' and '.join(parts)}."


def _pictures(result: Diff) -> Iterator[Picture]:
    """The changed share of codes, scales …, by layer, and by layer and expert."""
    groups = sorted(group for group, experts in result.compared.items() if experts)
    numbers = [str(number) for number in layer_numbers(groups)]
    if len(numbers) != len(groups):
        numbers = groups
    rows = {group: row for row, group in enumerate(groups)}
    shares: dict[str, NDArray[np.float64]] = {}
    most = max(result.compared.values(), default=0)
    for group, what, expert, changed, total, _ in result.differences:
        if expert is not None:
            if what not in shares:
                shares[what] = np.full((len(groups), most), np.nan)
                for name, row in rows.items():
                    shares[what][row, : result.compared[name]] = 0
            shares[what][rows[group], expert] = 100 * changed / total
    for what, of_experts in shares.items():
        title = what.capitalize()
        caption = f"% of a layer's {what} that differ."
        by_layer = np.nanmean(of_experts, axis=1).tolist()
        yield Picture(f"{title} by layer", bars(numbers, by_layer, "%"), caption)
        if of_experts.size > 1:
            where = f"Rows are layers, {numbers[0]} to {numbers[-1]}, columns are experts."
            image = heat_map(of_experts)
            yield Picture(f"{title} by expert", image, f"% of an expert's {what}. {where}")
