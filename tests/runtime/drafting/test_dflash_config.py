"""Drafters that cannot be run, or are for another target: refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_kit import CASES, TARGET, shard, weights_of, write_drafter
from kit import change_json
from torch import Tensor

from kconvert.layouts.errors import CheckpointError, KconvertError, UnsupportedError
from kconvert.runtime.drafting.dflash import (
    Drafter,
    DrafterConfig,
)


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        (TARGET._replace(hidden=128), "hidden_size is 64, the target's 128"),
        (TARGET._replace(vocabulary=401), "vocab_size is 400, the target's 401"),
        (TARGET._replace(layers=7), "num_target_layers is 6, the target's 7"),
    ],
)
def test_a_drafter_for_another_target_is_refused(tmp_path, target, sentence) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        Drafter.open(write_drafter(tmp_path / "d"), target)


def test_a_target_of_too_few_layers_is_refused_where_the_config_names_no_target(tmp_path) -> None:
    folder = write_drafter(tmp_path / "d", num_target_layers=None)
    with pytest.raises(UnsupportedError, match="it reads layer 3, the target has 3"):
        Drafter.open(folder, TARGET._replace(layers=3))
    assert Drafter.open(folder, TARGET._replace(layers=4)).config.layers > 0


def test_settings_in_dflash_config_go_before_those_beside_it(tmp_path: Path) -> None:
    config = DrafterConfig.read(write_drafter(tmp_path / "d", **dflash(block_size=4)))
    assert (config.block, config.mask_token, config.target_layer_ids) == (4, 398, (1, 3))


def dflash(**changes: Any) -> dict[str, Any]:
    return {"dflash_config": {**CASES["plain"]["config"]["dflash_config"], **changes}}


@pytest.mark.parametrize(
    ("changes", "sentence", "error"),
    [
        ({"hidden_size": None}, "hidden_size is None", CheckpointError),
        ({"num_attention_heads": 0}, "num_attention_heads is 0", CheckpointError),
        ({"num_key_value_heads": 3}, "4 heads of 16 over 3", CheckpointError),
        ({"head_dim": 15}, "4 heads of 15", CheckpointError),
        ({"intermediate_size": True}, "intermediate_size is True", CheckpointError),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'", CheckpointError),
        ({"rope_theta": None}, "rope_theta is None", CheckpointError),
        ({"rope_theta": 1}, "rope_theta is 1, expected a number of 1.01", CheckpointError),
        ({"block_size": 1}, "block_size 1 leaves no token", CheckpointError),
        ({"block_size": None}, "block_size is None", CheckpointError),
        ({"num_target_layers": -1}, "num_target_layers is -1", CheckpointError),
        ({"dflash_config": [1]}, "dflash_config is not an object", CheckpointError),
        (dflash(mask_token_id=400), "mask_token_id is 400, expected a token of the 400",
         CheckpointError),
        (dflash(mask_token_id=-1), "mask_token_id is -1", CheckpointError),
        (dflash(mask_token_id=None), "mask_token_id is None", CheckpointError),
        (dflash(target_layer_ids=[1, 6]), r"target_layer_ids is \[1, 6\].*num_target_layers, 6",
         CheckpointError),
        (dflash(target_layer_ids=[3, 3]), "expected different layers", CheckpointError),
        (dflash(target_layer_ids=[]), r"target_layer_ids is \[\]", CheckpointError),
        (dflash(target_layer_ids="13"), "target_layer_ids is '13'", CheckpointError),
        (dflash(causal=1), "causal is 1, expected true or false", CheckpointError),
        ({"layer_types": ["full_attention"] * 2}, "for each of the 3 layers", CheckpointError),
        ({"layer_types": ["full_attention"] * 2 + ["linear"]}, "layer_types is", CheckpointError),
        ({"use_sliding_window": True}, "sliding_window is None", CheckpointError),
        ({"rope_scaling": [64]}, "rope_scaling is not an object", CheckpointError),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor is None", CheckpointError),
        ({"rope_scaling": {"rope_type": "yarn", "factor": -2}}, "factor is -2", CheckpointError),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear', only 'yarn'",
         UnsupportedError),
        ({"architectures": ["DFlash2DraftModel"]}, "'DFlash2DraftModel'", UnsupportedError),
        ({"model_type": "llama"}, "model_type is 'llama'", UnsupportedError),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', only 'silu'", UnsupportedError),
        ({"attention_bias": True}, "attention_bias is True", UnsupportedError),
        (dflash(output_multiplier=0.5), "output_multiplier is 0.5", UnsupportedError),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_run_is_refused(tmp_path, changes, sentence, error) -> None:
    folder = write_drafter(tmp_path / "d", **changes)
    with pytest.raises(error, match=sentence) as refusal:
        Drafter.open(folder, TARGET)
    assert str(refusal.value).startswith(f"the drafter in {folder}, config.json: ")


def without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda weights: weights.pop(name)


def with_tensor(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda weights: weights.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "sentence", "error"),
    [
        (without("fc.weight"), "has no tensor fc.weight: download", CheckpointError),
        (without("layers.2.self_attn.q_norm.weight"), "no tensor layers.2.self_attn.q_norm.weight",
         CheckpointError),
        (with_tensor("fc.weight", torch.zeros(64, 192)),
         r"fc.weight is F32 \[64, 192\], expected F32 or BF16 or F16 \[64, 128\]", CheckpointError),
        (with_tensor("norm.weight", torch.zeros(64, dtype=torch.int32)),
         r"norm.weight is I32 \[64\]", CheckpointError),
        (with_tensor("layers.3.input_layernorm.weight", torch.zeros(64)),
         "1 tensor.*layers.3.input_layernorm.weight", UnsupportedError),
        (with_tensor("lm_head.weight", torch.zeros(400, 64)), "1 tensor.*lm_head.weight",
         UnsupportedError),
    ],
)  # fmt: skip
def test_missing_misshaped_and_unknown_tensors_are_refused(
    tmp_path, change, sentence, error
) -> None:
    weights = weights_of("plain")
    change(weights)
    folder = write_drafter(tmp_path / "d", weights=weights)
    with pytest.raises(error, match=sentence) as refusal:
        Drafter.open(folder, TARGET)
    assert str(folder) in str(refusal.value) and str(refusal.value).count("\n") == 0


def test_a_missing_shard_and_a_damaged_one_are_refused(tmp_path: Path) -> None:
    folder = shard(write_drafter(tmp_path / "d"))
    second = folder / "model-00002-of-00002.safetensors"
    whole = second.read_bytes()
    second.unlink()
    with pytest.raises(CheckpointError, match=r"00002.safetensors, which has .*, is missing"):
        Drafter.open(folder, TARGET)
    second.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors is truncated"):
        Drafter.open(folder, TARGET)


def test_a_folder_that_is_no_drafter_and_a_damaged_config(tmp_path: Path) -> None:
    with pytest.raises(KconvertError, match=r"config.json is missing"):
        Drafter.open(tmp_path / "nothing", TARGET)
    folder = write_drafter(tmp_path / "d")
    change_json(folder / "config.json", lambda config: config.pop("dflash_config"))
    with pytest.raises(CheckpointError, match="mask_token_id is None"):
        Drafter.open(folder, TARGET)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not readable as JSON"):
        Drafter.open(folder, TARGET)
