"""DeepSeek-V3's names and sizes, Kimi K2's among them: where every tensor belongs.

A name without a rule is refused: a tensor nobody placed is a tensor silently lost.
"""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from kconvert.layouts.errors import UnsupportedError
from kconvert.layouts.families.config_keys import UnknownKey, unknown_keys
from kconvert.layouts.fields import CONFIG_NAME, flag, natural, positive, text_config
from kconvert.layouts.formats.compressed_tensors import MATRIX_TENSORS, read_quantization
from kconvert.layouts.quantization import Quantization
from kconvert.layouts.sharding import MOST, ModelDims

BUFFER = "buffer"  # the group of what is computed, not read
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# Modules of a layer in the order a forward pass reads them. The last six are DeepSeek's MTP layer.
_LAYER_MODULES = (
    "input_layernorm",
    *(f"self_attn.{name}" for name in (
        "q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm",
        "kv_b_proj", "o_proj",
    )),
    "post_attention_layernorm",
    "mlp.gate",
    *(f"mlp.shared_experts.{name}" for name in PROJECTIONS),
    *(f"mlp.{name}" for name in PROJECTIONS),
    "embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head",
)  # fmt: skip
_PARAMETERS = ("weight", "bias", "e_score_correction_bias",
               "weight_packed", "weight_scale", "weight_shape")  # fmt: skip
_OUTER = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
_VISION = ("vision_tower.", "mm_projector.", "multi_modal_projector.")
_LAYER_ORDER = {
    f"{module}.{parameter}": len(_PARAMETERS) * i + j
    for i, module in enumerate(_LAYER_MODULES)
    for j, parameter in enumerate(_PARAMETERS)
}
_ARCHITECTURES = (
    "DeepseekV3ForCausalLM", "KimiK2ForCausalLM", "KimiK25ForConditionalGeneration",
)  # fmt: skip
_MODEL_TYPES = ("deepseek_v3", "kimi_k2", "kimi_k25")
# Read here or by the engine; and what only training reads (aux_loss_alpha, seq_aux), or what says
# again what others say (qk_head_dim, head_dim, ep_size).
_KEYS = frozenset({
    "attention_bias", "aux_loss_alpha", "compression_config", "ep_size", "first_k_dense_replace",
    "head_dim", "hidden_act", "hidden_size", "intermediate_size", "kv_lora_rank",
    "max_position_embeddings", "moe_intermediate_size", "moe_layer_freq", "n_group",
    "n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_attention_heads",
    "num_experts_per_tok", "num_hidden_layers", "num_key_value_heads",
    "num_nextn_predict_layers", "q_lora_rank", "qk_head_dim", "qk_nope_head_dim",
    "qk_rope_head_dim", "quantization_config", "rms_norm_eps", "rope_interleave",
    "rope_parameters", "rope_scaling", "rope_theta", "routed_scaling_factor", "scoring_func",
    "seq_aux", "tie_word_embeddings", "topk_group", "topk_method", "v_head_dim", "vocab_size",
})  # fmt: skip
# Of a wrapper around the text model: vision, and how the two are put together.
_WRAPPER_KEYS = frozenset({
    "compression_config", "ignore_index", "image_token_id", "media_placeholder_token_id",
    "quantization_config", "text_config", "tie_word_embeddings", "use_unified_vision_chunk",
    "video_placeholder", "vision_config", "vocab_size",
})  # fmt: skip
_NUMBER = "(0|[1-9][0-9]{0,4})"  # one spelling a number: "01" is another name than "1"
_LAYER_NAME = re.compile(rf"(?:language_model\.)?model\.layers\.{_NUMBER}\.(.+)")
_EXPERT_NAME = re.compile(
    rf"(?:language_model\.)?model\.layers\.{_NUMBER}\.mlp\.experts\.{_NUMBER}\."
    r"(gate_proj|up_proj|down_proj)\.(weight_packed|weight_scale|weight_shape)"
)
_BUFFER_NAME = re.compile(
    rf"(?:language_model\.)?model\.layers\.{_NUMBER}\.self_attn\.rotary_emb\.inv_freq"
)
EXPERTS = ".mlp.experts."
# What stands behind an expert's number in its tensors' names.
EXPERT_MEMBERS = frozenset(
    f"{projection}.{companion}" for projection in PROJECTIONS for companion in MATRIX_TENSORS
)
_UNSUPPORTED = {
    "weight_zero_point": "asymmetric weights (zero points) cannot be converted",
    "weight_g_idx": "act-order with g_idx (actorder group or dynamic) cannot be converted",
}


class Location(NamedTuple):
    """Where a tensor belongs: `layer` N, or the `outer` or `vision` file; `order` within it."""

    group: str  # "layer", "expert", "outer", "vision" or BUFFER
    layer: int = -1
    expert: int = -1
    order: int = 0


def locate(name: str) -> Location:
    """The place of the tensor called `name`; UnsupportedError where no rule covers it."""
    match = _EXPERT_NAME.fullmatch(name)
    if match:
        return Location("expert", int(match[1]), int(match[2]))
    match = _LAYER_NAME.fullmatch(name)
    if match:
        order = _LAYER_ORDER.get(match[2])
        if order is not None:
            return Location("layer", int(match[1]), order=order)
        if _BUFFER_NAME.fullmatch(name):
            return Location(BUFFER)
    elif name.startswith(_VISION):
        return Location("vision")
    else:
        bare = name.removeprefix("language_model.")
        if bare in _OUTER:
            return Location("outer", order=_OUTER.index(bare))
    if ".mlp.experts." in name and name.endswith("_proj.weight"):
        raise UnsupportedError(f"tensor {name}: this expert is not quantized, INT4 is expected.")
    reason = _UNSUPPORTED.get(
        name.rpartition(".")[2],
        "no sharding rule covers that name; known are DeepSeek-V3-style text models, Kimi's among"
        " them",
    )
    raise UnsupportedError(f"tensor {name}: {reason}.")


def expert_base(prefix: str, expert: int, projection: str) -> str:
    """The name of an expert's projection up to its last dot; `prefix` ends in `experts.`"""
    return f"{prefix}{expert}.{projection}."


@dataclass(frozen=True)
class Sizes:
    """The sizes in a config.json; names are the field's, counts are of elements."""

    vocabulary: int
    hidden: int
    layers: int
    mtp_layers: int  # multi-token prediction, numbered behind; a checkpoint may lack them
    first_moe: int  # layers below have a dense MLP
    heads: int
    q_lora: int  # 0: q_proj instead of q_a_proj and q_b_proj
    kv_lora: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    dense_intermediate: int
    moe_intermediate: int
    experts: int
    shared_experts: int
    tied_head: bool
    attention_bias: bool
    quantization: Quantization

    @property
    def dims(self) -> ModelDims:
        """What sharding depends on."""
        return ModelDims(
            layers=self.layers,
            mtp_layers=self.mtp_layers,
            first_moe=self.first_moe,
            experts=self.experts,
            hidden=self.hidden,
            intermediate=self.moe_intermediate,
            quantization=self.quantization,
        )


def read_sizes(whole_config: dict[str, Any]) -> Sizes:
    """The sizes in a config.json; CheckpointError or UnsupportedError naming the key."""
    config = text_config(whole_config)
    if config.get("n_routed_experts") is None:
        raise UnsupportedError(
            f"{CONFIG_NAME} has no n_routed_experts: known are DeepSeek-V3-style text models,"
            " Kimi's among them."
        )
    if natural(config, "moe_layer_freq", 1) != 1:
        raise UnsupportedError(
            f"{CONFIG_NAME}: moe_layer_freq is {config['moe_layer_freq']}, only 1 is known."
        )
    return Sizes(
        vocabulary=positive(config, "vocab_size"),
        hidden=positive(config, "hidden_size"),
        layers=positive(config, "num_hidden_layers", MOST),
        mtp_layers=natural(config, "num_nextn_predict_layers", 0, MOST),
        first_moe=natural(config, "first_k_dense_replace", 0, MOST),
        heads=positive(config, "num_attention_heads"),
        q_lora=natural(config, "q_lora_rank", 0),
        kv_lora=positive(config, "kv_lora_rank"),
        nope_dim=positive(config, "qk_nope_head_dim"),
        rope_dim=positive(config, "qk_rope_head_dim"),
        value_dim=positive(config, "v_head_dim"),
        dense_intermediate=positive(config, "intermediate_size"),
        moe_intermediate=positive(config, "moe_intermediate_size"),
        experts=positive(config, "n_routed_experts", MOST),
        shared_experts=natural(config, "n_shared_experts", 0),
        tied_head=flag(config, "tie_word_embeddings", False),
        attention_bias=flag(config, "attention_bias", False),
        quantization=read_quantization(whole_config),
    )


def unknown_config_keys(whole_config: dict[str, Any]) -> list[UnknownKey]:
    """What nobody here knows of a config.json, an unknown architecture among it."""
    text = text_config(whole_config)
    tables = [(text, _KEYS, "text_config.")]
    if text is whole_config:
        tables = [(text, _KEYS, "")]
    else:
        tables.append((whole_config, _WRAPPER_KEYS, ""))
    unknown = []
    for table, known, prefix in tables:
        unknown += unknown_keys(table, known, prefix)
        for key, names in (("architectures", _ARCHITECTURES), ("model_type", _MODEL_TYPES)):
            value = table.get(key)
            values = value if isinstance(value, list) else [value]
            if value is not None and any(name not in names for name in values):
                unknown.append(UnknownKey(f"{prefix}{key}", value))
    return unknown


class Stated(NamedTuple):
    """A module that the config implies: its weight's shape, and what else it may have."""

    shape: tuple[int, ...]
    parameters: tuple[str, ...] = ("weight",)  # required
    optional: bool = False  # a checkpoint may lack it


def stated_modules(sizes: Sizes, layer: int | None) -> dict[str, Stated]:
    """The modules of a layer (None: embedding, norm and head) but for the routed experts, by name
    behind `model.layers.N.` (or the prefix)."""
    s = sizes
    if layer is None:
        modules = {
            "model.embed_tokens": Stated((s.vocabulary, s.hidden)),
            "model.norm": Stated((s.hidden,)),
            "lm_head": Stated((s.vocabulary, s.hidden), optional=s.tied_head),
        }
        return modules
    biased = ("weight", "bias") if s.attention_bias else ("weight",)
    query = (s.heads * (s.nope_dim + s.rope_dim), s.q_lora or s.hidden)
    modules = {
        "input_layernorm": Stated((s.hidden,)),
        "post_attention_layernorm": Stated((s.hidden,)),
        "self_attn.kv_a_proj_with_mqa": Stated((s.kv_lora + s.rope_dim, s.hidden), biased),
        "self_attn.kv_a_layernorm": Stated((s.kv_lora,)),
        "self_attn.kv_b_proj": Stated((s.heads * (s.nope_dim + s.value_dim), s.kv_lora)),
        "self_attn.o_proj": Stated((s.hidden, s.heads * s.value_dim), biased),
    }
    if s.q_lora:
        modules["self_attn.q_a_proj"] = Stated((s.q_lora, s.hidden), biased)
        modules["self_attn.q_a_layernorm"] = Stated((s.q_lora,))
        modules["self_attn.q_b_proj"] = Stated(query)
    else:
        modules["self_attn.q_proj"] = Stated(query)
    if layer < s.first_moe:
        modules |= _mlp("mlp", s.dense_intermediate, s.hidden)
    else:
        router = ("weight", "e_score_correction_bias")
        modules["mlp.gate"] = Stated((s.experts, s.hidden), router)
        if s.shared_experts:
            size = s.moe_intermediate * s.shared_experts
            modules |= _mlp("mlp.shared_experts", size, s.hidden)
    if layer >= s.layers:  # embedding and head are often left to the model's own
        table = (s.vocabulary, s.hidden)
        modules |= {
            "embed_tokens": Stated(table, optional=True),
            "enorm": Stated((s.hidden,)),
            "hnorm": Stated((s.hidden,)),
            "eh_proj": Stated((s.hidden, 2 * s.hidden)),
            "shared_head.norm": Stated((s.hidden,)),
            "shared_head.head": Stated(table, optional=True),
        }
    return modules


def _mlp(name: str, size: int, hidden: int) -> dict[str, Stated]:
    shapes = (size, hidden), (size, hidden), (hidden, size)
    return {
        f"{name}.{projection}": Stated(shape)
        for projection, shape in zip(PROJECTIONS, shapes, strict=True)
    }
