"""The README's tables are the committed measurements, as the commands print them."""

import json
from pathlib import Path

import pytest

from kconvert.convert import text

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("file", "show"),
    [
        ("convert/bench_results/repack.json", text.bench_repack_text),
        ("convert/bench_results/repack-16-cores.json", text.bench_repack_text),
        ("convert/bench_results/convert.json", text.bench_convert_text),
        ("convert/bench_results/plan.json", text.bench_plan_text),
        ("runtime/bench_results/cpu-decode.json", text.bench_decode_text),
        ("runtime/bench_results/cpu-exact.json", text.bench_exact_text),
        ("runtime/bench_results/cpu-exact-tp2.json", text.bench_exact_text),
        ("runtime/bench_results/h200-moe-2026-11-29.json", text.bench_moe_text),
    ],
)
def test_table_is_what_was_measured(file: str, show) -> None:
    result = json.loads((ROOT / file).read_text())
    block = "\n".join(f"    {line}" for line in show(result).splitlines())
    assert block in (ROOT / "README.md").read_text()


def survival() -> str:
    """What `python -m survive` and `python -m fuzz` found, in a line each."""

    def result(name: str, harness: str = "survive") -> dict:
        found = json.loads((ROOT / f"tests/{harness}/results/{name}.json").read_text())
        assert not found["failures"]
        return found

    kills, power, faults = result("kills"), result("power"), result("faults")
    fuzz = result("fuzz", "fuzz")
    double, overlap = result("double"), result("overlap")
    signals = ", ".join(f"{count} {name}" for name, count in kills["signals"].items())
    lines = [
        f"kills    {kills['kills']} over {sum(kills['conversions'].values())} conversions"
        f" ({signals})",
        f"power    {power['cuts']} cuts at any system call that writes",
        f"faults   {faults['faults']} of the network, {len(faults['by_kind'])} kinds, over"
        f" {faults['conversions']} conversions in {faults['runs']} runs",
        f"double   {double['pairs']} pairs of runs on one output",
        f"overlap  {overlap['ratio']:.2f} × (download + one shard) at"
        f" {overlap['bytes_per_second'] / 1e9} GB/s,"
        f" {overlap['peak_private_bytes'] / 1e9:.2f} GB private memory",
    ]
    lines.append(
        f"fuzz     {fuzz['count']:,} mutated headers, indexes, configs and outputs,"
        f" {fuzz['growth_bytes'] / 1e9:.2f} GB at most"
    )
    return "\n".join(f"    {line}" for line in lines)


def test_survival_is_what_was_found() -> None:
    assert survival() in (ROOT / "README.md").read_text()
