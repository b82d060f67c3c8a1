"""What `kconvert diff` says: every difference as a table, and in short for a person."""

from typing import TYPE_CHECKING, Any

from kconvert.convert.cli.text import size
from kconvert.layouts.errors import printable

if TYPE_CHECKING:
    from kconvert.validate.diff import Diff

_MOST = 40  # lines


def diff_table(result: "Diff") -> dict[str, Any]:
    """The outcome, and each group's sums."""
    layers = {
        group: {
            "experts": sorted(sums.experts),
            **{what: {"changed": n, "of": of} for what, (n, of) in sums.counts.items()},
        }
        for group, sums in result.sums().items()
    }
    differences = [difference._asdict() for difference in result.differences]
    return {**vars(result), "equal": result.equal, "layers": layers, "differences": differences}


def diff_text(table: dict[str, Any]) -> str:
    """A line for each layer whose experts differ, and for each other tensor or file."""
    compared = (
        f"{table['groups']} groups, {table['tensors']:,} tensors, {table['experts']:,} experts,"
        f" {size(table['bytes_read'])} read"
    )
    if table["equal"]:
        return printable(f"equal: {table['a']} and {table['b']}; {compared}")
    lines = [f"DIFFERENT: {table['a']} and {table['b']}; {compared}"]
    for group, entry in table["layers"].items():
        counts = ", ".join(
            f"{c['changed']:,} of {c['of']:,} {what} ({c['changed'] / c['of']:.2%})"
            for what, c in entry.items()
            if what != "experts"
        )
        experts = entry["experts"]
        which = ", ".join(map(str, experts[:8])) + (", …" if experts[8:] else "")
        lines.append(f"  {group}: {len(experts)} experts differ ({which}): in them {counts}")
    others = [d for d in table["differences"] if d["expert"] is None]
    for d in others:
        how = d["text"] or f"{d['changed']:,} of {d['total']:,} values differ"
        lines.append(f"  {d['group']}: {d['what']} {how}")
    left = len(lines) - 1 - _MOST
    if left > 0:
        lines = [*lines[: _MOST + 1], f"  and {left} more lines (--json has all)"]
    return "\n".join(map(printable, lines))
