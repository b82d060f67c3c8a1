"""ModelConfig: what config.json says about the forward pass (DeepSeek-V3 MLA + MoE)."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kconvert.layouts.checkpoint import read_json
from kconvert.layouts.errors import CheckpointError, UnsupportedError
from kconvert.layouts.families.deepseek_v3 import DeepSeekV3, Sizes, read_sizes, unknown_config_keys
from kconvert.layouts.families.known import family_of
from kconvert.layouts.fields import CONFIG_NAME, flag, positive, real, text_config
from kconvert.runtime.rope import Yarn, mscale

GENERATION_NAME = "generation_config.json"


@dataclass(frozen=True)
class ModelConfig(Sizes):
    """The sizes in config.json, and what else the forward pass needs; names are the field's."""

    positions: int
    top_k: int
    routed_scale: float
    norm_topk: bool
    norm_eps: float
    rope_theta: float
    yarn: Yarn | None
    softmax_scale: float
    stop_tokens: frozenset[int]


def read_config(folder: Path, ignored_keys: Collection[str] = ()) -> ModelConfig:
    """The model of the checkpoint or output in `folder`.

    `ignored_keys`: paths of keys (`text_config.some_key`) that may be there though they are not
    known here. Raises CheckpointError if a size is absent or makes no sense, UnsupportedError if
    the model needs what this forward pass does not do, or what is not known here.
    """
    whole = read_json(folder / CONFIG_NAME)
    _check_family(whole, folder / CONFIG_NAME)
    _refuse_unknown(whole, ignored_keys)
    stop_tokens = _stop_tokens(folder, whole, text_config(whole))
    return replace(config_of(whole), stop_tokens=stop_tokens)


def config_of(whole: dict[str, Any]) -> ModelConfig:
    """The model of a parsed config.json, without its stop tokens. Raises as `read_config` does."""
    _check_family(whole, CONFIG_NAME)
    config, sizes = text_config(whole), read_sizes(whole)
    same = {
        "num_key_value_heads": sizes.heads,
        "qk_head_dim": sizes.nope_dim + sizes.rope_dim,
        "head_dim": sizes.rope_dim,  # as transformers writes it for this family
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "hidden_act": "silu",
        "n_group": 1,
        "topk_group": 1,
        "rope_interleave": True,
        "attention_bias": False,
    }
    for key, only in same.items():
        _require(config, key, only)
    rope = _rope(config)
    yarn, sharpening = _yarn(rope)
    top_k = positive(config, "num_experts_per_tok")
    if top_k > sizes.experts:
        raise CheckpointError(
            f"{CONFIG_NAME}: num_experts_per_tok is {top_k}, expected at most the"
            f" {sizes.experts} of n_routed_experts."
        )
    return ModelConfig(
        **vars(sizes),
        positions=positive(config, "max_position_embeddings"),
        top_k=top_k,
        routed_scale=real(config, "routed_scaling_factor"),
        norm_topk=flag(config, "norm_topk_prob", True),
        norm_eps=real(config, "rms_norm_eps"),
        rope_theta=real(rope, "rope_theta", least=1.01),
        yarn=yarn,
        softmax_scale=(sizes.nope_dim + sizes.rope_dim) ** -0.5 * sharpening,
        stop_tokens=frozenset(),
    )


def _check_family(config: dict[str, Any], where: Path | str) -> None:
    if family_of(config) is not DeepSeekV3:
        raise UnsupportedError(
            f"{where}: model_type is {text_config(config).get('model_type')!r:.60}, the engine runs"
            " DeepSeek-V3-style models, Kimi K2's among them."
        )


def _refuse_unknown(config: dict[str, Any], ignored: Collection[str]) -> None:
    keys = [key for key in unknown_config_keys(config) if key.matters and key.path not in ignored]
    if keys:
        others = f" (and {len(keys) - 1} more)" if keys[1:] else ""
        raise UnsupportedError(
            f"{CONFIG_NAME}: {keys[0]} is not known here{others} and may change what the model"
            " computes: if it does not,"
            f" {' '.join(f'--ignore-config-key {key.path}' for key in keys)}."
        )


_ROPE_KEYS = frozenset({
    "rope_theta", "type", "rope_type", "factor", "original_max_position_embeddings", "beta_fast",
    "beta_slow", "mscale", "mscale_all_dim",
})  # fmt: skip


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary settings: `rope_theta` and `rope_scaling`, or all of them in `rope_parameters`,
    as transformers 5 writes them. If both are there, they must agree."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    for key, table in (("rope_parameters", new), ("rope_scaling", old)):
        if table is not None and not isinstance(table, dict):
            raise CheckpointError(f"{CONFIG_NAME}: {key} is {table!r:.60}, expected an object.")
    merged: dict[str, Any] = {}
    for table in ({"rope_theta": config.get("rope_theta")}, old or {}, new or {}):
        for key, value in table.items():
            if key not in _ROPE_KEYS:
                raise UnsupportedError(
                    f"{CONFIG_NAME}: {key} is among the rotary settings and is not known here; it"
                    " will not be guessed at."
                )
            key = "rope_type" if key == "type" else key
            if value is not None and merged.setdefault(key, value) != value:
                raise CheckpointError(
                    f"{CONFIG_NAME}: {key} is {merged[key]!r:.40} in one place and {value!r:.40} in"
                    " another."
                )
    return merged


def _yarn(rope: dict[str, Any]) -> tuple[Yarn | None, float]:
    """YaRN, and the factor on the softmax scale: mscale(mscale_all_dim)², as in DeepSeek-V3.
    If mscale = mscale_all_dim, as in Kimi's configs, cosines and sines stay as they are."""
    kind = rope.get("rope_type", "default")
    if kind == "default":
        plain = rope.keys() - {"rope_theta", "rope_type"}
        if plain:
            raise UnsupportedError(
                f"{CONFIG_NAME}: {min(plain)} is set among rotary settings that say no rope_type."
            )
        return None, 1.0
    if kind != "yarn":
        raise UnsupportedError(f"{CONFIG_NAME}: rope_type is {kind!r:.60}, only 'yarn' is known.")
    factor, all_dim = real(rope, "factor"), real(rope, "mscale_all_dim", 0.0, least=0.0)
    yarn = Yarn(
        factor,
        positive(rope, "original_max_position_embeddings"),
        real(rope, "beta_fast", 32.0),
        real(rope, "beta_slow", 1.0),
        mscale(factor, real(rope, "mscale", 1.0, least=0.0)) / mscale(factor, all_dim),
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
