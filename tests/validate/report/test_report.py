"""The report: one file that says what was found and what was not compared, and needs nothing."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from html_kit import checked
from kit import KIMI_MINI, flip, flip_byte
from safetensors import safe_open

from kconvert.convert import convert
from kconvert.layouts.manifest import read_manifest
from kconvert.layouts.quantization import Quantization
from kconvert.validate.findings import Entry, Finding, Pace, Validation
from kconvert.validate.report.render import render
from kconvert.validate.report.write import subject_of
from kconvert.validate.statistics import LayerStatistics, ScaleSums

TENSOR = "language_model.model.layers.1.mlp.experts.w2_weight_packed"
RANK1 = "rank-00001-of-00002/layer-00001.safetensors"


@pytest.fixture
def output(tmp_path: Path) -> Path:
    convert(KIMI_MINI, tmp_path / "out", tp=2)
    return tmp_path / "out"


def test_a_sound_output(output: Path, kconvert, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    outcome = kconvert("validate", output, "--source", KIMI_MINI, "--report", target)
    assert outcome.code == 0
    page = checked(target.read_text())
    assert "Every code, scale and tensor is the source&#39;s, bit for bit." in page
    assert "failed" not in re.sub(r"<style>.*?</style>", "", page, flags=re.S)
    assert subject_of(output).digest in page and "4,627,328" in page
    assert {path.name for path in tmp_path.iterdir()} == {"out", "report.html"}


def test_a_damaged_output(output: Path, kconvert, tmp_path: Path) -> None:
    flip(output / RANK1, "w2_weight_packed", expert=0)
    target = tmp_path / "report.html"
    assert kconvert("validate", output, "--source", KIMI_MINI, "--report", target).code == 1
    page = checked(target.read_text())
    assert "Different: 2 errors." in page
    assert f"{RANK1}, tensor {TENSOR}, expert 0" in page and "first at row" in page
    assert f"rm -f out/{RANK1}" in page and "--layout marlin --tp 2" in page


@pytest.mark.parametrize("damage", ["header", "missing"])
def test_blobs_that_cannot_be_read(damage: str, output: Path, kconvert, tmp_path: Path) -> None:
    target, path = tmp_path / "report.html", output / RANK1
    if damage == "header":
        flip_byte(path, 9)
    else:
        path.unlink()
    assert kconvert("validate", output, "--report", target).code == 1
    page = checked(target.read_text())
    assert "Different" in page and RANK1 in page
    assert "The data of 1 blob(s) was not read" in page


def test_what_was_not_compared_is_said(output: Path, kconvert, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    kconvert("validate", output, "--sample", 2, "--seed", 5, "--report", target)
    page = checked(target.read_text())
    assert "No source was given" in page and "Every digest agrees." in page
    assert "4 of 16 experts were read, drawn with seed 5" in page
    assert "--sample 2 --seed 5" in page


def test_a_program_can_compare_what_it_loaded(output: Path) -> None:
    """The page's JSON is what safetensors gives of every blob."""
    page = render(Validation(True, False, None), subject_of(output))
    parity = json.loads(re.search(r'id="parity">(.*?)</script>', page)[1])
    assert len(parity) == 2 * 2 + 5
    blob = output / RANK1
    with safe_open(blob, "pt") as opened:
        assert set(opened.keys()) == set(parity[RANK1])
        for name, held in parity[RANK1].items():
            tensor = opened.get_tensor(name)
            assert [*tensor.shape] == held["shape"] and [*tensor.stride()] == held["stride"]
            digests = [xxhash.xxh3_128(memoryview(e.view(torch.uint8).numpy())).digest()
                       for e in tensor]  # fmt: skip
            assert xxhash.xxh3_128(b"".join(digests)).hexdigest() == held["xxh3"]


def test_names_are_text(output: Path) -> None:
    result = Validation(True, False, None)
    result.found([Finding("<script>alert(1)</script>", "x & y", check="files")])
    page = render(result, subject_of(output))
    assert "<script>alert" not in page and "&lt;script&gt;alert(1)" in page


def test_no_folder_no_report(output: Path, kconvert, tmp_path: Path) -> None:
    outcome = kconvert("validate", output, "--report", tmp_path / "none/report.html")
    assert outcome.code == 2 and "is no folder here" in outcome.err


def generated() -> Validation:
    """A validation of K2.6's size, made up: 60 layers of 384 experts."""
    random = np.random.default_rng(0)
    result = Validation(True, True, None, files=543, tensors=1141, experts=60 * 384 * 8)
    for layer in range(1, 61):
        statistics = LayerStatistics(384, Quantization(32))
        for expert in range(384):
            codes = (np.exp(-(((np.arange(16) - 8) / 3) ** 2)) * 6_000_000).astype(np.int64)
            codes += random.integers(0, 20_000, 16)
            codes[0] = 0
            statistics.add_codes(expert, codes)
            statistics.bytes += int(codes.sum() * 4.5 / 8)
            mean = random.normal(0.0167 - layer / 9000, 2e-4) * (
                2 if (layer, expert) == (30, 7) else 1
            )
            zeros, denormals = random.poisson(0.3, 2).tolist()
            sums = ScaleSums(
                1_376_256,
                zeros,
                denormals,
                0,
                1_376_256 * mean,
                1_376_256 * 1.1 * mean**2,
                1e-4,
                3 * mean,
            )
            statistics.add_scales(expert, sums)
        result.statistics[layer] = statistics
        result.pace.append(Pace(f"layer-{layer:05}", 19_900_000_000, random.uniform(5, 8)))
    result.found(
        Finding(f"rank-{i % 8:05}-of-00008/layer-00001.safetensors", "made up", "w2", i, "codes")
        for i in range(3000)
    )
    for check in result.checks:
        check.skipped, check.amount, check.unit = "", 1141, "tensors"
        check.bytes, check.seconds = 595_000_000_000, 2000.0
    result.ledger = [
        Entry("codes, packed", 508_000_000_000, 69_120), Entry("scales", 63_500_000_000, 69_120),
        Entry("tensors that are not cut", 23_200_000_000, 1141),
        Entry("companions that follow from shapes, dropped", 552_960, 69_120),
    ]  # fmt: skip
    result.bytes_read, result.seconds = 1_190_000_000_000, 420.0
    return result


def test_all_of_k26_is_small_and_says_that_it_is_made_up(output: Path) -> None:
    result = generated()
    parity = subject_of(output).parity
    subject = subject_of(output)._replace(
        label="Made up, to test this page",
        rank_bytes={f"rank-{r:05}": 71 << 30 for r in range(8)},
        layer_bytes={f"layer-{n:05}": 10 << 30 for n in range(61)},
        parity={
            f"rank-{r:05}-of-00008/layer-{n:05}.safetensors": parity[RANK1]
            for r in range(8)
            for n in range(1, 61)
        },
    )
    page = checked(render(result, subject))
    assert "Made up, to test this page" in page
    assert len(page.encode()) < 5_000_000
    assert "and 2,950 more" in page and "# and 3 more files" in page
    assert "4.500 bits" in page and "7 of layer 30" in page
    assert read_manifest(output).layout in page
