"""`bench load` on the host's part: what it loads, what it says, what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from kit import KIMI_MINI, flip, torchrun

from kconvert.convert import convert
from kconvert.layouts.header import read_header
from kconvert.runtime.bench import load
from kconvert.runtime.filling.device import memory_on
from kconvert.runtime.filling.filler import Filler

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("load") / "two"
    convert(KIMI_MINI, output, tp=2)
    return output


@pytest.mark.parametrize("device", DEVICES)
def test_a_blob_is_loaded_as_it_lies(device: str, folder: Path) -> None:
    """One copy of the file's data: every tensor where it is there, vision's four axes too."""
    where = torch.device(device)
    for path in load.blobs_of([folder]):
        blob = load._load(path, where)
        with Filler(memory_on(where)) as filler:
            for transfer in blob.transfers:
                filler.add(transfer)
            filler.wait()
        data = path.read_bytes()[read_header(path).data_start :]
        assert blob.image.cpu().numpy().tobytes() == data


def test_rows_of_every_way(folder: Path, kconvert, tmp_path: Path) -> None:
    outcome = kconvert(
        "bench", "load", folder, "--device", "cpu", "--json", "--save", tmp_path / "saved.json"
    )
    table = json.loads(outcome.out)
    assert json.loads((tmp_path / "saved.json").read_text())["rows"] == table["rows"]
    kinds = [(row["from"], row["at_a_time"], row["digests"]) for row in table["rows"]]
    sources = ("page cache", "disk") if table["raw_direct"] else ("page cache",)
    units = ("file", "folder")
    assert kinds == [(s, unit, d) for s in sources for d in (False, True) for unit in units]
    assert table["files"] == len(load.blobs_of([folder])) and table["device"] == "cpu"
    for row in table["rows"]:
        best = table["best_pread" if row["from"] == "page cache" else "raw_direct"]["gbps"]
        assert row["of_best"] == pytest.approx(row["gbps"] / best, rel=0.02)


def test_every_rank_loads_its_own(folder: Path) -> None:
    """And all of them what is common; the rates are of all together."""
    arguments = ["bench", "load", folder, "--device", "cpu", "--json"]
    table = json.loads(torchrun(2, ["-m", "kconvert.convert.cli", *arguments]))
    mine = [p for p in load.blobs_of([folder]) if "rank-00001" not in p.parent.name]
    assert table["ranks"] == 2 and table["files"] == len(mine)
    for row in table["rows"]:
        assert row["slowest_rank"] <= row["fastest_rank"] and row["slowest_rank"] < row["gbps"]


def test_what_was_changed_is_named(folder: Path, kconvert, tmp_path: Path) -> None:
    (part := tmp_path / "rank-00000-of-00001").mkdir()
    path = part / "layer-00001.safetensors"
    path.write_bytes((folder / "rank-00000-of-00002/layer-00001.safetensors").read_bytes())
    flip(path, "w2_weight_packed", 5)
    outcome = kconvert("bench", "load", part, "--device", "cpu")
    assert outcome.code == 2 and "w2_weight_packed, expert 5 of the file: its bytes" in outcome.err


def test_what_is_refused(folder: Path, kconvert, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    outcome = kconvert("bench", "load", folder)
    assert outcome.code == 3 and "--device cpu measures the host's part" in outcome.err
    outcome = kconvert("bench", "load", tmp_path, "--device", "cpu")
    assert outcome.code == 2 and "no blob (*.safetensors) found" in outcome.err
    outcome = kconvert("bench", "load", tmp_path / "none", "--device", "cpu")
    assert outcome.code == 3 and "none" in outcome.err
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 140 << 30))
    with pytest.raises(load.UnavailableError, match=r"needs 0\.0 GB .* 1\.1 GB are free"):
        load._load(load.blobs_of([folder])[0], torch.device("cuda"))


def test_a_disk_that_keeps_files_in_memory_is_not_measured(folder, monkeypatch) -> None:
    monkeypatch.setattr(load, "_resident", lambda fd: 1 << 20)
    said: list[str] = []
    table = load.bench_load([folder / "common"], "cpu", said.append)
    assert table["raw_direct"] is None and {row["from"] for row in table["rows"]} == {"page cache"}
    assert "disk: not measured" in said[-1]


def test_what_is_in_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(np.arange(1 << 20, dtype=np.uint8).tobytes())
    with open(path, "rb") as file:
        file.read()
        assert load._resident(file.fileno()) == 1 << 20
