"""Every format and family that others write: converted, checked, and worth what it was."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from formats_kit import (
    CHECKPOINTS,
    FORMATS,
    GPT_OSS,
    dequantized,
    reference,
    source_tensors,
)
from kit import change_json, forge, load, write
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from kconvert.convert import convert
from kconvert.layouts.errors import CheckpointError, UnsupportedError
from kconvert.layouts.header import read_header
from kconvert.runtime.engine import Engine
from kconvert.runtime.plugins.loading import open_output
from kconvert.validate import validate

HOW = [(layout, tp, ep) for layout in ("w4a16", "marlin") for tp, ep in ((1, 1), (2, 1), (2, 2))]
HOW_GPT_OSS = [("w4a16", 1, 1), ("w4a16", 2, 2)]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_worth_exactly_what_its_library_says(name: str, tmp_path: Path) -> None:
    """And what transformers makes of the output is the logits that the checkpoint's writer gave,
    which proves the names and the order of the experts too."""
    expected = reference(name)
    for layout, tp, ep in HOW_GPT_OSS if name == GPT_OSS else HOW:
        out = tmp_path / f"{layout}-{tp}-{ep}"
        convert(FORMATS / name, out, layout=layout, tp=tp, ep=ep)
        assert validate(out, FORMATS / name).ok
        found = dequantized(out)
        assert found.keys() == expected.keys()
        for key, matrix in expected.items():
            assert np.array_equal(found[key], matrix), key
    given = load_file(FORMATS / f"logits/{name}.safetensors")
    with torch.no_grad():
        logits = filled(name, out, found)(given["input_ids"][None]).logits[0]
    assert (logits - given["logits"]).abs().max() <= 2e-5 * given["logits"].abs().max()


@pytest.mark.parametrize(
    ("how", "words"),
    [({"layout": "marlin"}, "no order for experts with biases.*--layout w4a16 takes them"),
     ({"layout": "w4a16", "tp": 2}, "group of 32 would be cut; what works: --tp 2 --ep 2")],
)  # fmt: skip
def test_gpt_oss_says_what_works(how: dict, words: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=words):
        convert(FORMATS / GPT_OSS, tmp_path / "out", **how)


def test_the_biases_of_gpt_oss(tmp_path: Path) -> None:
    """Interleaved in the source, [gate; up] in the blob, as the rows of w13 are."""
    convert(FORMATS / GPT_OSS, tmp_path / "out", layout="w4a16")
    base, source = "model.layers.1.mlp.experts.", source_tensors(GPT_OSS)
    blob = load_file(tmp_path / "out/rank-00000-of-00001/layer-00001.safetensors")
    bias = source[f"{base}gate_up_proj_bias"]
    assert torch.equal(blob[f"{base}w13_bias"], torch.cat([bias[:, ::2], bias[:, 1::2]], 1))
    assert torch.equal(blob[f"{base}w2_bias"], source[f"{base}down_proj_bias"])


def filled(name: str, out: Path, experts: dict) -> torch.nn.Module:
    """transformers' model with the weights of an output."""
    config = AutoConfig.from_pretrained(FORMATS / name)
    del config.quantization_config
    config._attn_implementation = config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    common = {_own(k): v for path in out.glob("common/*") for k, v in load_file(path).items()}
    state = model.state_dict()
    for key in state:
        if key.rpartition(".")[2] in ("gate_up_proj", "down_proj"):
            layer, fused = int(key.split(".")[2]), key.endswith("gate_up_proj")
            stack = [expert(experts, layer, e, fused, name) for e in range(len(state[key]))]
            state[key] = torch.stack(stack)
        elif key.endswith("_proj_bias"):
            state[key] = source_tensors(name)[key].float()
        else:
            state[key] = common[_own(key)].float()
    model.load_state_dict(state)
    return model.eval()


def _own(key: str) -> str:
    """One spelling for what transformers and its files call differently."""
    key = key.replace("block_sparse_moe", "mlp")
    return key.replace("mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias")


def expert(experts: dict, layer: int, number: int, fused: bool, name: str) -> torch.Tensor:
    """An expert as transformers stacks them: gpt-oss's transposed and interleaved."""
    gate, up, down = (torch.from_numpy(experts[layer, number, p]) for p in ("gate", "up", "down"))
    if name != GPT_OSS:
        return torch.cat([gate, up]) if fused else down
    return torch.stack([gate, up], 1).reshape(-1, gate.shape[1]).T if fused else down.T


@pytest.mark.parametrize("layout", ["marlin", "w4a16"])
def test_the_engine_runs_mxfp4(layout: str, tmp_path: Path) -> None:
    name = "deepseek-v3-mxfp4"
    convert(FORMATS / name, tmp_path / "out", layout=layout)
    given = load_file(FORMATS / f"logits/{name}.safetensors")
    found = Engine.open(tmp_path / "out").logits(given["input_ids"].tolist())
    expected = given["logits"].numpy()
    assert np.abs(found - expected).max() <= 2e-6 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("name", "words"),
    [("deepseek-v3-int8-g32", "INT8"), ("deepseek-v3-int4-asym-g32", "INT4, with zero points"),
     ("mixtral-mxfp4", "model_type is 'mixtral'"), ("qwen3-moe-mxfp4", "'qwen3_moe'")],
)  # fmt: skip
def test_the_engine_refuses_the_rest(name: str, words: str, tmp_path: Path) -> None:
    convert(FORMATS / name, tmp_path / "out")
    with pytest.raises(UnsupportedError, match=words):
        Engine.open(tmp_path / "out")


@pytest.mark.parametrize("name", ["mixtral-mxfp4", "deepseek-v3-int8-g32", "mixtral-gptq-sym-g64"])
def test_engines_of_others_are_not_filled(name: str, tmp_path: Path) -> None:
    """The plugins know the modules of DeepSeek's family in symmetric INT4."""
    convert(FORMATS / name, tmp_path / "out")
    with pytest.raises(UnsupportedError, match="symmetric INT4 alone; give the engine the checkp"):
        open_output(tmp_path / "out")


def test_a_v1_file_that_another_writer_may_have_spoiled(tmp_path: Path) -> None:
    """Zero points 0 in format gptq can be known of GPTQModel's files alone."""
    source = Path(shutil.copytree(FORMATS / "mixtral-gptq-v1-asym-g32", tmp_path / "a"))
    change_json(source / "config.json", lambda c: c["quantization_config"].pop("meta"))
    with pytest.raises(CheckpointError, match=r"qzeros: a zero point is stored as 15.*gptq_v2"):
        convert(source, tmp_path / "out")


def test_a_scale_byte_that_is_no_number(tmp_path: Path) -> None:
    source = Path(shutil.copytree(FORMATS / "mixtral-mxfp4", tmp_path / "a"))
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight_scale"
    tensors = load(source / "model.safetensors")
    data = bytearray(tensors[name].data)
    data[9], data[0] = 0, 255
    write(source / "model.safetensors", tensors | {name: tensors[name]._replace(data=bytes(data))})
    with pytest.raises(CheckpointError, match=f"{name}: the scale of row 0, group 0 is not finite"):
        convert(source, tmp_path / "out")
    data[0] = 120
    write(source / "model.safetensors", tensors | {name: tensors[name]._replace(data=bytes(data))})
    warnings = convert(source, tmp_path / "zero").warnings
    assert f"1 scales of 1 tensors are zero, the first in {name}" in warnings


@pytest.mark.parametrize(
    "name", ["deepseek-v3-mxfp4", "mixtral-int4-asym-g32", "mixtral-gptq-int8-g32", GPT_OSS]
)
def test_a_wrong_element_under_right_digests(name: str, tmp_path: Path) -> None:
    """Of each stacked tensor: digests prove nothing about the conversion, the source does."""
    layout = "w4a16" if name == GPT_OSS else "marlin"
    convert(FORMATS / name, tmp_path / "out", layout=layout)
    file = "rank-00000-of-00001/layer-00001.safetensors"
    path = tmp_path / "out" / file
    pristine = path.read_bytes()
    for tensor, entry in read_header(path).tensors.items():
        raw = bytearray(pristine)
        raw[entry.start + 3 * entry.nbytes // 4 + 2] ^= 1  # of expert 3
        path.write_bytes(raw)
        forge(tmp_path / "out", file)
        assert validate(tmp_path / "out").ok
        (finding,) = validate(tmp_path / "out", FORMATS / name).findings
        assert (finding.tensor, finding.expert) == (tensor, 3) and "1 " in finding.text
