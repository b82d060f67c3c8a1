"""Families by their names: which are known, both spellings, and what an unknown one must have."""

import copy
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from formats_kit import CHECKPOINTS, FORMATS
from kit import Tensor, change_json, load, write

from kconvert.convert import convert
from kconvert.convert.synth.families import CONFIGS
from kconvert.convert.synth.presets import PRESETS, Preset
from kconvert.convert.synth.write import synth
from kconvert.layouts.checkpoint import read_checkpoint, read_json
from kconvert.layouts.errors import CheckpointError, UnsupportedError
from kconvert.layouts.families.known import read_family
from kconvert.layouts.families.other import Other
from kconvert.layouts.model import read_model
from kconvert.validate import validate

FAMILY = {"deepseek": "DeepSeekV3", "mixtral": "Mixtral", "qwen3": "Qwen3Moe", "glm4": "Glm4Moe",
          "minimax": "MiniMaxM2", "gpt": "GptOss"}  # fmt: skip
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_known(name: str) -> None:
    family = read_family(read_json(FORMATS / name / "config.json"))
    assert type(family).__name__ == FAMILY[name.partition("-")[0]]
    dims = family.dims
    assert (dims.experts, dims.layers) == (4, 2)
    first_dense = not name.startswith(("mixtral", "minimax", "gpt"))
    assert [dims.is_moe(layer) for layer in range(2)] == [not first_dense, True]


def copied(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(FORMATS / name, folder))


def with_tensors(folder: Path, change) -> None:
    """The one shard with its tensors by other names, or without some, and no index beside it."""
    path = folder / "model.safetensors"
    write(path, change(load(path)))
    (folder / INDEX).unlink(missing_ok=True)


MISSING = {
    "mixtral-mxfp4": "model.layers.1.block_sparse_moe.gate.weight",
    "qwen3-moe-int8-g32": "model.layers.1.self_attn.q_norm.weight",
    "glm4-moe-int4-asym-g32": "model.layers.1.mlp.gate.e_score_correction_bias",
    "minimax-m2-mxfp4": "model.layers.0.block_sparse_moe.e_score_correction_bias",
    "gpt-oss-mxfp4": "model.layers.0.self_attn.sinks",
    "mixtral-gptq-sym-g64": "model.layers.0.mlp.gate.weight",
}


@pytest.mark.parametrize("name", MISSING)
def test_what_is_missing_or_surplus_is_named(name: str, tmp_path: Path) -> None:
    source, lost = copied(name, tmp_path / "a"), MISSING[name]
    with_tensors(source, lambda tensors: {k: v for k, v in tensors.items() if k != lost})
    with pytest.raises(CheckpointError, match=f"tensor {lost} is missing"):
        read_model(read_checkpoint(source))
    source, surplus = copied(name, tmp_path / "b"), f"{lost.rpartition('.')[0]}.bias"
    with_tensors(source, lambda tensors: tensors | {surplus: tensors[lost]})
    if name != "gpt-oss-mxfp4":
        with pytest.raises(CheckpointError, match=f"tensor {surplus} is not implied"):
            read_model(read_checkpoint(source))


@pytest.mark.parametrize(
    ("name", "part", "words"),
    [("mixtral-gptq-sym-g64", "experts.2.up_proj.qzeros", "qzeros is in no shard"),
     ("mixtral-mxfp4", "experts.2.w3.weight_scale", "weight_scale is in no shard"),
     ("gpt-oss-mxfp4", "gate_up_proj_scales", "gate_up_proj_scales is in no shard")],
)  # fmt: skip
def test_an_expert_that_is_not_whole(name: str, part: str, words: str, tmp_path: Path) -> None:
    source = copied(name, tmp_path / "a")
    with_tensors(source, lambda tensors: {k: v for k, v in tensors.items() if part not in k})
    with pytest.raises(CheckpointError, match=words):
        read_model(read_checkpoint(source))


def test_an_unknown_architecture_is_converted_by_its_names(tmp_path: Path, kconvert) -> None:
    name = "mixtral-mxfp4"
    source = copied(name, tmp_path / "a")
    unheard = {"model_type": "unheard_of", "architectures": ["UnheardOfForCausalLM"]}
    change_json(source / "config.json", lambda config: config.update(unheard))
    outcome = kconvert("convert", source, tmp_path / "out", "--json")
    assert outcome.code == 0
    (warning,) = [w for w in json.loads(outcome.out)["warnings"] if "architecture" in w]
    assert "UnheardOfForCausalLM" in warning and "converted by their names" in warning
    assert validate(tmp_path / "out", source).ok
    convert(FORMATS / name, tmp_path / "known")
    blob = "rank-00000-of-00001/layer-00001.safetensors"
    data = [load(tmp_path / out / blob) for out in ("out", "known")]
    assert data[0] == data[1]
    assert isinstance(read_family(read_json(source / "config.json")), Other)
    assert kconvert("inspect", source).code == 0


def test_an_architecture_without_a_scheme_is_refused(tmp_path: Path) -> None:
    source = copied("mixtral-mxfp4", tmp_path / "a")
    change_json(
        source / "config.json", lambda c: c.update(model_type="unheard_of", architectures=None)
    )
    with_tensors(
        source, lambda tensors: {k.replace(".experts.", ".ffns."): v for k, v in tensors.items()}
    )
    with pytest.raises(UnsupportedError, match=r"no tensor has the name of an expert.*found "):
        convert(source, tmp_path / "out")
    change_json(source / "config.json", lambda config: config.pop("num_local_experts"))
    with pytest.raises(
        UnsupportedError, match=r"unheard_of.*is not known, and none of n_routed_experts"
    ):
        convert(source, tmp_path / "out")


def test_what_is_quantized_beside_the_experts_stays_whole(tmp_path: Path, kconvert) -> None:
    source = copied("mixtral-int8-channel", tmp_path / "a")
    query = "model.layers.0.self_attn.q_proj."
    quantized = {
        f"{query}weight_packed": Tensor("I32", (64, 64), bytes(range(256)) * 64),
        f"{query}weight_scale": Tensor("BF16", (64, 1), b"\x80\x3c" * 64),
        f"{query}weight_shape": Tensor("I64", (2,), np.array([64, 256]).tobytes()),
    }  # fmt: skip
    with_tensors(
        source, lambda all_: {k: v for k, v in all_.items() if not k.startswith(query)} | quantized
    )
    outcome = kconvert("convert", source, tmp_path / "out", "--json")
    assert outcome.code == 0, outcome.err
    (said,) = [line for line in json.loads(outcome.out)["ignored"] if "beside" in line]
    assert said.startswith("1 matrices beside the experts are quantized too: they stay whole")
    common = load(tmp_path / "out/common/layer-00000.safetensors")
    assert {name: common[name] for name in quantized} == quantized
    assert validate(tmp_path / "out", source).ok
    with_tensors(
        source, lambda all_: {k: v for k, v in all_.items() if k != f"{query}weight_scale"}
    )
    with pytest.raises(CheckpointError, match=f"{query}weight_scale is missing"):
        read_model(read_checkpoint(source))


@pytest.mark.parametrize(
    ("preset", "layer", "most"),
    [("k3", 1, 16), ("deepseek-v3", 3, 16), ("qwen3-235b", 0, 4), ("mixtral-8x7b", 0, 16),
     ("glm-4.6", 92, 8), ("minimax-m2", 0, 8)],
)  # fmt: skip
def test_a_layer_of_true_size_and_how_far_it_is_cut(
    preset: str, layer: int, most: int, tmp_path: Path, kconvert
) -> None:
    """Planned only; tiles of 64 rows and groups set the limit (the facts' table)."""
    synth(tmp_path / "a", preset, layers=[layer], experts=8, sparse=True)
    for tp, code in ((most, 0), (2 * most, 2)):
        plan = ("--layers", layer, "--tp", tp, "--dry-run", "--json")
        outcome = kconvert("convert", tmp_path / "a", tmp_path / "out", *plan)
        assert outcome.code == code, outcome.err
    assert "what works" in outcome.err


@pytest.mark.parametrize("preset", ["qwen3-235b", "minimax-m2", "gpt-oss-120b", "glm-4.6"])
def test_a_preset_converts(preset: str, tmp_path: Path) -> None:
    """One layer, two experts."""
    synth(tmp_path / "a", preset, layers=[5], experts=2)
    layout = "w4a16" if preset == "gpt-oss-120b" else "marlin"
    convert(tmp_path / "a", tmp_path / "out", layers=[5], layout=layout, ep=2, tp=2)
    assert validate(tmp_path / "out", tmp_path / "a").ok


def test_k3_s_experts_see_another_width(tmp_path: Path, monkeypatch) -> None:
    """What is not an expert's is kept, though the family does not state it."""
    config = copy.deepcopy(CONFIGS["k3"])
    config["text_config"] |= {
        "hidden_size": 256, "routed_expert_hidden_size": 192, "moe_intermediate_size": 128,
        "num_experts": 4, "num_experts_per_token": 2, "num_hidden_layers": 4,
        "num_attention_heads": 2, "intermediate_size": 256, "vocab_size": 128,
    }  # fmt: skip
    monkeypatch.setitem(PRESETS, "k3-mini", Preset(config))
    synth(tmp_path / "a", "k3-mini")
    convert(tmp_path / "a", tmp_path / "out", tp=2)
    assert validate(tmp_path / "out", tmp_path / "a").ok
    base = "language_model.model.layers.3.block_sparse_moe."
    blob = load(tmp_path / "out/rank-00001-of-00002/layer-00003.safetensors")
    names = {name.removeprefix(f"{base}experts."): tensor.shape for name, tensor in blob.items()}
    assert names == {
        "w13_weight_packed": (4, 192 // 16, 4 * 64), "w13_weight_scale": (4, 192 // 32, 2 * 64),
        "w2_weight_packed": (4, 64 // 16, 2 * 192), "w2_weight_scale": (4, 64 // 32, 192),
    }  # fmt: skip
    kept = load(tmp_path / "out/common/layer-00003.safetensors")
    assert {f"{base}routed_expert_{name}" for name in ("down_proj.weight", "norm.weight")} < {*kept}
    model = read_model(read_checkpoint(tmp_path / "a"))
    assert len(model.groups["layer-00003"].whole) == len(kept)
