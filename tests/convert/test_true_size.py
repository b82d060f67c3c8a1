"""A K2.6 layer with true sizes and 16 of its experts, tp 8, checked bit for bit."""

from pathlib import Path

import numpy as np
from kit import load, marlin_formula

from kconvert.convert import convert
from kconvert.convert.synth.write import synth
from kconvert.validate import validate

EXPERTS = 16
PREFIX = "language_model.model.layers.1.mlp.experts."


def test_true_size_layer(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    (shard,) = synth(source, "k2.6", layers=[1], experts=EXPERTS)
    result = convert(source, out, tp=8, layers=[1])
    assert (result.files_written, result.complete) == (9, False)
    assert result.bytes_read > EXPERTS * 24_772_608

    # By the validator, which unpacks by other arithmetic …
    checked = validate(out, source)
    assert checked.findings == []
    assert checked.experts == 8 * EXPERTS

    # … and by hand for one expert on one rank, from nothing but the facts.
    tensors = load(shard)
    gate = _words(tensors[f"{PREFIX}11.gate_proj.weight_packed"])
    down = _words(tensors[f"{PREFIX}11.down_proj.weight_packed"])
    scale = _words(tensors[f"{PREFIX}11.up_proj.weight_scale"], np.uint16)
    blob = load(out / "rank-00005-of-00008/layer-00001.safetensors")
    w13 = _words(blob[f"{PREFIX}w13_weight_packed"])
    assert w13.shape == (EXPERTS, 448, 1024)
    assert np.array_equal(w13[11, :, :512], marlin_formula(gate[5 * 256 : 6 * 256]))
    w2 = _words(blob[f"{PREFIX}w2_weight_packed"])
    assert np.array_equal(w2[11], marlin_formula(down[:, 5 * 32 : 6 * 32]))
    w13_scale = _words(blob[f"{PREFIX}w13_weight_scale"], np.uint16)
    up = scale[5 * 256 : 6 * 256]
    n = np.arange(256)
    place = 64 * (n // 64) + 8 * (n % 8) + n % 64 // 8
    assert np.array_equal(w13_scale[11, :, 256:][:, place], up.T)


def test_synth_keeps_moonshots_grid(tmp_path: Path) -> None:
    """No −8, and a ±7 in every group of 32; scales are positive and finite."""
    (shard,) = synth(tmp_path / "source", "k2.6", layers=[1], experts=1)
    tensors = load(shard)
    for projection in ("gate_proj", "up_proj", "down_proj"):
        packed = _words(tensors[f"{PREFIX}0.{projection}.weight_packed"]).view(np.uint32)
        nibbles = packed[:, :, None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
        groups = nibbles.reshape(-1, 32)
        assert groups.min() == 1 and groups.max() == 15
        assert np.all((groups == 15).any(1) | (groups == 1).any(1))
        bits = _words(tensors[f"{PREFIX}0.{projection}.weight_scale"], np.uint16)
        values = (bits.astype(np.uint32) << 16).view(np.float32)
        assert values.min() > 0.003 and values.max() < 0.1


def test_any_part_equals_that_part_of_the_whole(tmp_path: Path) -> None:
    synth(tmp_path / "all", "kimi-mini", seed=3)
    synth(tmp_path / "part", "kimi-mini", layers=[2], seed=3)
    synth(tmp_path / "other", "kimi-mini", layers=[2], seed=4)
    name = "model-00003-of-000006.safetensors"
    whole, part, other = (tmp_path / f / name for f in ("all", "part", "other"))
    assert whole.read_bytes() == part.read_bytes() != other.read_bytes()
    assert validate_round(tmp_path / "all", tmp_path / "out")


def test_kimi_mini_has_the_samples_headers() -> None:
    """The same names, dtypes, shapes, order and config as the checkpoint none of us wrote."""
    import json

    from kit import KIMI_MINI

    from kconvert.convert.synth.presets import PRESETS, shards
    from kconvert.layouts.header import file_order, read_header, shard_header

    preset = PRESETS["kimi-mini"]
    assert json.loads((KIMI_MINI / "config.json").read_text()) == preset.config
    paths = sorted(KIMI_MINI.glob("*.safetensors"))
    for path, tensors in zip(paths, shards(preset), strict=True):
        assert shard_header(file_order(tensors)) == read_header(path).raw


def validate_round(source: Path, out: Path) -> bool:
    convert(source, out, tp=2)
    return validate(out, source).ok


def _words(tensor, dtype=np.int32) -> np.ndarray:
    return np.frombuffer(tensor.data, dtype).reshape(tensor.shape)
