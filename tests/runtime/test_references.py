"""Logits against transformers' DeepseekV3ForCausalLM with dequantized weights, in float32."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from kit import KIMI_MINI, load
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from kconvert.convert import convert
from kconvert.runtime.engine import Engine

TINY = Path(__file__).parents[1] / "tiny_kimi/model"
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "I32": torch.int32}
TEXT, VISION = "language_model.", ("vision_tower.", "mm_projector.")  # as K2.6 has them


def reference(source: Path) -> DeepseekV3ForCausalLM:
    config = json.loads((source / "config.json").read_text())
    config = config.get("text_config", config)
    for key in ("quantization_config", "model_type", "architectures"):
        config.pop(key)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**config, attn_implementation="eager"))
    weights = dequantized(source)
    for layer in range(config["first_k_dense_replace"], config["num_hidden_layers"]):
        base = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack(
                [weights.pop(f"{base}{e}.{p}.weight") for e in range(config["n_routed_experts"])]
            )
            for p in ("gate_proj", "up_proj", "down_proj")
        )
        weights[f"{base}gate_up_proj"] = torch.cat([gate, up], dim=1)
        weights[f"{base}down_proj"] = down
    model.float().load_state_dict(weights)
    return model


def dequantized(source: Path) -> dict[str, torch.Tensor]:
    weights = {}
    for path in sorted(source.glob("*.safetensors")):
        tensors = load(path)
        for name, tensor in tensors.items():
            if name.startswith(VISION) or name.endswith(("_scale", "_shape")):
                continue
            kind = DTYPES[tensor.dtype]
            value = torch.frombuffer(bytearray(tensor.data), dtype=kind).reshape(tensor.shape)
            if name.endswith("_packed"):
                scale = tensors[name.replace("_packed", "_scale")]
                scales = torch.frombuffer(bytearray(scale.data), dtype=torch.bfloat16)
                codes = (value[:, :, None] >> torch.arange(0, 32, 4) & 15) - 8
                value = codes.reshape(len(value), -1).float()
                value *= scales.reshape(scale.shape).float().repeat_interleave(32, 1)
            weights[name.removeprefix(TEXT).removesuffix("_packed")] = value.float()
    return weights


@pytest.mark.parametrize("layout", ["marlin", "w4a16"])
@pytest.mark.parametrize("source", [KIMI_MINI, TINY], ids=["kimi-mini", "tiny_kimi"])
def test_logits_are_transformers(source: Path, layout: str, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", layout=layout)
    tokens = np.random.default_rng(0).integers(0, 512, 150).tolist()
    with torch.no_grad():
        expected = reference(source)(torch.tensor([tokens])).logits[0].numpy()
    found = Engine.open(tmp_path / "out").logits(tokens)
    assert np.abs(found - expected).max() <= 2e-6 * np.abs(expected).max()
    assert np.array_equal(found.argmax(1), expected.argmax(1))
