"""The README's tables are the committed measurements, as the commands print them."""

import json
from pathlib import Path

import pytest

from kconvert.convert import text

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("name", "show"), [("repack", text.bench_repack_text), ("convert", text.bench_convert_text)]
)
def test_table_is_what_was_measured(name: str, show) -> None:
    result = json.loads((ROOT / f"convert/bench_results/{name}.json").read_text())
    assert result["bench"] == name
    block = "\n".join(f"    {line}" for line in show(result).splitlines())
    assert block in (ROOT / "README.md").read_text()
