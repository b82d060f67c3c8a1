"""ModelConfig: the sizes and constants of K2.6's text model (DeepSeek-V3 MLA + MoE)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kconvert.layouts.checkpoint import read_json
from kconvert.layouts.errors import CheckpointError, UnsupportedError
from kconvert.layouts.fields import CONFIG_NAME, natural, positive, real, text_config
from kconvert.runtime.rope import Yarn, mscale

GENERATION_NAME = "generation_config.json"


@dataclass(frozen=True)
class ModelConfig:
    """From config.json; names are the field's. Sizes count elements."""

    hidden: int
    layers: int
    first_moe: int  # layers below have a dense MLP
    vocabulary: int
    positions: int
    heads: int
    q_lora: int  # 0: q_proj instead of q_a, q_b
    kv_lora: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    dense_intermediate: int
    moe_intermediate: int
    experts: int
    top_k: int
    shared_experts: int
    routed_scale: float
    norm_topk: bool
    norm_eps: float
    rope_theta: float
    yarn: Yarn | None
    softmax_scale: float
    tied_head: bool
    stop_tokens: frozenset[int]


def read_config(folder: Path) -> ModelConfig:
    """The model of the checkpoint or output in `folder`.

    Raises CheckpointError where a size is absent or senseless, UnsupportedError where the model
    asks for what this forward pass does not do.
    """
    whole = read_json(folder / CONFIG_NAME)
    config = text_config(whole)
    _require(config, "scoring_func", "sigmoid")
    _require(config, "topk_method", "noaux_tc")
    _require(config, "hidden_act", "silu")
    _require(config, "n_group", 1)
    _require(config, "moe_layer_freq", 1)
    _require(config, "attention_bias", False)
    yarn, sharpening = _yarn(config)
    nope, rope = positive(config, "qk_nope_head_dim"), positive(config, "qk_rope_head_dim")
    experts, top_k = positive(config, "n_routed_experts"), positive(config, "num_experts_per_tok")
    if top_k > experts:
        raise CheckpointError(f"{CONFIG_NAME}: {top_k} experts a token of {experts}.")
    return ModelConfig(
        hidden=positive(config, "hidden_size"),
        layers=positive(config, "num_hidden_layers"),
        first_moe=natural(config, "first_k_dense_replace", 0),
        vocabulary=positive(config, "vocab_size"),
        positions=positive(config, "max_position_embeddings"),
        heads=positive(config, "num_attention_heads"),
        q_lora=natural(config, "q_lora_rank", 0),
        kv_lora=positive(config, "kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rope,
        value_dim=positive(config, "v_head_dim"),
        dense_intermediate=positive(config, "intermediate_size"),
        moe_intermediate=positive(config, "moe_intermediate_size"),
        experts=experts,
        top_k=top_k,
        shared_experts=natural(config, "n_shared_experts", 0),
        routed_scale=real(config, "routed_scaling_factor", 1.0),
        norm_topk=bool(config.get("norm_topk_prob", True)),
        norm_eps=real(config, "rms_norm_eps", 1e-6),
        rope_theta=real(config, "rope_theta", 10000.0, least=1.01),
        yarn=yarn,
        softmax_scale=(nope + rope) ** -0.5 * sharpening,
        tied_head=bool(config.get("tie_word_embeddings", False)),
        stop_tokens=_stop_tokens(folder, whole, config),
    )


def _yarn(config: dict[str, Any]) -> tuple[Yarn | None, float]:
    """YaRN and what it multiplies the softmax scale with: mscale(mscale_all_dim)², as DeepSeek-V3
    does. Where mscale = mscale_all_dim, as in Kimi's configs, cosines and sines stay as they are.
    """
    table = config.get("rope_scaling")
    if table is None:
        return None, 1.0
    kind = table.get("type", table.get("rope_type")) if isinstance(table, dict) else table
    if kind != "yarn":
        raise UnsupportedError(f"{CONFIG_NAME}: rope_scaling is {kind!r}, only yarn is known.")
    factor, all_dim = real(table, "factor", 1.0), real(table, "mscale_all_dim", 0.0, least=0.0)
    yarn = Yarn(
        factor,
        positive(table, "original_max_position_embeddings"),
        real(table, "beta_fast", 32.0),
        real(table, "beta_slow", 1.0),
        mscale(factor, real(table, "mscale", 1.0, least=0.0)) / mscale(factor, all_dim),
    )
    return yarn, mscale(factor, all_dim) ** 2


def _stop_tokens(folder: Path, *configs: dict[str, Any]) -> frozenset[int]:
    """The union of every eos_token_id in config.json and generation_config.json."""
    tables = [(CONFIG_NAME, config) for config in configs]
    if (folder / GENERATION_NAME).is_file():
        tables.append((GENERATION_NAME, read_json(folder / GENERATION_NAME)))
    stops: set[int] = set()
    for file, table in tables:
        tokens = table.get("eos_token_id")
        tokens = tokens if isinstance(tokens, list) else [] if tokens is None else [tokens]
        if not all(type(token) is int for token in tokens):
            raise CheckpointError(
                f"{folder / file}: eos_token_id is {tokens!r:.60}, expected tokens' numbers."
            )
        stops.update(tokens)
    return frozenset(stops)


def _require(config: dict[str, Any], key: str, only: object) -> None:
    value = config.get(key, only)
    if value != only:
        raise UnsupportedError(f"{CONFIG_NAME}: {key} is {value!r:.60}, only {only!r} can be run.")
