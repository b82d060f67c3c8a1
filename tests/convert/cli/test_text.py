"""Results as text: figures that mean nothing are left out."""

from typing import Any

import pytest

from kconvert.convert.cli import text


def conversion(nbytes: int, busy: float) -> str:
    table: dict[str, Any] = {
        "output": "out", "files_written": 1, "bytes_written": nbytes, "files_linked": 0,
        "files_kept": 0, "repo": None, "commit": None, "share": None, "complete": True,
        "seconds": 10.0, "ignored": [], "warnings": [], "verified": True,
        "replaced": {}, "trusted": [], "foreign": [], "left_out": [],
        "stages": {"write": {"nbytes": nbytes, "busy": busy}},
    }  # fmt: skip
    return text.conversion_text(table).splitlines()[-1]


@pytest.mark.parametrize(
    ("nbytes", "busy", "line"),
    [
        (5_000_000, 1.0, "took 10 s: write (10% busy)"),  # tiny: its time is that of starting
        (5_000_000_000, 5.0, "took 10 s: write 1.00 GB/s (50% busy)"),
        (100_000_000, 10.0, "took 10 s: write 10.0 MB/s (100% busy)"),  # not 0.01 GB/s
    ],
)
def test_rates_of_a_conversion(nbytes: int, busy: float, line: str) -> None:
    assert conversion(nbytes, busy) == line


def test_one_token_has_no_rate() -> None:
    table = {
        "mode": "ar", "budget": None, "tokens": [1], "tokens_per_second": 0.0,
        "speedup_over_ar": None, "target_forwards": 1, "committed_per_forward": 0.0,
        "checked": False,
    }  # fmt: skip
    assert text.smoke_text(table) == "\nar: 1 tokens, 1 target forwards, 0.00 committed a forward"
    assert "tokens, 8.0 tokens/s, 1 target" in text.smoke_text({**table, "tokens_per_second": 8.0})
