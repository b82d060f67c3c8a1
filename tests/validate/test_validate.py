"""Validation: quiet where all is well, and naming file, tensor and expert where it is not."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kit import KIMI_MINI, SHARD, change_json, copy_mini, forge
from numpy.typing import NDArray

from kconvert.layouts.checkpoint import SourceTensor
from kconvert.layouts.header import read_header
from kconvert.layouts.manifest import encode_manifest, read_manifest
from kconvert.layouts.reader import Reader
from kconvert.validate import validate

RANK1 = "rank-00001-of-00002/layer-00001.safetensors"
PREFIX = "language_model.model.layers.1.mlp.experts."


@pytest.fixture
def out(output: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(output, tmp_path / "out"))


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x10
    path.write_bytes(raw)


def flip_tensor(out: Path, name: str, tensor: str, at: int) -> None:
    flip(out / name, read_header(out / name).tensors[tensor].start + at)


def test_a_sound_output(output: Path) -> None:
    alone = validate(output)
    assert alone.ok and not alone.against_source
    checked = validate(output, KIMI_MINI)
    assert checked.ok and checked.complete and checked.against_source
    assert (checked.files, checked.tensors) == (11, 76)
    assert checked.experts == 2 * 2 * 8  # layers, ranks, experts
    data = sum(e.bytes for e in read_manifest(output).files.values())
    assert alone.bytes_read < data  # each byte of the blobs' data once, headers apart
    shapes = 2 * 8 * 3 * 8  # weight_shape is in the source alone
    assert checked.bytes_read - alone.bytes_read == 4_627_328 == alone.bytes_read + shapes


def test_the_disk_is_asked_for_experts_ahead_of_their_turn(output: Path, monkeypatch) -> None:
    """For just what is read of them then; the first two were not asked for."""
    asked: list[tuple[str, int]] = []
    read: list[tuple[str, int]] = []
    real = Reader.read_into

    def read_into(self: Reader, tensor: SourceTensor, out: NDArray[Any]) -> None:
        read.append((tensor.shard, tensor.start))
        real(self, tensor, out)

    monkeypatch.setattr(Reader, "expect", lambda _, t: asked.append((t.shard, t.start)))
    monkeypatch.setattr(Reader, "read_into", read_into)
    monkeypatch.setattr("kconvert.validate.data._AHEAD", 2)
    assert validate(output, KIMI_MINI, workers=1).ok
    assert len(asked) == len(set(asked)) and set(asked) < set(read)
    assert len(asked) == 2 * 6 * (6 + 2 * 4)  # layers, experts; tensors of the source, of ranks


def test_a_sample(output: Path) -> None:
    checked = validate(output, KIMI_MINI, sample=3)
    assert checked.ok and checked.experts == 2 * 2 * 3


def test_a_sample_does_not_claim_the_whole(output: Path, kconvert) -> None:
    said = kconvert("validate", output, "--source", KIMI_MINI, "--sample", 2).out
    assert "every code and scale of 2 experts a layer is the source's" in said


def test_a_truncated_blob_is_not_to_be_downloaded_again(out: Path) -> None:
    os.truncate(out / RANK1, (out / RANK1).stat().st_size - 1)
    said = [str(finding) for finding in validate(out).findings]
    assert any(text.startswith(f"{RANK1}: is truncated: ") for text in said), said
    assert not any(str(out) in text or "download" in text for text in said)


@pytest.mark.parametrize("with_source", [False, True])
def test_changed_bytes(with_source: bool, out: Path) -> None:
    tensor = f"{PREFIX}w2_weight_packed"
    size = read_header(out / RANK1).tensors[tensor].nbytes // 8
    flip_tensor(out, RANK1, tensor, 5 * size + 17)
    result = validate(out, KIMI_MINI if with_source else None)
    first, *others = result.findings
    assert (first.file, first.tensor, first.expert) == (RANK1, tensor, 5)
    assert "its bytes were changed: the digest disagrees" in str(first)
    assert len(others) == with_source


@pytest.mark.parametrize(
    ("tensor", "what"),
    [("w13_weight_packed", "codes"), ("w13_weight_scale", "scales"), ("w2_weight_packed", "codes"),
     ("w2_weight_scale", "scales")],
)  # fmt: skip
def test_a_wrong_code_or_scale_under_right_digests(tensor: str, what: str, out: Path) -> None:
    """Digests prove nothing about the conversion; the source does."""
    name = PREFIX + tensor
    size = read_header(out / RANK1).tensors[name].nbytes // 8
    flip_tensor(out, RANK1, name, 6 * size + 9)
    forge(out, RANK1)
    assert validate(out).ok
    (finding,) = validate(out, KIMI_MINI).findings
    assert (finding.file, finding.tensor, finding.expert) == (RANK1, name, 6)
    assert f"1 of its {what} differs" in finding.text and "first at row" in finding.text
    seen = [validate(out, KIMI_MINI, sample=2, seed=seed).ok for seed in range(8)]
    assert set(seen) == {True, False}  # the drawing decides, and a seed repeats it
    assert seen[:2] == [validate(out, KIMI_MINI, sample=2, seed=seed).ok for seed in range(2)]


def test_swapped_gate_and_up(out: Path) -> None:
    """[up; gate] costs a model everything and no digest shows it."""
    tensor = read_header(out / RANK1).tensors[f"{PREFIX}w13_weight_packed"]
    raw = bytearray((out / RANK1).read_bytes())
    line = 4 * tensor.shape[2]
    for at in range(tensor.start, tensor.start + tensor.nbytes, line):
        half = line // 2
        raw[at : at + line] = raw[at + half : at + line] + raw[at : at + half]
    (out / RANK1).write_bytes(raw)
    forge(out, RANK1)
    findings = validate(out, KIMI_MINI).findings
    assert [f.expert for f in findings] == list(range(8))


def test_a_changed_common_tensor(out: Path) -> None:
    name = "language_model.model.layers.1.mlp.gate.e_score_correction_bias"
    flip_tensor(out, "common/layer-00001.safetensors", name, 2)
    (finding,) = validate(out).findings
    assert finding.tensor == name
    forge(out, "common/layer-00001.safetensors")
    (finding,) = validate(out, KIMI_MINI).findings
    assert (finding.tensor, finding.text) == (name, "its bytes are not the source's")


def change_bytes(path: Path, old: bytes, new: bytes) -> None:
    path.write_bytes(path.read_bytes().replace(old, new))


def test_a_manifest_that_forgets_a_layer(out: Path) -> None:
    """What must be there follows from the config, not from the converter's own list."""
    manifest = read_manifest(out)
    files = {name: e for name, e in manifest.files.items() if "layer-00002" not in name}
    for name in manifest.files.keys() - files.keys():
        (out / name).unlink()
    (out / "kconvert.json").write_bytes(encode_manifest(replace(manifest, files=files)))
    findings = validate(out).findings
    assert {f.file for f in findings} == manifest.files.keys() - files.keys()
    assert all("which says that it is complete" in f.text for f in findings)


def test_vision_that_is_forgotten(out: Path) -> None:
    """The config does not tell of it, the source does."""
    manifest = read_manifest(out)
    name = "common/vision.safetensors"
    files = {n: e for n, e in manifest.files.items() if n != name}
    (out / name).unlink()
    (out / "kconvert.json").write_bytes(encode_manifest(replace(manifest, files=files)))
    assert validate(out).ok
    assert [f.file for f in validate(out, KIMI_MINI).findings] == [name]


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"expert_digests", b"expert_digestz"), (b'fingerprint\\":\\"', b'fingerprint\\":\\"zz')],
)
def test_rotten_metadata(old: bytes, new: bytes, out: Path, kconvert) -> None:
    raw = (out / RANK1).read_bytes()
    assert old in raw
    new = new.ljust(len(old)) if len(new) < len(old) else new
    at = raw.index(old)
    (out / RANK1).write_bytes(raw[:at] + new + raw[at + len(new) :])
    (finding, *_) = validate(out).findings
    assert finding.file == RANK1 and "metadata is not readable" in finding.text
    assert kconvert("convert", KIMI_MINI, out, "--tp", 2).code == 2


@pytest.mark.parametrize("values", [{"tp": "2"}, {"tp": 0}, {"ep": 3}, {"files": []}])
def test_manifest_that_makes_no_sense(values: dict, out: Path, kconvert) -> None:
    """Its digest agrees, its values cannot be."""
    from kconvert.layouts import manifest as module

    def change(table: dict) -> None:
        table |= values
        del table["digest"]
        table["digest"] = module._own_digest(table)

    change_json(out / "kconvert.json", change)
    outcome = kconvert("validate", out)
    assert outcome.code == 2 and "is not a manifest of kconvert" in outcome.err


def edit_manifest(out: Path) -> None:
    change_json(out / "kconvert.json", lambda table: table.update(tp=4))


def no_header(out: Path) -> None:
    (out / RANK1).write_bytes(b"\0" * (out / RANK1).stat().st_size)


def other_header(out: Path) -> None:
    flip(out / RANK1, (out / RANK1).read_bytes().index(b"fingerprint") + 40)


def swapped_ranks(out: Path) -> None:
    zero = out / RANK1.replace("00001-of", "00000-of")
    one, swap = out / RANK1, out / "swap"
    zero.rename(swap)
    one.rename(zero)
    swap.rename(one)


STRUCTURE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "missing blob": (lambda o: (o / RANK1).unlink(), RANK1, "is missing"),
    "truncated blob": (lambda o: os.truncate(o / RANK1, 9999), RANK1, "has 9,999 bytes"),
    "blob of zeros": (no_header, RANK1, "header"),
    "changed header": (other_header, RANK1, "its metadata is not readable"),
    "swapped ranks": (swapped_ranks, RANK1, "its header is not the one"),
    "changed small file": (
        lambda o: change_bytes(o / "config.json", b"yarn", b"YARN"),
        "config.json", "was changed",
    ),
    "missing small file": (
        lambda o: (o / "generation_config.json").unlink(), "generation_config.json", "is missing",
    ),
    "stray blob": (
        lambda o: shutil.copy(o / RANK1, o / "common/layer-00007.safetensors"),
        "common/layer-00007.safetensors", "is not in kconvert.json",
    ),
    "checkpoint at the root": (
        lambda o: shutil.copy(KIMI_MINI / SHARD, o / SHARD), SHARD, "is not in kconvert.json",
    ),
    "index at the root": (
        lambda o: (o / "model.safetensors.index.json").write_text("{}"),
        "model.safetensors.index.json", "other engines",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STRUCTURE)
def test_structure(name: str, out: Path) -> None:
    change, file, text = STRUCTURE[name]
    change(out)
    findings = validate(out).findings
    assert any(f.file == file and text in f.text for f in findings), findings


def test_another_source(out: Path, tmp_path: Path) -> None:
    other = copy_mini(tmp_path / "other")
    flip(other / SHARD, (other / SHARD).stat().st_size - 1)
    (finding,) = validate(out, other).findings
    assert finding.file == "common/layer-00001.safetensors"
    (other / "generation_config.json").write_text("{}")
    assert "is not the source's" in str(validate(out, other).findings[0])


def test_exit_codes_and_sentences(out: Path, tmp_path: Path, kconvert) -> None:
    good = kconvert("validate", out, "--source", KIMI_MINI)
    assert good.code == 0 and "every code and scale is the source's" in good.out
    flip_tensor(out, RANK1, f"{PREFIX}w13_weight_packed", 3)
    bad = kconvert("validate", out, "--source", KIMI_MINI)
    assert bad.code == 1
    assert f"{RANK1}, tensor {PREFIX}w13_weight_packed, expert 0: " in bad.out
    table = json.loads(kconvert("validate", out, "--json").out)
    assert table["ok"] is False and table["findings"][0]["expert"] == 0
    edit_manifest(out)
    changed = kconvert("validate", out)
    assert changed.code == 2 and "kconvert.json was changed" in changed.err
    (out / "kconvert.json").unlink()
    unfinished = kconvert("validate", out)
    assert unfinished.code == 2 and "has no kconvert.json" in unfinished.err
    assert kconvert("validate", tmp_path / "nowhere").code == 2


def test_source_without_a_layer_that_the_output_has(out: Path, tmp_path: Path, kconvert) -> None:
    part = copy_mini(tmp_path / "part")
    (part / SHARD).unlink()
    outcome = kconvert("validate", out, "--source", part)
    assert outcome.code == 2
    assert f"the source has no layer-00001 ({SHARD})" in outcome.err
