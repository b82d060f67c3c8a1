"""The tables in the pages are the committed measurements, as the commands print them."""

import json
import re
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
        ("convert/bench/results/reshard.json", bench_text.reshard_text),
        ("convert/bench/results/validate.json", bench_text.validate_text),
        ("convert/bench/results/validate-16-cores.json", bench_text.validate_text),
        ("convert/bench/results/plan.json", bench_text.plan_text),
        ("runtime/bench/results/cpu-decode.json", bench_text.decode_text),
        ("runtime/bench/results/cpu-exact.json", bench_text.exact_text),
        ("runtime/bench/results/cpu-exact-tp2.json", bench_text.exact_text),
        ("runtime/bench/results/h200-decode.json", bench_text.decode_text),
        ("runtime/bench/results/h200-exact.json", bench_text.exact_text),
        ("runtime/bench/results/h200-exact-tp2.json", bench_text.exact_text),
        ("runtime/bench/results/h200-tree.json", bench_text.tree_text),
        ("runtime/bench/results/h200-linear.json", bench_text.linear_text),
        ("runtime/bench/results/h200-shape.json", bench_text.shape_text),
        ("runtime/bench/results/projection.json", bench_text.projection_text),
        ("runtime/bench/results/h200-load.json", bench_text.load_text),
        ("runtime/bench/results/h200-exchange.json", bench_text.exchange_text),
        ("runtime/bench/results/h200-moe-2026-11-29.json", bench_text.moe_text),
        ("runtime/bench/results/h200-moe-2026-12-01.json", bench_text.moe_text),
        ("runtime/bench/results/h200-moe-ep8.json", bench_text.moe_text),
    ],
)
def test_table_is_what_was_measured(file: str, show) -> None:
    result = json.loads((ROOT / file).read_text())
    block = "\n".join(f"    {line}" for line in show(result).splitlines())
    assert block in (ROOT / file).with_name("README.md").read_text()


def summary() -> str:
    """The README's six lines, from the same files."""

    def rows(file: str) -> list[dict]:
        return json.loads((ROOT / file).read_text())["rows"]

    def one(file: str, **wanted) -> dict:
        return next(row for row in rows(file) if wanted.items() <= row.items())

    w13 = one("convert/bench/results/repack.json", slice="w13")
    memory = one("convert/bench/results/convert-16-cores.json", case="four layers, tmpfs")
    disk = one("convert/bench/results/convert.json", case="one layer")
    plan = json.loads((ROOT / "convert/bench/results/plan.json").read_text())
    load = "runtime/bench/results/h200-load.json"
    plain, digests = (
        one(load, **{"from": "page cache"}, at_a_time="folder", digests=d) for d in (False, True)
    )
    moe = "runtime/bench/results/h200-moe-2026-11-29.json"
    few, many = (one(moe, shape="tp8", M=m) for m in (1, 1024))
    decode = "runtime/bench/results/h200-decode.json"
    ar = one(decode, mode="ar")
    best = max(
        (row for row in rows(decode) if row["budget"] != "auto"),
        key=lambda row: row["tokens_per_second"],
    )
    lines = [
        f"packing     {w13['repack_gbps']:.1f} GB/s on a core into Marlin tiles,"
        f" {w13['ratio_to_copy']:.0%} of the rate of a plain copy",
        f"planning    all of K2.6 in {plan['plan_seconds']:.1f} s,"
        f" with {plan['plan_peak_bytes'] / 1e9:.1f} GB of memory",
        f"converting  {memory['gbps']:.2f} GB/s on 16 cores from memory to memory,"
        f" {disk['gbps']:.2f} on 2 cores to a virtual disk",
        f"loading     {plain['gbps']:.0f} GB/s from the page cache into an H200,"
        f" {digests['gbps']:.0f} with every digest compared",
        f"a MoE layer {few['us']:.0f} µs for 1 token and {many['us']:.0f} for 1,024 on an H200"
        f" (tp 8); reading the weights takes {few['floor_us']:.0f} and {many['floor_us']:.0f}",
        f"decoding    {1e6 / best['tokens_per_second']:.0f} µs a token with trees of"
        f" {best['budget']} nodes on an H200 (tiny_kimi), {1e6 / ar['tokens_per_second']:.0f}"
        " without: the same bits",
    ]
    return "\n".join(f"    {line}" for line in lines)


def test_the_six_lines_are_what_was_measured() -> None:
    assert summary() in (ROOT / "README.md").read_text()


def test_links_lead_somewhere() -> None:
    folders = ("layouts", "convert", "validate", "runtime", "tests")
    inner = (page for folder in folders for page in (ROOT / folder).rglob("*.md"))
    for page in (*ROOT.glob("*.md"), *inner):
        for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
            assert "://" in link or (page.parent / link).exists(), f"{page}: {link}"


def test_contributing_names_files_that_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for path in re.findall(r"`([\w/]+/[\w.]*)`", text):
        found = [ROOT / path, ROOT / f"{path}.py"]
        assert any(there.exists() for there in found), path


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
    assert survival() in (ROOT / "convert/bench/results/README.md").read_text()


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
    files = sorted((ROOT / "runtime/bench/results").glob("h200-moe-20*.json"))
    for file in files:
        ours = {"shape": "tp8", "backend": "kconvert"}.items()
        us = {row["M"]: row["us"] for row in measured(file)["rows"] if ours <= row.items()}
        assert us.keys() & must.keys() >= {16, 330, 1024}, file.name
        assert all(us[m] <= limit for m, limit in must.items() if m in us), file.name
    assert files
    written = measured("tests/tiny_kimi/evaluation.json")
    assert written["repeated_8grams"] <= 0.2
    assert written["held_out_loss"] < written["bigram_loss"]
