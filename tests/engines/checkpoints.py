"""The checkpoint that the engines serve: kimi-mini with the latent size that their CPU kernels are
compiled for (512 + 64), and weights that make its tokens depend on every expert."""

import copy
import json
from pathlib import Path

import kit
import numpy as np

from kconvert.convert.synth.presets import PRESETS, SynthTensor, shards

_SIZES = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
}  # fmt: skip


def write(
    folder: Path, *, wrapped: bool = False, group_size: int | None = 32, **sizes: int
) -> Path:
    """As a DeepSeek-V3 checkpoint of its own, or `wrapped` as K2.6 is: other names, and a vision
    tower. `group_size` None: one scale a row. `sizes`: keys of its config."""
    preset = PRESETS["kimi-mini"]
    config = copy.deepcopy(preset.config)
    text = config["text_config"]
    text |= _SIZES | sizes
    weights = text["quantization_config"]["config_groups"]["group_0"]["weights"]
    weights["group_size"] = group_size or 32
    parts = shards(preset._replace(config=config))
    tensors = {t.name: _tensor(_channelwise(t) if not group_size else t) for p in parts for t in p}
    if not group_size:
        weights |= {"strategy": "channel", "group_size": None}
    if not wrapped:
        config = {**text, "model_type": "deepseek_v3", "dtype": "bfloat16"}
        prefix = "language_model."
        tensors = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    folder.mkdir(parents=True)
    kit.write(folder / "model.safetensors", tensors, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _channelwise(tensor: SynthTensor) -> SynthTensor:
    scale = tensor.name.endswith("weight_scale")
    return tensor._replace(shape=(tensor.shape[0], 1)) if scale else tensor


def _tensor(tensor: SynthTensor) -> kit.Tensor:
    rng = np.random.default_rng(list(tensor.name.encode()))
    if tensor.value:
        data = np.array(tensor.value, "<i4").tobytes()
    elif tensor.dtype == "I32":
        data = rng.integers(0, 1 << 32, tensor.shape, np.uint32).tobytes()
    elif tensor.dtype == "F32":
        data = (0.1 * rng.standard_normal(tensor.shape)).astype("<f4").tobytes()
    else:
        data = _bfloat16(tensor, rng)
    return kit.Tensor(tensor.dtype, tensor.shape, data)


def _bfloat16(tensor: SynthTensor, rng: np.random.Generator) -> bytes:
    """Norms near 1; matrices that keep the size of what they multiply, uniform codes included."""
    if "norm" in tensor.name:
        values = 1 + 0.1 * rng.standard_normal(tensor.shape)
    elif tensor.name.endswith("weight_scale"):
        values = rng.uniform(0.5, 1.5, tensor.shape) / (4.6 * 256**0.5)
    else:
        values = rng.standard_normal(tensor.shape) / tensor.shape[-1] ** 0.5
        values *= 16 if "embed_tokens" in tensor.name else 1
    bits = values.astype("<f4").view("<u4")
    return ((bits + 0x8000) >> 16).astype("<u2").tobytes()
