"""Options that cannot be carried out: one sentence, and what would work."""

from pathlib import Path

import pytest
from kit import KIMI_MINI


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tp", 8], ["256 rows", "32 a rank", "64-column tiles", "--tp 8 --ep 2"]),
        (["--tp", 16, "--layout", "w4a16"], ["16 a rank", "group of 32", "--tp 16 --ep 2"]),
        (["--tp", 3], ["256 rows", "3 ranks", "--tp 3 --ep", "--tp 1, --tp 2, --tp 4"]),
        (["--tp", 4, "--ep", 3], ["ep 3 does not divide tp 4", "--tp 4 --ep 1"]),
        (["--tp", 16, "--ep", 16], ["8 experts do not divide over ep 16", "--tp 16 --ep 4"]),
        (["--tp", 0], ["1 to 10,000"]),
        (["--tp", 100_000_000], ["1 to 10,000"]),
        (["--layout", "awq"], ["'awq' is not one of 'marlin', 'w4a16'"]),
        (["--layers", "7"], ["--layers 7: the model has layers 0-2"]),
        (["--tp", 2, "--ranks", "2"], ["--ranks 2: --tp 2 has ranks 0-1"]),
    ],
)
def test_options_that_do_not_fit(options, words, tmp_path: Path, kconvert) -> None:
    outcome = kconvert("convert", KIMI_MINI, tmp_path / "out", *options)
    assert outcome.code == 2
    for word in words:
        assert word in outcome.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["1-", "a", "3-1", "", "1,,2", "-1", "0-999999999999"])
def test_lists_that_cannot_be_read(text: str, tmp_path: Path, kconvert) -> None:
    outcome = kconvert("convert", KIMI_MINI, tmp_path / "out", f"--layers={text}")
    assert outcome.code == 2
    assert "is not a list like 0-3,60" in outcome.err
