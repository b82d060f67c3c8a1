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
        ("convert/bench_results/convert.json", text.bench_convert_text),
        ("convert/bench_results/plan.json", text.bench_plan_text),
        ("runtime/bench_results/cpu-decode.json", text.bench_decode_text),
        ("runtime/bench_results/cpu-exact.json", text.bench_exact_text),
        ("runtime/bench_results/h200-moe-2026-11-29.json", text.bench_moe_text),
    ],
)
def test_table_is_what_was_measured(file: str, show) -> None:
    result = json.loads((ROOT / file).read_text())
    block = "\n".join(f"    {line}" for line in show(result).splitlines())
    assert block in (ROOT / "README.md").read_text()
