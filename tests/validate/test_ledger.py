"""What became of every byte of the source."""

from pathlib import Path

from kit import KIMI_MINI

from kconvert.layouts.checkpoint import read_checkpoint
from kconvert.validate import validate


def test_every_byte_of_the_source_is_accounted_for(output: Path) -> None:
    result = validate(output, KIMI_MINI)
    whole = {entry.label: entry for entry in result.ledger}
    shards = read_checkpoint(KIMI_MINI).shards.values()
    assert sum(e.bytes for e in result.ledger) == sum(s.size - s.data_start for s in shards)
    assert whole["codes, packed"].tensors == whole["scales"].tensors == 2 * 8 * 3
    assert "unexplained" not in whole and result.check("ledger").outcome == "passed"


def test_a_hole_in_the_source_is_a_finding(output: Path, monkeypatch) -> None:
    from kconvert.validate import ledger

    monkeypatch.setattr(ledger, "_accounts", lambda groups, converted: iter([("codes", 5)]))
    result = validate(output, KIMI_MINI)
    (finding,) = result.findings
    assert finding.check == "ledger" and "went nowhere" in finding.text
