"""What must hold of the GPU's committed measurements."""

import json
from pathlib import Path
from typing import Any

import pytest

from kconvert.convert.cli import bench_text

RESULTS = Path(__file__).parents[3] / "runtime/bench/results"


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"h200-{name}.json").read_text())


@pytest.mark.parametrize(("name", "tp"), [("exact", 1), ("exact-tp2", 2)])
def test_every_mode_was_exact_on_all_prompts(name: str, tp: int) -> None:
    table = result(name)
    assert table["exact"] and not any(row["differ"] for row in table["rows"])
    assert (table["device"], table["tp"], table["prompts"], table["new_tokens"]) == (
        "cuda", tp, 100, 128,
    )  # fmt: skip
    prompts = [row for row in table["rows"] if "what" not in row]  # and longer texts
    kinds = {(row["temperature"], row["mode"], row["budget"]) for row in prompts}
    budgets = [("chain", b) for b in (1, 4, 7)]
    budgets += [("ddtree", b) for b in (1, 4, 7, 16, 33, 64, "auto")]
    assert kinds == {(t, *kind) for t in (0.0, 0.8) for kind in budgets}


def test_steps_reach_what_was_asked_for() -> None:
    rows = {(row["mode"], row["budget"]): row for row in result("decode")["rows"]}
    token = {kind: 1e6 / row["tokens_per_second"] for kind, row in rows.items()}
    assert rows["ar", 0]["us_per_step"] <= 150
    assert min(us for (mode, _), us in token.items() if mode == "chain") <= 115
    assert min(us for (mode, _), us in token.items() if mode == "ddtree") <= 95
    for row in rows.values():
        assert row["us_per_step"] * row["share"]["host"] <= 50
        assert row["timeline"]["between_us"] <= 10


def test_exchanges_have_the_same_bits_and_beat_nccl_with_the_same_work_behind_it() -> None:
    rows = result("exchange")["rows"]
    us = {(row["way"], row["M"]): row["us"] for row in rows}
    assert all(row["same_bits"] for row in rows)
    for m in (1, 8, 16, 33, 65):
        assert us["ours, with residual and norm", m] < us["NCCL all-gather, residual and norm", m]


@pytest.mark.parametrize("name", ["decode", "decode-tp2"])
def test_tables_are_made_from_results(name: str) -> None:
    assert len(bench_text.decode_text(result(name)).splitlines()) == 13
    assert len(bench_text.linear_text(result("linear")).splitlines()) == 2 + 70
    assert len(bench_text.exchange_text(result("exchange")).splitlines()) == 8
