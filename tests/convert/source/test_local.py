"""A folder that was never a whole checkpoint: seen, named, and never half taken."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from kit import EXPERT0, KIMI_MINI, SHARD, Tensor, load, tree, write

from kconvert.convert import convert
from kconvert.convert.source.hashes import known_oid, oid_of
from kconvert.layouts.errors import CheckpointError, UnsupportedError
from kconvert.validate import validate

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 2795286\n"
SCALE = f"{EXPERT0}gate_proj.weight_scale"


@pytest.mark.parametrize(
    "mark", [".aria2", ".incomplete", ".crdownload", ".part", ".PARTIAL", ".!qB", ".lock"]
)
@pytest.mark.parametrize("file", [SHARD, "config.json"])
def test_a_download_that_has_not_ended(mark, file, mini: Path, tmp_path: Path, kconvert) -> None:
    (mini / f"{file}{mark}").write_bytes(b"")
    outcome = kconvert("convert", mini, tmp_path / "out")
    assert outcome.code == 2 and not (tmp_path / "out").exists()
    assert f"{file}{mark} lies beside {file}, whose download has not ended" in outcome.err


def test_marks_and_notes_are_never_copied(mini: Path, tmp_path: Path, kconvert) -> None:
    for name in ("other.bin.aria2", "config.json:Zone.Identifier", f"{SHARD}:Zone.Identifier"):
        (mini / name).write_bytes(b"x")
    outcome = kconvert("convert", mini, tmp_path / "out")
    assert outcome.code == 0 and "other.bin.aria2: part of a download" in outcome.out
    assert not [name for name in tree(tmp_path / "out") if "Zone" in name or "aria2" in name]


@pytest.mark.parametrize(
    "name", ["tiktoken.model", "chat_template.jinja", "config.json", "generation_config.json",
             "model.safetensors.index.json", "LICENSE", SHARD],
)  # fmt: skip
def test_any_file_may_be_an_lfs_pointer(name, mini: Path, tmp_path: Path, kconvert) -> None:
    (mini / name).write_bytes(POINTER)
    outcome = kconvert("convert", mini, tmp_path / "out")
    assert outcome.code == 2 and f"{name} is a Git LFS pointer" in outcome.err
    assert not (tmp_path / "out").exists()


def test_a_tail_of_zeros_is_named(mini: Path, tmp_path: Path, kconvert) -> None:
    """Of full size, never filled to its end."""
    raw = (mini / SHARD).read_bytes()
    (mini / SHARD).write_bytes(raw[:-8000] + bytes(8000))
    outcome = kconvert("convert", mini, tmp_path / "out", "--dry-run")
    assert outcome.code == 0
    assert f"warning: the last 4,096 bytes of {SHARD} are all zero: was it ever" in outcome.out
    assert "zero: was it" not in " ".join(convert(KIMI_MINI, tmp_path / "whole").warnings)


def patched(source: Path, name: str, change: Callable[[bytearray], object]) -> None:
    tensors = load(source / SHARD)
    dtype, shape, data = tensors[name]
    changed = bytearray(data)
    change(changed)
    write(source / SHARD, tensors | {name: Tensor(dtype, shape, bytes(changed))})


@pytest.mark.parametrize("bits", [b"\x80\x7f", b"\x80\xff", b"\xc0\x7f", b"\xff\xff"])
def test_scales_that_are_not_finite(bits: bytes, mini: Path, tmp_path: Path, kconvert) -> None:
    """Infinities and NaN of either sign, in bfloat16."""
    groups = load(mini / SHARD)[SCALE].shape[1]
    at = 2 * (37 * groups + 5)
    patched(mini, SCALE, lambda data: data.__setitem__(slice(at, at + 2), bits))
    outcome = kconvert("convert", mini, tmp_path / "out", "--tp", 2)
    assert outcome.code == 2
    assert f"{SHARD}, tensor {SCALE}: the scale of row 37, group 5 is not finite" in outcome.err


def test_validate_finds_scales_that_are_not_finite(tmp_path: Path, monkeypatch) -> None:
    """In an output that a careless converter wrote, its digests right."""
    from kconvert.convert import oddities
    from kconvert.layouts.scan import ScaleScan

    source = tmp_path / "source"
    source.mkdir()
    for path in KIMI_MINI.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    patched(source, SCALE, lambda data: data.__setitem__(slice(0, 2), b"\xc0\x7f"))
    monkeypatch.setattr(oddities, "scan_scales", lambda *_: ScaleScan(None, 0))
    convert(source, tmp_path / "out")
    for findings in (
        validate(tmp_path / "out").findings,
        validate(tmp_path / "out", source).findings,
    ):
        (finding,) = findings
        assert "a scale is not finite" in finding.text and finding.expert == 0


def test_zero_scales_and_experts_of_one_code_are_warned_of(mini: Path, tmp_path, kconvert) -> None:
    down = f"{EXPERT0}down_proj.weight_packed"
    before = zero_scales()
    assert before == 48  # one group of every matrix there is all zeros
    first = f"{EXPERT0}down_proj.weight_scale"
    said = f"48 scales of 48 tensors are zero, the first in {first}"
    assert said in convert(KIMI_MINI, tmp_path / "as it was").warnings
    zeros = b"\0\0\0\x80\0\0"  # of either sign
    patched(mini, SCALE, lambda data: data.__setitem__(slice(-6, None), zeros))
    patched(mini, down, lambda data: data.__setitem__(slice(None), b"\x88" * len(data)))
    outcome = kconvert("convert", mini, tmp_path / "out", "--tp", 2, "--json")
    warnings = json.loads(outcome.out)["warnings"]
    assert f"51 scales of 48 tensors are zero, the first in {first}" in warnings
    assert f"1 expert matrices are all one code, the first {down}" in warnings


def zero_scales() -> int:
    """Of kimi-mini, counted by numpy."""
    return sum(
        int((np.frombuffer(tensor.data, np.uint16) & 0x7FFF == 0).sum())
        for path in KIMI_MINI.glob("*.safetensors")
        for name, tensor in load(path).items()
        if name.endswith("weight_scale")
    )


def cache_of(source: Path, folder: Path) -> Path:
    """huggingface_hub's cache: files are links to blobs that are named by their hash."""
    snapshot, blobs = folder / "snapshots/abc", folder / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in source.iterdir():
        oid = hash_of(path)
        (blobs / oid).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(Path("../../blobs") / oid)
    return snapshot


def hash_of(path: Path) -> str:
    raw = path.read_bytes()
    if path.suffix == ".safetensors":
        return hashlib.sha256(raw).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(raw) + raw).hexdigest()


def download_of(source: Path, folder: Path) -> Path:
    """A download into a plain folder: notes lie beside it."""
    notes = folder / ".cache/huggingface/download"
    notes.mkdir(parents=True)
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
        (notes / f"{path.name}.metadata").write_text(f"{'c' * 40}\n{hash_of(path)}\n1.5\n")
    return folder


@pytest.mark.parametrize("way", [cache_of, download_of])
@pytest.mark.parametrize("file", [SHARD, "config.json"])
def test_verify_compares_with_the_hashes_at_hand(way, file, tmp_path: Path, kconvert) -> None:
    source, out = way(KIMI_MINI, tmp_path / "source"), tmp_path / "out"
    first = kconvert("convert", source, out, "--verify", "--json")
    assert first.code == 0 and json.loads(first.out)["verified"] is True
    assert kconvert("validate", out, "--source", source, "--verify").code == 0
    raw = bytearray((source / file).read_bytes())
    raw[raw.rindex(b"\n") if file == "config.json" else -3] ^= 0x2A  # a line's end: a space
    oid = known_oid(source / file)
    (source / file).resolve().write_bytes(raw)
    for command in (
        ("convert", source, tmp_path / "again", "--verify"),
        ("validate", out, "--source", source, "--verify"),
    ):
        outcome = kconvert(*command)
        assert outcome.code == 2
        assert f"{file} has the hash {oid_of(source / file, oid)}, expected {oid}" in outcome.err
    blobs = list((tmp_path / "again").rglob("layer-00001.safetensors"))
    assert blobs == []  # nothing of the shard is published


def test_verify_is_refused_without_hashes(mini: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"--verify: no hash of .* is at hand"):
        convert(mini, tmp_path / "out", verify=True)
    convert(mini, tmp_path / "out")
    with pytest.raises(UnsupportedError, match="no hash of"):
        validate(tmp_path / "out", mini, verify=True)
    with pytest.raises(UnsupportedError, match="give --source"):
        validate(tmp_path / "out", verify=True)


def test_a_folder_that_is_empty(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        convert(tmp_path / "source", tmp_path / "out")


def test_an_output_is_no_source(tmp_path: Path) -> None:
    convert(KIMI_MINI, tmp_path / "out", tp=1)
    with pytest.raises(CheckpointError, match="is an output of kconvert, not a checkpoint"):
        convert(tmp_path / "out", tmp_path / "again", tp=1)
    assert not (tmp_path / "again").exists()
