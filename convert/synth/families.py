"""Models of the other families: their sizes as published, and every tensor that a family states.

Kimi K3's attention is not stated: it has the public names, with sizes that are made up.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from kconvert.layouts.families.family import PROJ_NAMES, Family, projections
from kconvert.layouts.families.kimi_k3 import KimiK3
from kconvert.layouts.families.known import read_family
from kconvert.layouts.formats.format import Format


class SynthTensor(NamedTuple):
    """A tensor of a shard, in no order yet."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    value: tuple[int, ...] = ()  # of integers; empty: random


def _packed(
    format: str = "pack-quantized", dtype: str | None = None, **weights: Any
) -> dict[str, Any]:
    """A compressed-tensors config as 0.20 writes it."""
    group = {"format": format, "input_activations": None, "output_activations": None,
             "targets": ["Linear"],
             "weights": {"type": "int", "strategy": "group", "dynamic": False, **weights,
                         **({"scale_dtype": dtype} if dtype else {})}}  # fmt: skip
    return {"quant_method": "compressed-tensors", "format": format, "version": "0.20.1",
            "quantization_status": "compressed", "ignore": ["lm_head", "re:.*self_attn.*"],
            "kv_cache_scheme": None, "config_groups": {"group_0": group}}  # fmt: skip


_MXFP4 = _packed(
    "mxfp4-pack-quantized", "torch.uint8", num_bits=4, type="float", symmetric=True, group_size=32
)
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False,
         "checkpoint_format": "gptq", "meta": {"quantizer": ["gptqmodel:7.7.0"]}}  # fmt: skip


def _config(model_type: str, architecture: str, **sizes: Any) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [architecture], "dtype": "bfloat16",
            "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
            **sizes}  # fmt: skip


CONFIGS: dict[str, dict[str, Any]] = {
    "k3": _config("kimi_k3", "KimiK3ForConditionalGeneration") | {"text_config": _config(
        "kimi_linear", "KimiLinearForCausalLM", vocab_size=163840, hidden_size=7168,
        routed_expert_hidden_size=3584, num_hidden_layers=93, first_k_dense_replace=1,
        num_experts=896, num_experts_per_token=16, num_shared_experts=1,
        moe_intermediate_size=3072, intermediate_size=18432, num_attention_heads=96,
        num_nextn_predict_layers=0, quantization_config=_MXFP4,
    )},
    "deepseek-v3": _config(
        "deepseek_v3", "DeepseekV3ForCausalLM", vocab_size=129280, hidden_size=7168,
        num_hidden_layers=61, first_k_dense_replace=3, moe_layer_freq=1, n_routed_experts=256,
        num_experts_per_tok=8, n_shared_experts=1, moe_intermediate_size=2048,
        intermediate_size=18432, num_attention_heads=128, num_key_value_heads=128,
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, rope_theta=10000, routed_scaling_factor=2.5, scoring_func="sigmoid",
        topk_method="noaux_tc", n_group=8, topk_group=4, norm_topk_prob=True,
        num_nextn_predict_layers=1,
        quantization_config=_packed(num_bits=8, symmetric=True, group_size=128),
    ),
    "qwen3-235b": _config(
        "qwen3_moe", "Qwen3MoeForCausalLM", vocab_size=151936, hidden_size=4096,
        num_hidden_layers=94, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=1536,
        intermediate_size=12288, num_attention_heads=64, num_key_value_heads=4, head_dim=128,
        mlp_only_layers=[], decoder_sparse_step=1, quantization_config=_GPTQ,
    ),
    "mixtral-8x7b": _config(
        "mixtral", "MixtralForCausalLM", vocab_size=32000, hidden_size=4096,
        num_hidden_layers=32, num_local_experts=8, num_experts_per_tok=2,
        intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        quantization_config=_packed(num_bits=4, symmetric=False, group_size=128),
    ),
    "glm-4.6": _config(
        "glm4_moe", "Glm4MoeForCausalLM", vocab_size=151552, hidden_size=5120,
        num_hidden_layers=92, first_k_dense_replace=3, n_routed_experts=160,
        num_experts_per_tok=8, n_shared_experts=1, moe_intermediate_size=1536,
        intermediate_size=12288, num_attention_heads=96, num_key_value_heads=8, head_dim=128,
        attention_bias=True, use_qk_norm=True, num_nextn_predict_layers=1,
        quantization_config=_packed(num_bits=8, symmetric=True, strategy="channel"),
    ),
    "minimax-m2": _config(
        "minimax_m2", "MiniMaxM2ForCausalLM", vocab_size=200064, hidden_size=3072,
        num_hidden_layers=62, num_local_experts=256, num_experts_per_tok=8,
        intermediate_size=1536, num_attention_heads=48, num_key_value_heads=8, head_dim=128,
        quantization_config=_MXFP4,
    ),
    "gpt-oss-120b": _config(
        "gpt_oss", "GptOssForCausalLM", vocab_size=201088, hidden_size=2880,
        num_hidden_layers=36, num_local_experts=128, num_experts_per_tok=4,
        intermediate_size=2880, num_attention_heads=64, num_key_value_heads=8, head_dim=64,
        attention_bias=True,
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    ),
}  # fmt: skip
_SPARSE_BLOCK = {"mixtral", "minimax_m2", "kimi_k3"}  # model types that call it block_sparse_moe


def family_shards(config: dict[str, Any]) -> list[list[SynthTensor]]:
    """Every shard's tensors: a shard for each layer, MTP layers too, then one for the rest."""
    family = read_family(config)
    prefix = "language_model." if "text_config" in config else ""
    block = "block_sparse_moe" if config["model_type"] in _SPARSE_BLOCK else "mlp"
    layers = range(family.dims.layers + family.dims.mtp_layers)
    return [
        *(list(_layer(family, f"{prefix}model.layers.{n}.", n, block, config)) for n in layers),
        list(_stated(family, prefix, None, block, config)),
    ]


def _layer(
    family: Family, base: str, layer: int, block: str, config: dict[str, Any]
) -> Iterator[SynthTensor]:
    yield from _stated(family, base, layer, block, config)
    if family.dims.is_moe(layer):
        yield from _experts(family, f"{base}{block}.experts.")


def _stated(
    family: Family, base: str, layer: int | None, block: str, config: dict[str, Any]
) -> Iterator[SynthTensor]:
    modules = {
        f"{module}.{parameter}": stated.shape if parameter == "weight" else stated.shape[:1]
        for module, stated in family.stated(layer, block).items()
        for parameter in stated.parameters
    }
    if isinstance(family, KimiK3):
        modules = _kimi_k3(config["text_config"], layer)
    for name, shape in modules.items():
        kind = "F32" if name.endswith(("e_score_correction_bias", "conv1d.weight")) else "BF16"
        yield SynthTensor(f"{base}{name}", kind, shape)


def _experts(family: Family, base: str) -> Iterator[SynthTensor]:
    """A layer's experts, as the family's format stores them."""
    dims, format = family.dims, family.format
    n, k, experts = dims.intermediate, dims.hidden, dims.experts
    if format.fused:
        for name, shape in (("gate_up_proj", (2 * n, k)), ("down_proj", (k, n))):
            for companion, kind in format.kinds(*shape).items():
                whole = (experts, *kind.shape)
                yield SynthTensor(f"{base}{name}{companion}", kind.dtypes[0], whole)
        return
    shapes = (n, k), (n, k), (k, n)
    for expert in range(experts):
        for projection, shape in zip(projections(base), shapes, strict=True):
            for companion, kind in format.kinds(*shape).items():
                value = _value(format, companion, kind.shape, shape)
                dtype = "F16" if companion == "scales" else kind.dtypes[0]
                name = f"{base}{expert}.{projection}.{companion}"
                yield SynthTensor(name, dtype, kind.shape, value)


@cache
def _value(
    format: Format, companion: str, stored: tuple[int, ...], shape: tuple[int, int]
) -> tuple[int, ...]:
    """The value of a companion that is only checked: the shape, trivial groups, middle zero points;
    empty for any other."""
    quantization = format.quantization
    if format.roles[companion] is not None:
        return ()
    if companion == "g_idx":
        group = quantization.group_size or shape[1]
        return tuple(column // group for column in range(shape[1]))
    if companion == "qzeros":
        return (0x77777777 if quantization.bits == 4 else 0x7F7F7F7F,) * (stored[0] * stored[1])
    return shape


def _kimi_k3(text: dict[str, Any], layer: int | None) -> dict[str, tuple[int, ...]]:
    """K3's other tensors: names as far as they are public, plausible sizes."""
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    if layer is None:
        table = (text["vocab_size"], hidden)
        return {"model.embed_tokens.weight": table, "model.norm.weight": (hidden,),
                "lm_head.weight": table}  # fmt: skip
    size, low = 128 * heads, 512
    modules: dict[str, tuple[int, ...]] = {"input_layernorm": (hidden,)}
    if layer % 4 == 3:
        modules |= {
            "self_attn.q_a_proj": (1536, hidden), "self_attn.q_a_layernorm": (1536,),
            "self_attn.q_b_proj": (192 * heads, 1536),
            "self_attn.kv_a_proj_with_mqa": (low + 64, hidden), "self_attn.kv_a_layernorm": (low,),
            "self_attn.kv_b_proj": (256 * heads, low), "self_attn.g_proj": (size, hidden),
        }  # fmt: skip
    else:
        for name in ("q", "k", "v"):
            modules[f"self_attn.{name}_proj"] = (size, hidden)
            modules[f"self_attn.{name}_conv1d"] = (size, 1, 4)
        for name in ("f", "g"):
            modules[f"self_attn.{name}_a_proj"] = (128, hidden)
            modules[f"self_attn.{name}_b_proj"] = (size, 128)
        modules |= {"self_attn.b_proj": (heads, hidden), "self_attn.o_norm": (128,)}
    modules["self_attn.o_proj"] = (hidden, size)
    for name in ("self_attn", "mlp"):
        modules |= {f"{name}_res_proj": (1, hidden), f"{name}_res_norm": (hidden,)}
    modules["post_attention_layernorm"] = (hidden,)
    mlp, width, others = "mlp", text["intermediate_size"], {}
    if layer >= text["first_k_dense_replace"]:
        expert, width = text["routed_expert_hidden_size"], text["moe_intermediate_size"]
        mlp, base = "block_sparse_moe.shared_experts", "block_sparse_moe."
        others = {
            f"{base}gate.weight": (text["num_experts"], hidden),
            f"{base}gate.e_score_correction_bias": (text["num_experts"],),
            f"{base}routed_expert_down_proj.weight": (expert, hidden),
            f"{base}routed_expert_norm.weight": (expert,),
            f"{base}routed_expert_up_proj.weight": (hidden, expert),
        }
    shapes = (width, hidden), (width, hidden), (hidden, width)
    for projection, shape in zip(PROJ_NAMES, shapes, strict=True):
        modules[f"{mlp}.{projection}"] = shape
    return {f"{name}.weight": shape for name, shape in modules.items()} | others
