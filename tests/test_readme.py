"""The README's tables are the committed measurements, as the commands print them."""

import json
from pathlib import Path

import pytest

from kconvert.convert.cli import bench_text

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("file", "show"),
    [
        ("convert/bench/results/repack.json", bench_text.repack_text),
        ("convert/bench/results/repack-16-cores.json", bench_text.repack_text),
        ("convert/bench/results/convert.json", bench_text.convert_text),
        ("convert/bench/results/convert-16-cores.json", bench_text.convert_text),
        ("convert/bench/results/plan.json", bench_text.plan_text),
        ("runtime/bench/results/cpu-decode.json", bench_text.decode_text),
        ("runtime/bench/results/cpu-exact.json", bench_text.exact_text),
        ("runtime/bench/results/cpu-exact-tp2.json", bench_text.exact_text),
        ("runtime/bench/results/h200-decode.json", bench_text.decode_text),
        ("runtime/bench/results/h200-exact.json", bench_text.exact_text),
        ("runtime/bench/results/h200-exact-tp2.json", bench_text.exact_text),
        ("runtime/bench/results/h200-tree.json", bench_text.tree_text),
        ("runtime/bench/results/h200-load.json", bench_text.load_text),
        ("runtime/bench/results/h200-exchange.json", bench_text.exchange_text),
        ("runtime/bench/results/h200-moe-2026-11-29.json", bench_text.moe_text),
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
    mutate = result("mutate", "mutate")
    lines.append(f"mutate   {mutate['count']:,} changes of {len(mutate['by_kind'])} kinds")
    return "\n".join(f"    {line}" for line in lines)


def test_survival_is_what_was_found() -> None:
    assert survival() in (ROOT / "README.md").read_text()


def test_what_was_measured_is_what_must_hold() -> None:
    """The runtime's aims, on the committed measurements: none worse is committed quietly."""

    def measured(path: str | Path) -> dict:
        return json.loads((ROOT / path).read_text())

    rows = {
        (row["mode"], row["budget"]): row
        for row in measured("runtime/bench/results/cpu-decode.json")["rows"]
    }
    chain, trees = rows["chain", 7], [rows["ddtree", budget] for budget in (16, 33, 64)]
    assert chain["committed_per_forward"] >= 2.5
    assert all(row["committed_per_forward"] > chain["committed_per_forward"] for row in trees)
    assert trees[-1]["forwards_saved"] >= 3.5
    assert trees[-1]["share"]["tree"] + trees[-1]["share"]["walk"] <= 0.02
    for tp in (1, 2):
        exact = measured(f"runtime/bench/results/cpu-exact{'-tp2' if tp == 2 else ''}.json")
        assert (exact["tp"], exact["prompts"], exact["new_tokens"]) == (tp, 100, 128)
        assert exact["exact"] and len(exact["rows"]) == 72
    must = {1: 20, 9: 75, 16: 110, 33: 175, 90: 300, 330: 400, 1024: 560}  # µs of tp8 on an H200
    files = sorted((ROOT / "runtime/bench/results").glob("h200-moe-*.json"))
    for file in files:
        us = {row["M"]: row["us"] for row in measured(file)["rows"] if row["shape"] == "tp8"}
        assert all(us[m] <= limit for m, limit in must.items()), file.name
    assert files
    written = measured("tests/tiny_kimi/evaluation.json")
    assert written["repeated_8grams"] <= 0.2
    assert written["held_out_loss"] < written["bigram_loss"]
