"""The models that `kconvert synth` can write: their config.json and every tensor they have.

Names, dtypes, shapes and the split into shards are those of the published K2.6 checkpoint; a test
rebuilds all 64 of its header sizes from them.
"""

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

from kconvert.convert.synth.families import CONFIGS, SynthTensor, family_shards
from kconvert.layouts.families.family import PROJ_NAMES
from kconvert.layouts.fields import text_config

_WEIGHTS: dict[str, Any] = {
    "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4,
    "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True,
    "type": "int",
}  # fmt: skip
_K26_CONFIG: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
    "dtype": "bfloat16", "bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839,
    "media_placeholder_token_id": 163605,
    "text_config": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "hidden_size": 7168,
        "num_hidden_layers": 61, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "n_routed_experts": 384, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "moe_intermediate_size": 2048, "intermediate_size": 18432, "num_attention_heads": 64,
        "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 163840,
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-05, "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
        "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0, "hidden_act": "silu", "attention_bias": False,
        "bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839,
        "quantization_config": {
            "config_groups": {
                "group_0": {
                    "input_activations": None, "output_activations": None, "targets": ["Linear"],
                    "weights": _WEIGHTS,
                }
            },
            "format": "pack-quantized",
            "ignore": [
                "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
                r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            ],
            "kv_cache_scheme": None, "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        },
    },
    "vision_config": {
        "patch_size": 14, "vt_num_hidden_layers": 27, "vt_hidden_size": 1152,
        "vt_num_attention_heads": 16, "mm_hidden_size": 1152, "text_hidden_size": 7168,
    },
}  # fmt: skip
_KIMI_MINI_TEXT = {
    "hidden_size": 256, "num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "vocab_size": 512,
}  # fmt: skip
_KIMI_MINI_VISION = {
    "vt_num_hidden_layers": 2, "vt_hidden_size": 32, "vt_num_attention_heads": 2,
    "mm_hidden_size": 32, "text_hidden_size": 256,
}  # fmt: skip
_KIMI_MINI_TOKENS = {"bos_token_id": 256, "eos_token_id": 258, "pad_token_id": 511}


class Preset(NamedTuple):
    """A model: its config.json and the two vision sizes that the config does not hold."""

    config: dict[str, Any]
    vision_mlp: int = 0  # 0: a tower without MLPs and norms
    vision_grid: int = 0  # positions a side; 0: no vision


def _kimi_mini() -> dict[str, Any]:
    config = copy.deepcopy(_K26_CONFIG) | _KIMI_MINI_TOKENS | {"media_placeholder_token_id": 277}
    config["text_config"] |= _KIMI_MINI_TEXT | _KIMI_MINI_TOKENS
    config["vision_config"] |= _KIMI_MINI_VISION
    return config


def _k26_layer() -> dict[str, Any]:
    """One MoE layer of true size, and little else: a whole model for trials."""
    config = copy.deepcopy(_K26_CONFIG) | _KIMI_MINI_TOKENS | {"media_placeholder_token_id": 277}
    one_layer = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "vocab_size": 512}
    config["text_config"] |= one_layer | _KIMI_MINI_TOKENS
    hidden = config["text_config"]["hidden_size"]
    config["vision_config"] |= _KIMI_MINI_VISION | {"text_hidden_size": hidden}
    return config


PRESETS = {
    "k2.6": Preset(_K26_CONFIG, vision_mlp=4304, vision_grid=64),
    "k2.6-layer": Preset(_k26_layer(), vision_mlp=0, vision_grid=8),
    "kimi-mini": Preset(_kimi_mini(), vision_mlp=0, vision_grid=8),
} | {name: Preset(config) for name, config in CONFIGS.items()}
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token")


def experts_of(preset: Preset) -> int:
    """The number of routed experts in a layer."""
    text = text_config(preset.config)
    return next(int(text[key]) for key in _EXPERTS if key in text)


def with_experts(preset: Preset, experts: int) -> Preset:
    """The same model with only so many routed experts a layer."""
    config = copy.deepcopy(preset.config)
    text = text_config(config)
    text[next(key for key in _EXPERTS if key in text)] = experts
    top_k = next(key for key in _TOP_K if key in text)
    text[top_k] = min(experts, text[top_k])
    return preset._replace(config=config)


def shards(preset: Preset) -> list[list[SynthTensor]]:
    """Every shard's tensors: a shard for each layer, one for embeddings and head, and vision's if
    there is any."""
    if not preset.vision_grid:
        return family_shards(preset.config)
    text = preset.config["text_config"]
    return [
        *(list(_layer(text, layer)) for layer in range(text["num_hidden_layers"])),
        list(_outer(text)),
        list(_projector(preset)),
        list(_tower(preset)),
    ]


def _outer(text: dict[str, Any]) -> Iterator[SynthTensor]:
    table = (text["vocab_size"], text["hidden_size"])
    yield SynthTensor("language_model.lm_head.weight", "BF16", table)
    yield SynthTensor("language_model.model.embed_tokens.weight", "BF16", table)
    yield SynthTensor("language_model.model.norm.weight", "BF16", table[1:])


def _layer(text: dict[str, Any], layer: int) -> Iterator[SynthTensor]:
    base = f"language_model.model.layers.{layer}."
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    nope, rope, value = (text[f"{key}_head_dim"] for key in ("qk_nope", "qk_rope", "v"))
    q_rank, kv_rank = text["q_lora_rank"], text["kv_lora_rank"]
    whole: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_a_proj": (q_rank, hidden),
        "self_attn.q_a_layernorm": (q_rank,),
        "self_attn.q_b_proj": (heads * (nope + rope), q_rank),
        "self_attn.kv_a_proj_with_mqa": (kv_rank + rope, hidden),
        "self_attn.kv_a_layernorm": (kv_rank,),
        "self_attn.kv_b_proj": (heads * (nope + value), kv_rank),
        "self_attn.o_proj": (hidden, heads * value),
    }
    experts = 0 if layer < text["first_k_dense_replace"] else text["n_routed_experts"]
    intermediate = text["moe_intermediate_size"]
    if experts:
        whole["mlp.gate"] = (experts, hidden)
        mlp, size = "mlp.shared_experts", intermediate * text["n_shared_experts"]
    else:
        mlp, size = "mlp", text["intermediate_size"]
    whole |= {f"{mlp}.{p}": shape for p, shape in _mlp_shapes(size, hidden)}
    for name, shape in whole.items():
        yield SynthTensor(f"{base}{name}.weight", "BF16", shape)
    if experts:
        yield SynthTensor(f"{base}mlp.gate.e_score_correction_bias", "F32", (experts,))
    group = text["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"]
    for expert in range(experts):
        for projection, (n, k) in _mlp_shapes(intermediate, hidden):
            name = f"{base}mlp.experts.{expert}.{projection}.weight_"
            yield SynthTensor(f"{name}packed", "I32", (n, k // 8))
            yield SynthTensor(f"{name}scale", "BF16", (n, k // group))
            yield SynthTensor(f"{name}shape", "I32", (2,), value=(n, k))


def _mlp_shapes(size: int, hidden: int) -> list[tuple[str, tuple[int, int]]]:
    shapes = (size, hidden), (size, hidden), (hidden, size)
    return list(zip(PROJ_NAMES, shapes, strict=True))


def _projector(preset: Preset) -> Iterator[SynthTensor]:
    vision = preset.config["vision_config"]
    size = vision["mm_hidden_size"]
    merged = 4 * size  # 2 × 2 patches become one token
    yield from _affine("mm_projector.pre_norm", size)
    yield from _affine("mm_projector.proj.0", merged, merged)
    yield from _affine("mm_projector.proj.2", vision["text_hidden_size"], merged)


def _tower(preset: Preset) -> Iterator[SynthTensor]:
    vision = preset.config["vision_config"]
    size, mlp, grid = vision["vt_hidden_size"], preset.vision_mlp, preset.vision_grid
    for block in range(vision["vt_num_hidden_layers"]):
        base = f"vision_tower.encoder.blocks.{block}."
        yield from _affine(f"{base}wqkv", 3 * size, size)
        yield from _affine(f"{base}wo", size, size)
        if mlp:
            yield from _affine(f"{base}mlp.fc0", mlp, size)
            yield from _affine(f"{base}mlp.fc1", size, mlp)
            yield from _affine(f"{base}norm0", size)
            yield from _affine(f"{base}norm1", size)
    if mlp:
        yield from _affine("vision_tower.encoder.final_layernorm", size)
    yield SynthTensor("vision_tower.patch_embed.pos_emb.weight", "BF16", (grid, grid, size))
    patch = vision["patch_size"]
    yield from _affine("vision_tower.patch_embed.proj", size, 3, patch, patch)


def _affine(name: str, *shape: int) -> Iterator[SynthTensor]:
    yield SynthTensor(f"{name}.weight", "BF16", shape)
    yield SynthTensor(f"{name}.bias", "BF16", shape[:1])
