"""What a validation records beside its findings: checks, the ledger, statistics, its JSON."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit import KIMI_MINI, copy_mini, flip

import kconvert.validate
from kconvert.convert import convert
from kconvert.layouts.checkpoint import read_checkpoint
from kconvert.layouts.manifest import encode_manifest, read_manifest
from kconvert.layouts.quantization import Quantization, unpack_words
from kconvert.layouts.scan import widened
from kconvert.validate import validate
from kconvert.validate.findings import CHECKS, OF_SOURCE
from kconvert.validate.statistics import LayerStatistics, ScaleSums, count_codes, sum_scales
from kconvert.validate.structure import check_alignment, read_blobs

SCHEMA = Path(kconvert.validate.__file__).with_name("schema") / "1.json"
RANK0 = "rank-00000-of-00002/layer-00001.safetensors"


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("record") / "out"
    convert(KIMI_MINI, folder, tp=2)
    return folder


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


def test_every_check_says_what_it_did(output: Path) -> None:
    alone, both = validate(output), validate(output, KIMI_MINI)
    assert [check.id for check in both.checks] == [*CHECKS]
    done = {check.id for check in both.checks if check.outcome == "passed"}
    assert done == CHECKS.keys() - {"zero-points", "biases"}
    assert both.check("product").amount == 2 * 2 * 2  # layers, ranks, w13 and w2
    assert {c.id for c in alone.checks if c.skipped} == {*OF_SOURCE}
    assert both.check("digests").bytes == alone.bytes_read
    assert both.check("codes").amount == 2 * 2 * 8 * 2  # layers, ranks, experts, w13 and w2


def test_findings_name_their_check(output: Path, tmp_path: Path) -> None:
    convert(KIMI_MINI, tmp_path / "out", tp=2)
    flip(tmp_path / "out" / RANK0, "w2_weight_packed", expert=3)
    result = validate(tmp_path / "out", KIMI_MINI)
    assert [finding.check for finding in result.findings] == ["digests", "codes"]
    assert result.check("codes").outcome == "failed" and result.check("scales").outcome == "passed"


def test_one_damaged_blob_does_not_hide_another(output: Path, tmp_path: Path) -> None:
    convert(KIMI_MINI, tmp_path / "out", tp=2)
    (tmp_path / "out/common/layer-00000.safetensors").unlink()
    flip(tmp_path / "out" / RANK0, "w13_weight_packed", expert=2)
    result = validate(tmp_path / "out", KIMI_MINI)
    assert result.unread == ["common/layer-00000.safetensors"]
    lost = "common/layer-00000.safetensors"
    assert {(f.file, f.check) for f in result.findings} == {
        (lost, "files"), (lost, "source-files"), (RANK0, "digests"), (RANK0, "codes"),
    }  # fmt: skip


def test_a_small_file_that_the_source_lacks(output: Path, tmp_path: Path) -> None:
    source = copy_mini(tmp_path / "source")
    (source / "generation_config.json").unlink()
    (finding,) = validate(output, source).findings
    assert str(finding) == "generation_config.json: is not in the source"


def test_statistics_are_those_of_the_source(output: Path) -> None:
    """From marlin's bytes, in whatever order they lie."""
    layer = validate(output).statistics[1]
    checkpoint = read_checkpoint(KIMI_MINI)
    for expert in (0, 7):
        codes = np.zeros(16, np.int64)
        scales, squares = [], []
        for name, tensor in checkpoint.tensors.items():
            if f"layers.1.mlp.experts.{expert}." not in name:
                continue
            raw = (KIMI_MINI / tensor.shard).read_bytes()[tensor.start :][: tensor.nbytes]
            if name.endswith("weight_packed"):
                words = np.frombuffer(raw, np.int32).reshape(tensor.shape)
                read = unpack_words(words, 4)
                codes += np.bincount(read.reshape(-1), minlength=16)
                groups = ((read.astype(np.int64) - 8) ** 2).reshape(len(read), -1, 32)
                squares.append(groups.sum(axis=2).reshape(-1))
            elif name.endswith("weight_scale"):
                scales.append(np.abs(widened(np.frombuffer(raw, np.uint16), "BF16")))
        assert (layer.codes[expert] == codes).all()
        every = np.concatenate(scales).astype(np.float64)
        assert layer.scales[expert, 0] == every.size
        assert layer.means[expert] == pytest.approx(every.mean())
        weights = np.sqrt((np.concatenate(squares) * every**2).sum() / codes.sum())
        assert layer.sizes[expert] == pytest.approx(weights, rel=0.05)  # an estimate
        assert layer.greatest[expert] == every.max()
        assert layer.bits_a_weight == 4.5  # a bf16 scale for 32 codes
        assert layer.least[expert] == every[every > 0].min()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [1, 2, 7, 4096])
def test_codes_are_counted(bits: int, size: int) -> None:
    words = np.random.default_rng(size).integers(-(1 << 31), 1 << 31, size).astype(np.int32)
    expected = np.bincount(unpack_words(words[None], bits).reshape(-1), minlength=1 << bits)
    assert (count_codes(words, bits) == expected).all()


def test_odd_scales_are_counted() -> None:
    bits = np.array(
        [0x0000, 0x8000, 0x0001, 0x3F80, 0xC000, 0x7F80], np.uint16
    )  # ±0, tiny, 1, −2, ∞
    sums = sum_scales(bits, "BF16")
    assert (sums.count, sums.zeros, sums.denormals, sums.greatest) == (6, 2, 1, 2.0)
    assert sums.not_finite == 1
    assert sums.total == pytest.approx(3.0) and 0 < sums.least < 1e-38
    exponents = sum_scales(np.array([0, 127, 129], np.uint8), "U8")
    assert (exponents.zeros, exponents.least, exponents.greatest) == (1, 1.0, 4.0)


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_scale_there_is(dtype: str) -> None:
    """Against numpy, of all 65,536 bit patterns."""
    bits = np.random.default_rng(0).permutation(1 << 16).astype(np.uint16)
    with np.errstate(invalid="ignore"):  # signaling NaN
        values = np.abs(widened(bits, dtype).astype(np.float64))
    finite = values[np.isfinite(values)]
    normal = 2.0**-126 if dtype == "BF16" else 2.0**-14
    sums = sum_scales(bits, dtype)
    assert sums.zeros == (finite == 0).sum() == 2
    assert sums.denormals == ((finite > 0) & (finite < normal)).sum()
    assert sums.not_finite == len(values) - len(finite)
    assert (sums.least, sums.greatest) == (finite[finite > 0].min(), finite.max())
    assert sums.total == pytest.approx(finite.sum(), rel=1e-12)
    assert sums.squares == pytest.approx((finite**2).sum(), rel=1e-12)


def conforms(value: Any, schema: dict[str, Any], where: str = "") -> None:
    """As far as this schema goes; a key that it does not know is a fault."""
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float),
             "boolean": bool, "null": type(None)}  # fmt: skip
    if "const" in schema:
        assert value == schema["const"], where
    elif "enum" in schema:
        assert value in schema["enum"], where
    else:
        allowed = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        assert any(isinstance(value, kinds[kind]) for kind in allowed), where
    if isinstance(value, dict) and "properties" in schema:
        assert value.keys() == schema["properties"].keys() == set(schema["required"]), where
        for key, part in value.items():
            conforms(part, schema["properties"][key], f"{where}/{key}")
    elif isinstance(value, dict):
        for key, part in value.items():
            conforms(part, schema["additionalProperties"], f"{where}/{key}")
    elif isinstance(value, list):
        for part in value:
            conforms(part, schema["items"], f"{where}[]")


@pytest.mark.parametrize("options", [(), ("--source", KIMI_MINI), ("--sample", 2)])
def test_json_is_what_the_schema_says(output: Path, kconvert, options) -> None:
    table = json.loads(kconvert("validate", output, *options, "--json").out)
    conforms(table, json.loads(SCHEMA.read_text()))


def test_json_of_a_damaged_output(tmp_path: Path, kconvert) -> None:
    convert(KIMI_MINI, tmp_path / "out")
    (tmp_path / "out/config.json").unlink()
    outcome = kconvert("validate", tmp_path / "out", "--json")
    table = json.loads(outcome.out)
    conforms(table, json.loads(SCHEMA.read_text()))
    assert outcome.code == 1 and not table["ok"]
    assert {c["skipped"] for c in table["checks"] if c["id"] == "finite"} == {"not reached"}
    assert table["summary"].startswith("DIFFERENT: 1 error; ")


def test_json_says_where_codes_differ(tmp_path: Path, kconvert) -> None:
    convert(KIMI_MINI, tmp_path / "out", tp=2)
    flip(tmp_path / "out" / RANK0, "w2_weight_packed", expert=3)
    table = json.loads(kconvert("validate", tmp_path / "out", "--source", KIMI_MINI, "--json").out)
    conforms(table, json.loads(SCHEMA.read_text()))
    finding = next(finding for finding in table["findings"] if finding["check"] == "codes")
    assert finding["id"] == f"codes:{RANK0}:{finding['tensor']}:3" and finding["differing"] == 1
    (place,) = finding["places"]
    assert place["expected"] ^ place["found"] == 1
    for side in ("expected", "found"):
        assert place[f"{side}_value"] == place[side] - 8
        assert f"0x{place[side]:x} ({place[f'{side}_value']:.0f}) {side}" in finding["text"]


def test_what_is_no_error_is_a_warning_and_the_rest_is_read(tmp_path: Path) -> None:
    convert(KIMI_MINI, tmp_path / "out", tp=2)
    (tmp_path / "out/common/layer-00777.safetensors").write_bytes(b"0")
    manifest = replace(read_manifest(tmp_path / "out"), repo="someone/else", commit="c0ffee")
    (tmp_path / "out/kconvert.json").write_bytes(encode_manifest(manifest))
    result = validate(tmp_path / "out", KIMI_MINI)
    assert {finding.check for finding in result.findings} == {"files", "provenance"}
    assert {finding.severity for finding in result.findings} == {"warning"}
    assert not result.ok and result.unread == [] and result.check("codes").outcome == "passed"
    assert "made from a local folder, the manifest someone/else at c0ffee" in str(
        result.findings[-1]
    )


def test_tensors_off_their_pages(output: Path) -> None:
    blobs, _ = read_blobs(output, read_manifest(output))
    assert [*check_alignment(blobs)] == []
    blob = next(blob for blob in blobs if blob.path == RANK0)
    name, tensor = next((n, t) for n, t in blob.header.tensors.items() if t.nbytes % 4096 == 0)
    moved = blob.header._replace(tensors={name: tensor._replace(start=tensor.start + 8)})
    (finding,) = check_alignment([blob._replace(header=moved)])
    assert (finding.tensor, finding.severity) == (name, "warning")


def test_an_expert_unlike_the_others() -> None:
    layer = LayerStatistics(8, Quantization(32))
    for expert in range(8):
        mean = 3.0 if expert == 5 else 1.0 + expert / 100
        layer.add_scales(expert, ScaleSums(10, 0, 0, 0, 10 * mean, 10 * mean**2, mean, mean))
    assert layer.outliers == [5]
