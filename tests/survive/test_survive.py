"""Small samples of `python -m survive`, and proof that it would notice."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from survive.double import SITUATIONS as SITUATIONS_OF_TWO
from survive.double import double
from survive.faults import faults
from survive.kills import kills
from survive.power import SITUATIONS, power
from survive.runs import WORK, digests, wrong

from kconvert.convert.output import publish, writer


def test_kills(tmp_path: Path) -> None:
    seen = kills(6, 0, tmp_path, large=False)
    assert seen["failures"] == []
    assert seen["kills"] == sum(seen["signals"].values()) == sum(seen["phases"].values()) == 6


def test_power_cuts(tmp_path: Path) -> None:
    seen = power(20, 0, tmp_path)
    assert seen["failures"] == {}
    assert seen["situations"] == dict.fromkeys(SITUATIONS, 5)
    assert len(seen["found"]) > 1 and seen["durable_blobs_kept"] > 20


def test_faults(tmp_path: Path) -> None:
    seen = faults(25, 0, tmp_path, large=False)
    assert seen["failures"] == []
    assert sum(seen["by_kind"].values()) >= 25 and len(seen["by_kind"]) > 5
    assert seen["longest_run_seconds"] < seen["limit_seconds"]


def test_two_at_once(tmp_path: Path) -> None:
    seen = double(len(SITUATIONS_OF_TWO), 0, tmp_path)
    assert seen["failures"] == []
    assert sorted(end.partition(":")[0] for end in seen["ends"]) == sorted(SITUATIONS_OF_TWO)
    assert seen["ends"]["suspended: one was refused"] == 1


# -- a harness that cannot fail proves nothing ---------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("common/a.safetensors", b"other", "common/a.safetensors: other bytes"),
        ("kconvert.json", None, "kconvert.json: missing"),
        (".probe.partial", b"", ".probe.partial: not of this output"),
        (f"{WORK}/a.partial", b"", f"{WORK}/a.partial stayed"),
        (f"{WORK}/outline.json", b"", f"{WORK}/outline.json stayed"),
        (f"{WORK}/incoming/a.part", b"", f"{WORK}/incoming stayed"),
        (f"common/{WORK}/b", b"", f"common/{WORK}/b stayed"),
    ],
)
def test_what_is_wrong_is_seen(name: str, change: bytes | None, words: str, tmp_path: Path) -> None:
    for right in ("common/a.safetensors", "kconvert.json", f"{WORK}/runs.jsonl"):
        (tmp_path / right).parent.mkdir(exist_ok=True)
        (tmp_path / right).write_bytes(b'{"complete": true}')
    expected = digests(tmp_path)
    assert list(wrong(tmp_path, expected)) == []
    path = tmp_path / name
    if change is None:
        path.unlink()
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(change)
    assert words in list(wrong(tmp_path, expected))


class _NoSync:
    """`os` without an fsync that does anything."""

    def __getattr__(self, name: str) -> Any:
        return (lambda _: None) if name == "fsync" else getattr(os, name)


def test_blobs_that_are_not_synced_are_seen(tmp_path: Path) -> None:
    with patch.object(writer, "os", _NoSync()):
        seen = power(8, 0, tmp_path)
    assert any("has its final name and other bytes" in failure for failure in seen["failures"])


def test_folders_that_are_not_synced_are_seen(tmp_path: Path) -> None:
    with patch.object(publish, "sync_folder", lambda folder: None):
        seen = power(8, 0, tmp_path)
    assert any("was published and is lost" in failure for failure in seen["failures"])
