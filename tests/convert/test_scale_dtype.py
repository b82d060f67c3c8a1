"""Scales are kept as they are, and cast only on request, which says what is lost."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from formats_kit import FORMATS, source_tensors
from kit import EXPERT0, KIMI_MINI, SHARD, Tensor, forge, load, tree, write
from safetensors.torch import load_file

from kconvert.convert import convert
from kconvert.convert.reshard import prepare_reshard
from kconvert.convert.run import run
from kconvert.layouts.header import read_header
from kconvert.runtime.engine import Engine
from kconvert.validate import validate

GPTQ = FORMATS / "mixtral-gptq-sym-g64"
FILE = "rank-00000-of-00001/layer-00001.safetensors"
SCALES = "model.layers.1.mlp.experts.w2_weight_scale"


def test_kept_unless_asked(tmp_path: Path) -> None:
    convert(GPTQ, tmp_path / "out", layout="w4a16")
    tensors, source = load_file(tmp_path / "out" / FILE), source_tensors(GPTQ.name)
    expected = source["model.layers.1.mlp.experts.3.down_proj.scales"].T
    assert torch.equal(tensors[SCALES][3], expected) and expected.dtype == torch.float16


@pytest.mark.parametrize("layout", ["marlin", "w4a16"])
def test_cast_on_request(layout: str, tmp_path: Path, kconvert) -> None:
    out = tmp_path / "out"
    command = ("convert", GPTQ, out, "--layout", layout, "--scale-dtype", "bfloat16")
    table = json.loads(kconvert(*command, "--json").out)
    source = source_tensors(GPTQ.name)
    scales = {k: v for k, v in source.items() if k.endswith(".scales")}
    lost = {k: int((v.bfloat16().half() != v).sum()) for k, v in scales.items()}
    (warning,) = [w for w in table["warnings"] if "rounded" in w]
    assert warning.startswith(
        f"{sum(lost.values()):,} scales of {sum(map(bool, lost.values()))} tensors were rounded"
    )
    assert read_header(out / FILE).tensors[SCALES].dtype == "BF16"
    assert validate(out, GPTQ).ok
    if layout == "w4a16":
        expected = scales["model.layers.1.mlp.experts.2.down_proj.scales"].T.bfloat16()
        assert torch.equal(load_file(out / FILE)[SCALES][2], expected)
    raw = bytearray((out / FILE).read_bytes())
    raw[read_header(out / FILE).tensors[SCALES].start] ^= 1
    (out / FILE).write_bytes(raw)
    forge(out, FILE)
    (finding,) = validate(out, GPTQ).findings
    assert "1 of its scales differs" in finding.text


def test_an_output_is_of_one_kind(tmp_path: Path, kconvert) -> None:
    """And one that is cast can be resharded as it would have been converted."""
    convert(GPTQ, tmp_path / "kept")
    outcome = kconvert("convert", GPTQ, tmp_path / "kept", "--scale-dtype", "bfloat16")
    assert outcome.code == 2 and "--overwrite" in outcome.err
    convert(GPTQ, tmp_path / "one", scale_dtype="bfloat16")
    convert(GPTQ, tmp_path / "two", tp=2, scale_dtype="bfloat16")
    run(prepare_reshard(tmp_path / "one", tmp_path / "again", tp=2))
    assert tree(tmp_path / "again") == tree(tmp_path / "two")


def test_scales_that_are_bfloat16_are_the_same_bytes(tmp_path: Path) -> None:
    convert(KIMI_MINI, tmp_path / "a")
    convert(KIMI_MINI, tmp_path / "b", scale_dtype="bfloat16")
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def with_float32_scales(source: Path, first: float) -> None:
    """kimi-mini's first MoE layers, the first scale of expert 0 another one."""
    for path in sorted(source.glob("*.safetensors")):
        tensors = load(path)
        for name, tensor in tensors.items():
            if name.endswith("weight_scale"):
                wide = np.frombuffer(tensor.data, np.uint16).astype(np.uint32) << np.uint32(16)
                values = wide.view(np.float32).copy()
                if name == f"{EXPERT0}gate_proj.weight_scale":
                    values[0] = first
                tensors[name] = Tensor("F32", tensor.shape, values.tobytes())
        write(path, tensors)


def test_float32_scales(mini: Path, tmp_path: Path, kconvert) -> None:
    with_float32_scales(mini, 1.00001)
    convert(mini, tmp_path / "kept")
    convert(KIMI_MINI, tmp_path / "plain")
    assert Engine.open(tmp_path / "kept").logits([1, 2, 3]).shape == (3, 512)
    said = kconvert("convert", mini, tmp_path / "cast", "--scale-dtype", "bfloat16", "--json")
    (warning,) = [w for w in json.loads(said.out)["warnings"] if "rounded" in w]
    assert "1 scales of 1 tensors" in warning and f"{EXPERT0}gate_proj.weight_scale" in warning
    assert validate(tmp_path / "kept", mini).ok and validate(tmp_path / "cast", mini).ok
    other = "rank-00000-of-00001/layer-00002.safetensors"  # where all scales were bfloat16
    assert load(tmp_path / "cast" / other) == load(tmp_path / "plain" / other)
    with_scale = tmp_path / "huge"
    with_scale.mkdir()
    for path in KIMI_MINI.iterdir():
        (with_scale / path.name).write_bytes(path.read_bytes())
    with_float32_scales(with_scale, 3.4e38)
    convert(with_scale, tmp_path / "huge-kept")
    outcome = kconvert("convert", with_scale, tmp_path / "no", "--scale-dtype", "bfloat16")
    assert outcome.code == 2 and "too large for bfloat16" in outcome.err and SHARD in outcome.err


def test_what_is_not_cast(tmp_path: Path, kconvert) -> None:
    mxfp4 = FORMATS / "mixtral-mxfp4"
    outcome = kconvert("convert", mxfp4, tmp_path / "out", "--scale-dtype", "bfloat16")
    assert outcome.code == 2 and "powers of two" in outcome.err
    assert kconvert("convert", GPTQ, tmp_path / "out", "--scale-dtype", "float16").code == 2
