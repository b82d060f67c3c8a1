"""The checkpoint that the engines serve: kimi-mini with the latent size that their CPU kernels are
compiled for (512 + 64), and weights that make its tokens depend on every expert."""

import copy
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from kconvert.convert.synth.presets import PRESETS, SynthTensor, shards
from kconvert.layouts.header import DTYPE_BYTES

PREFIX = "language_model."

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
    if not group_size:
        weights |= {"strategy": "channel", "group_size": None}
    if not wrapped:
        config = {**text, "model_type": "deepseek_v3", "dtype": "bfloat16"}
    folder.mkdir(parents=True)
    weight_map = {}
    for i, part in enumerate(parts):
        file = f"model-{i + 1:05}-of-{len(parts):06}.safetensors"
        tensors = [_channelwise(t) if not group_size else t for t in part]
        if not wrapped:
            tensors = [t._replace(name=t.name.removeprefix(PREFIX)) for t in tensors
                       if t.name.startswith(PREFIX)]  # fmt: skip
        if tensors:
            _write_shard(folder / file, tensors)
            weight_map |= {tensor.name: file for tensor in tensors}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_draft(folder: Path) -> Path:
    """A Llama of one layer that speaks the same tokens, to draft for it."""
    hidden, inner, vocabulary = 128, 256, 512
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": hidden // 2,
        "vocab_size": vocabulary, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "hidden_act": "silu",
    }  # fmt: skip
    square, wide = (hidden, hidden), (inner, hidden)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (vocabulary, hidden), "model.norm": (hidden,),
        "lm_head": (vocabulary, hidden),
    }  # fmt: skip
    shapes |= {f"model.layers.0.self_attn.{name}_proj": square for name in "qkvo"}
    shapes |= {f"model.layers.0.mlp.{name}_proj": wide for name in ("gate", "up")}
    shapes["model.layers.0.mlp.down_proj"] = (hidden, inner)
    for name in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"model.layers.0.{name}"] = (hidden,)
    folder.mkdir(parents=True)
    tensors = [SynthTensor(f"{name}.weight", "BF16", shape) for name, shape in shapes.items()]
    _write_shard(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _write_shard(path: Path, tensors: list[SynthTensor]) -> None:
    """On all cores, tensor by tensor: a true-size layer has 10 GB."""
    table, at = {}, 0
    for tensor in tensors:
        end = at + DTYPE_BYTES[tensor.dtype] * math.prod(tensor.shape)
        table[tensor.name] = {
            "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, end],
        }  # fmt: skip
        at = end
    header = json.dumps({"__metadata__": {"format": "pt"}, **table}).encode()
    start = 8 + len(header)
    with open(path, "w+b") as file, ThreadPoolExecutor() as pool:
        file.write(len(header).to_bytes(8, "little") + header)
        file.flush()

        def write_one(tensor: SynthTensor) -> None:
            first, end = table[tensor.name]["data_offsets"]
            assert os.pwrite(file.fileno(), data_of(tensor), start + first) == end - first

        for _ in pool.map(write_one, tensors):
            pass


def _channelwise(tensor: SynthTensor) -> SynthTensor:
    scale = tensor.name.endswith("weight_scale")
    return tensor._replace(shape=(tensor.shape[0], 1)) if scale else tensor


def data_of(tensor: SynthTensor) -> bytes:
    """A tensor's bytes, which follow from its name and shape alone."""
    rng = np.random.default_rng(list(tensor.name.encode()))
    if tensor.value:
        return np.array(tensor.value, "<i4").tobytes()
    if tensor.dtype == "I32":
        return rng.integers(0, 1 << 32, tensor.shape, np.uint32).tobytes()
    if tensor.dtype == "F32":
        return (0.1 * rng.standard_normal(tensor.shape)).astype("<f4").tobytes()
    return _bfloat16(tensor, rng)


def _bfloat16(tensor: SynthTensor, rng: np.random.Generator) -> bytes:
    """Norms near 1; matrices that keep the size of what they multiply, uniform codes included."""
    if "norm" in tensor.name:
        values = 1 + 0.1 * rng.standard_normal(tensor.shape, np.float32)
    elif tensor.name.endswith("weight_scale"):
        values = (0.5 + rng.random(tensor.shape, np.float32)) / (4.6 * 16)
    else:
        values = rng.standard_normal(tensor.shape, np.float32)
        values *= 1.0 if "embed_tokens" in tensor.name else tensor.shape[-1] ** -0.5
    bits = values.astype("<f4").view("<u4")
    return ((bits + 0x8000) >> 16).astype("<u2").tobytes()
