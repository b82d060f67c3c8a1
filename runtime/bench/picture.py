"""Pictures for `bench decode` (how deep drafts are accepted, and what that brings) and for `bench
projection` (rates by budget)."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kconvert.runtime.bench.shape.projection import groups

_LINES = (("chain", "o--"), ("ddtree", "s-"))


def decode_picture(table: dict[str, Any], path: Path) -> None:
    """Draw the table of `bench_decode` into `path`, in the format of its suffix.

    Raises ValueError for a suffix that matplotlib does not know.
    """
    figure = Figure(figsize=(10, 4), layout="constrained")
    depths, rates = figure.subplots(1, 2)
    _draw_depths(depths, table["rows"])
    _draw_rates(rates, table["rows"])
    figure.suptitle(
        f"{table['prompts']} prompts × {table['new_tokens']} tokens, {table['dtype']}", fontsize=10
    )
    figure.savefig(path, dpi=110)


def _draw_depths(axes: Axes, rows: list[dict[str, Any]]) -> None:
    for mode, style in _LINES:
        for row in rows:
            if row["mode"] == mode and isinstance(row["budget"], int):
                reached = row["reached"]
                label = f"{mode} {row['budget']}"
                axes.plot(range(1, len(reached) + 1), reached, style, ms=3, lw=1, label=label)
    axes.set(
        title="accepted drafts", xlabel="depth", ylabel="share of steps that reach it", ylim=(0, 1)
    )
    axes.legend(fontsize=7)


def _draw_rates(axes: Axes, rows: list[dict[str, Any]]) -> None:
    for mode, style in _LINES:
        points = [
            (row["budget"], row["tokens_per_second"])
            for row in rows
            if row["mode"] == mode and isinstance(row["budget"], int)
        ]
        axes.plot(*zip(*points, strict=True), style, ms=3, lw=1, label=mode)
    for row, style in zip((rows[0], rows[-1]), ("k:", "g-."), strict=True):
        label = f"{row['mode']} {row['budget'] or ''}"
        axes.axhline(row["tokens_per_second"], ls=style[1:], c=style[0], lw=1, label=label)
    axes.set(title="rate", xlabel="budget, nodes", ylabel="tokens per second")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)


def projection_picture(table: dict[str, Any], path: Path) -> None:
    """Draw `bench projection`'s table into `path`, a diagram for each machine.

    Raises ValueError for a suffix that matplotlib does not know.
    """
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    for axes, machine in zip(figure.subplots(1, 2), table["machines"], strict=True):
        for (name, exchange, profile), rows in groups(table).items():
            if name != machine:
                continue
            budgets = [row["budget"] for row in rows]
            low, high = zip(*(row["tokens_per_second"] for row in rows), strict=True)
            style = "-" if exchange == "two shots" else "--"
            label = f"{profile}, exchange {exchange}"
            (line,) = axes.plot(budgets, low, style, marker="o", ms=3, lw=1, label=label)
            axes.fill_between(budgets, low, high, color=line.get_color(), alpha=0.15)
        for name, (low, high) in table["published"][machine].items():
            axes.axhspan(low, high, color="gray", alpha=0.2)
            axes.annotate(f"published: {name}", (1, high), fontsize=6, va="top")
        axes.set(title=machine, xlabel="budget, nodes", ylabel="tokens per second")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=6)
    figure.suptitle(f"PROJECTED, not measured, from one rank on {table['from']}", fontsize=10)
    figure.savefig(path, dpi=110)
