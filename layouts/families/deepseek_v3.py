"""DeepSeek-V3 and what is built like it, such as Kimi K2: sizes, and the modules of a layer."""

from dataclasses import dataclass
from typing import Any

from kconvert.layouts.errors import UnsupportedError
from kconvert.layouts.families.config_keys import UnknownKey, unknown_keys
from kconvert.layouts.families.family import (
    Family,
    Stated,
    mlp_modules,
    mtp_modules,
    unknown_architecture,
)
from kconvert.layouts.fields import CONFIG_NAME, flag, natural, positive, text_config
from kconvert.layouts.formats.known import read_format
from kconvert.layouts.quantization import Quantization
from kconvert.layouts.sharding import MOST, ModelDims

# Keys that are read here or by the engine; that only training reads (aux_loss_alpha, seq_aux); or
# that repeat others (qk_head_dim, head_dim, ep_size).
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
# Keys of a wrapper around the text model: vision, and how the two are put together.
_WRAPPER_KEYS = frozenset({
    "compression_config", "ignore_index", "image_token_id", "media_placeholder_token_id",
    "quantization_config", "text_config", "tie_word_embeddings", "use_unified_vision_chunk",
    "video_placeholder", "vision_config", "vocab_size",
})  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """The sizes in a config.json; names are the field's, counts are of elements."""

    vocabulary: int
    hidden: int
    layers: int
    mtp_layers: int  # multi-token prediction, numbered after the others; a checkpoint may lack them
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
        quantization=read_format(whole_config).quantization,
    )


def unknown_config_keys(whole_config: dict[str, Any]) -> list[UnknownKey]:
    """The keys of a config.json that are not known here; an unknown architecture is one too."""
    text = text_config(whole_config)
    tables = [(text, _KEYS, "text_config.")]
    if text is whole_config:
        tables = [(text, _KEYS, "")]
    else:
        tables.append((whole_config, _WRAPPER_KEYS, ""))
    unknown: list[UnknownKey] = []
    for table, known, prefix in tables:
        unknown += unknown_keys(table, known, prefix)
        unknown += unknown_architecture(table, prefix, DeepSeekV3)
    return unknown


class DeepSeekV3(Family):
    """DeepSeek V3, Kimi K2-Thinking, K2.5, K2.6: MLA, a router with a bias, shared experts."""

    architectures = (
        "DeepseekV3ForCausalLM", "KimiK2ForCausalLM", "KimiK25ForConditionalGeneration",
    )  # fmt: skip
    model_types = ("deepseek_v3", "kimi_k2", "kimi_k25")

    def __init__(self, config: dict[str, Any]) -> None:
        self.sizes = read_sizes(config)
        super().__init__(config)

    def _read(self, config: dict[str, Any]) -> ModelDims:
        return self.sizes.dims

    def stated(self, layer: int | None, block: str) -> dict[str, Stated]:
        return stated_modules(self.sizes, layer)


def stated_modules(sizes: Sizes, layer: int | None) -> dict[str, Stated]:
    """See `Family.stated`."""
    s = sizes
    if layer is None:
        return {
            "model.embed_tokens": Stated((s.vocabulary, s.hidden)),
            "model.norm": Stated((s.hidden,)),
            "lm_head": Stated((s.vocabulary, s.hidden), optional=s.tied_head),
        }
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
        modules |= mlp_modules("mlp", s.dense_intermediate, s.hidden)
    else:
        router = ("weight", "e_score_correction_bias")
        modules["mlp.gate"] = Stated((s.experts, s.hidden), router)
        if s.shared_experts:
            size = s.moe_intermediate * s.shared_experts
            modules |= mlp_modules("mlp.shared_experts", size, s.hidden)
    return modules | (mtp_modules(s.vocabulary, s.hidden) if layer >= s.layers else {})
