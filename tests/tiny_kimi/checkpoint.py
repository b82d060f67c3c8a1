"""Writes and reads the two checkpoints: Kimi K2.6's files, and z-lab's for the drafter."""

import json
from pathlib import Path

import torch
from bpe import IM_END
from drafter import CONFIG as DRAFT_CONFIG
from drafter import Drafter
from model import CONFIG, Kimi, dequantize, quantize
from safetensors.torch import load_file, save_file
from torch import Tensor

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def write_model(model: Kimi, folder: Path) -> None:
    """One layer a shard, then embeddings, head and last norm; routed experts in INT4."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{} for _ in range(model.c.num_hidden_layers + 1)]
    for name, value in model.state_dict().items():
        if name.startswith("layers."):
            shard, full = int(name.split(".")[1]), f"language_model.model.{name}"
        else:
            outer = "" if name.startswith("lm_head") else "model."
            shard, full = -1, f"language_model.{outer}{name}"
        value = value.detach().cpu()
        if name.endswith("e_score_correction_bias"):
            shards[shard][full] = value.float()
        elif value.ndim == 3:  # the routed experts' stacked weights
            base, _, projection = full.rpartition(".")
            for i, weight in enumerate(value):
                shards[shard] |= _packed(f"{base}.experts.{i}.{projection}", weight)
        else:
            shards[shard][full] = value.bfloat16()
    weight_map, total = {}, 0
    for i, tensors in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):06}.safetensors"
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(t.nbytes for t in tensors.values())
    generation = {"max_length": model.c.max_position_embeddings, "eos_token_id": IM_END}
    _dump(folder / "config.json", CONFIG)
    _dump(folder / "generation_config.json", generation)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _dump(folder / "model.safetensors.index.json", index)


def read_model(folder: Path) -> Kimi:
    """The model with its experts dequantized, in float32."""
    model = Kimi(json.loads((folder / "config.json").read_text())["text_config"])
    tensors = {
        name.removeprefix("language_model.").removeprefix("model."): tensor
        for shard in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(shard).items()
    }
    state = {name: t.float() for name, t in tensors.items() if ".weight_" not in name}
    for layer in range(model.c.first_k_dense_replace, model.c.num_hidden_layers):
        for projection in _PROJECTIONS:
            state[f"layers.{layer}.mlp.{projection}"] = torch.stack(
                [
                    _unpacked(tensors, f"layers.{layer}.mlp.experts.{expert}.{projection}")
                    for expert in range(model.c.n_routed_experts)
                ]
            )
    model.load_state_dict(state)
    return model.eval()


def write_drafter(drafter: Drafter, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {n: t.detach().cpu().bfloat16().contiguous() for n, t in drafter.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _dump(folder / "config.json", DRAFT_CONFIG)


def read_drafter(folder: Path) -> Drafter:
    drafter = Drafter(json.loads((folder / "config.json").read_text()))
    tensors = load_file(folder / "model.safetensors")
    drafter.load_state_dict({name: t.float() for name, t in tensors.items()})
    return drafter.eval()


def _packed(name: str, weight: Tensor) -> dict[str, Tensor]:
    """compressed-tensors' pack-quantized: eight codes + 8 a word, the low end first."""
    codes, scale = quantize(weight)
    words = ((codes.long() + 8).unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)).sum(-1)
    words -= words >> 31 << 32  # the top code's high bit is the sign
    return {
        f"{name}.weight_packed": words.to(torch.int32),
        f"{name}.weight_scale": scale,
        f"{name}.weight_shape": torch.tensor(weight.shape, dtype=torch.int32),
    }


def _unpacked(tensors: dict[str, Tensor], name: str) -> Tensor:
    packed = tensors[f"{name}.weight_packed"].unsqueeze(-1)
    codes = (packed >> torch.arange(0, 32, 4, dtype=torch.int32) & 15).flatten(-2) - 8
    return dequantize(codes, tensors[f"{name}.weight_scale"])


def _dump(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
