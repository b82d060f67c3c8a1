"""Which check finds what, and what a validation goes on to read then."""

from dataclasses import replace
from pathlib import Path

from kit import KIMI_MINI, copy_mini, flip

from kconvert.convert import convert
from kconvert.layouts.manifest import encode_manifest, read_manifest
from kconvert.validate import validate
from kconvert.validate.findings import CHECKS, OF_SOURCE
from kconvert.validate.structure import check_alignment, read_blobs

RANK0 = "rank-00000-of-00002/layer-00001.safetensors"


def test_every_check_says_what_it_did(output: Path) -> None:
    alone, both = validate(output), validate(output, KIMI_MINI)
    assert [check.id for check in both.checks] == [*CHECKS]
    done = {check.id for check in both.checks if check.outcome == "passed"}
    assert done == CHECKS.keys() - {"zero-points", "biases"}
    assert both.check("product").amount == 2 * 2 * 2  # layers, ranks, w13 and w2
    assert {c.id for c in alone.checks if c.skipped} == {*OF_SOURCE}
    assert both.check("digests").bytes == alone.bytes_read
    assert both.check("codes").amount == 2 * 2 * 8 * 2  # layers, ranks, experts, w13 and w2


def test_findings_name_their_check(tmp_path: Path) -> None:
    convert(KIMI_MINI, tmp_path / "out", tp=2)
    flip(tmp_path / "out" / RANK0, "w2_weight_packed", expert=3)
    result = validate(tmp_path / "out", KIMI_MINI)
    assert [finding.check for finding in result.findings] == ["digests", "codes"]
    assert result.check("codes").outcome == "failed" and result.check("scales").outcome == "passed"


def test_one_damaged_blob_does_not_hide_another(tmp_path: Path) -> None:
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
