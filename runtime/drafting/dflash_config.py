"""What a DFlash drafter's config.json says: sizes, windows, RoPE, and which target it is for.

The format is that of z-lab's Hugging Face folders. Settings that change the result and are unknown
here are refused by name.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from kconvert.layouts.checkpoint import read_json
from kconvert.layouts.errors import CheckpointError, UnsupportedError
from kconvert.layouts.fields import CONFIG_NAME, flag, natural, positive, real
from kconvert.runtime.rope import Yarn, mscale

ARCHITECTURE = "DFlashDraftModel"
WEIGHT_DTYPES = ("F32", "BF16", "F16")
# Settings of later drafters that change the result → the values that do not.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "attention_mode": ("gqa",),
    "attention_sink_bias": (False,),
    "final_logit_softcapping": (0, 0.0),
    "hidden_act": ("silu",),
    "input_embedding_scale": (1, 1.0),
    "output_multiplier": (1, 1.0),
    "partial_rotary_factor": (1, 1.0),
}


class TargetDims(NamedTuple):
    """What a drafter and its target must agree on."""

    hidden: int
    vocabulary: int
    layers: int


@dataclass(frozen=True)
class DrafterConfig:
    """A drafter's config.json, checked."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    eps: float
    rope_theta: float
    yarn: Yarn | None
    block: int  # tokens of a draft, the anchor included
    mask_token: int
    target_layers: int  # of the target it was trained for; 0 if the config does not say
    target_layer_ids: tuple[int, ...]  # the target's layers whose outputs are its context, in order
    windows: tuple[int | None, ...]  # a layer's window: it reads keys at |distance| < window
    causal: tuple[bool, ...]  # whether rows of a layer's block do not read later rows

    @classmethod
    def read(
        cls, folder: Path, attention_factor: float | None = None, causal_windows: bool = False
    ) -> Self:
        """Read and check folder/config.json; the options are `from_json`'s.

        Raises CheckpointError for values that are not valid, UnsupportedError for another kind of
        drafter.
        """
        config = read_json(folder / CONFIG_NAME)
        try:
            return cls.from_json(config, attention_factor, causal_windows)
        except (CheckpointError, UnsupportedError) as error:
            raise type(error)(f"the drafter in {folder}, {error}") from None

    @classmethod
    def from_json(
        cls,
        config: dict[str, Any],
        attention_factor: float | None = None,
        causal_windows: bool = False,
    ) -> Self:
        """Check a parsed config.json.

        `attention_factor` is used instead of YaRN's own. `causal_windows` makes layers with a
        window causal inside the block if the config does not say whether they are. Drafters differ,
        and their configs rarely say (the reference changed its rule; in vLLM they are causal).
        """
        draft = config.get("dflash_config") or {}
        if not isinstance(draft, dict):
            raise CheckpointError(f"{CONFIG_NAME}: dflash_config is not an object.")
        config = {**config, **draft}  # the reference looks there first
        _check_kind(config)
        layers = positive(config, "num_hidden_layers", 1000)
        windows = _windows(config, layers)
        hidden, heads = (positive(config, key) for key in ("hidden_size", "num_attention_heads"))
        if "head_dim" not in config and hidden % heads == 0:
            config["head_dim"] = hidden // heads
        causal = flag(config, "causal", flag(config, "is_causal", None))
        parsed = cls(
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=positive(config, "num_key_value_heads"),
            head_dim=positive(config, "head_dim"),
            intermediate=positive(config, "intermediate_size"),
            vocabulary=positive(config, "vocab_size"),
            eps=real(config, "rms_norm_eps"),
            rope_theta=real(_rope(config), "rope_theta", least=1.01),
            yarn=_yarn(config, attention_factor),
            block=positive(config, "block_size", 1 << 10),
            mask_token=_token(config, "mask_token_id"),
            target_layers=natural(config, "num_target_layers", 0),
            target_layer_ids=_layer_ids(config),
            windows=windows,
            causal=tuple(
                causal_windows and window is not None if causal is None else causal
                for window in windows
            ),
        )
        if parsed.block < 2:
            raise CheckpointError(f"{CONFIG_NAME}: block_size 1 leaves no token to draft.")
        if parsed.heads % parsed.kv_heads or parsed.head_dim % 2:
            raise CheckpointError(
                f"{CONFIG_NAME}: {parsed.heads} heads of {parsed.head_dim} over"
                f" {parsed.kv_heads} key/value heads: expected an even size and a multiple."
            )
        return parsed

    @property
    def features(self) -> int:
        """Width of a context row: the chosen target layers' outputs side by side."""
        return len(self.target_layer_ids) * self.hidden

    def check_target(self, target: TargetDims) -> None:
        """Raise UnsupportedError unless the drafter is one for `target`."""
        for what, ours, theirs in (
            ("hidden_size", self.hidden, target.hidden),
            ("vocab_size", self.vocabulary, target.vocabulary),
            ("num_target_layers", self.target_layers or target.layers, target.layers),
        ):
            if ours != theirs:
                raise UnsupportedError(
                    f"the drafter is for another target: its {what} is {ours:,}, the target's"
                    f" {theirs:,}."
                )
        if max(self.target_layer_ids) >= target.layers:
            raise UnsupportedError(
                f"the drafter is for another target: it reads layer {max(self.target_layer_ids)},"
                f" the target has {target.layers}."
            )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of the drafter's file."""
        h, d = self.hidden, self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (h, self.features),
            "hidden_norm.weight": (h,),
            "norm.weight": (h,),
        }
        for layer in range(self.layers):
            for name, shape in (
                ("input_layernorm", (h,)),
                ("self_attn.q_proj", (self.heads * d, h)),
                ("self_attn.k_proj", (self.kv_heads * d, h)),
                ("self_attn.v_proj", (self.kv_heads * d, h)),
                ("self_attn.o_proj", (h, self.heads * d)),
                ("self_attn.q_norm", (d,)),
                ("self_attn.k_norm", (d,)),
                ("post_attention_layernorm", (h,)),
                ("mlp.gate_proj", (self.intermediate, h)),
                ("mlp.up_proj", (self.intermediate, h)),
                ("mlp.down_proj", (h, self.intermediate)),
            ):
                shapes[f"layers.{layer}.{name}.weight"] = shape
        return shapes


def _check_kind(config: dict[str, Any]) -> None:
    for key, expected in (("architectures", [ARCHITECTURE]), ("model_type", "qwen3")):
        if config.get(key) != expected:
            raise UnsupportedError(
                f"{CONFIG_NAME}: {key} is {config.get(key)!r:.60}, expected {expected!r}: no other"
                " drafter can be run."
            )
    for key, neutral in _NEUTRAL.items():
        value = config.get(key)
        if value is not None and value not in neutral:
            raise UnsupportedError(
                f"{CONFIG_NAME}: {key} is {value!r:.60}, only {neutral[0]!r} can be run."
            )


def _token(config: dict[str, Any], key: str) -> int:
    value, vocab = config.get(key), positive(config, "vocab_size")
    if type(value) is not int or not 0 <= value < vocab:
        raise CheckpointError(
            f"{CONFIG_NAME}: {key} is {value!r:.60}, expected a token of the {vocab:,} in"
            " vocab_size."
        )
    return value


def _layer_ids(config: dict[str, Any]) -> tuple[int, ...]:
    ids = config.get("target_layer_ids")
    layers = natural(config, "num_target_layers", 0) or 1 << 31
    if (
        not isinstance(ids, list)
        or not ids
        or not all(type(layer) is int and 0 <= layer < layers for layer in ids)
        or len(set(ids)) != len(ids)
    ):
        raise CheckpointError(
            f"{CONFIG_NAME}: target_layer_ids is {ids!r:.80}, expected different layers below"
            f" num_target_layers, {config.get('num_target_layers')}."
        )
    return tuple(ids)


def _windows(config: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    """A layer's window by layer_types, or by max_window_layers if there are none."""
    used = flag(config, "use_sliding_window", config.get("sliding_window") is not None)
    window = positive(config, "sliding_window") if used else None
    kinds = config.get("layer_types")
    if kinds is None:
        full = layers if window is None else positive(config, "max_window_layers")
        return tuple(None if layer < full else window for layer in range(layers))
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in known for k in kinds):
        raise CheckpointError(
            f"{CONFIG_NAME}: layer_types is {kinds!r:.80}, expected one of {' and '.join(known)}"
            f" for each of the {layers} layers."
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary settings; transformers 5 writes them all in rope_parameters, 4 in two places."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise CheckpointError(f"{CONFIG_NAME}: rope_scaling is not an object.")
    return {
        "rope_theta": config.get("rope_theta"),
        "original_max_position_embeddings": config.get("max_position_embeddings"),
        **rope,
    }


def _yarn(config: dict[str, Any], attention_factor: float | None) -> Yarn | None:
    rope = _rope(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise UnsupportedError(f"{CONFIG_NAME}: rope_type is {kind!r:.60}, only 'yarn' can be run.")
    factor = real(rope, "factor")
    # transformers' rule: mscale ÷ mscale_all_dim if both are given, else as if they were 1 and 0.
    over, under = 1.0, 0.0
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        over, under = real(rope, "mscale"), real(rope, "mscale_all_dim")
    if attention_factor is not None:
        rope["attention_factor"] = attention_factor
    return Yarn(
        factor=factor,
        original_positions=positive(rope, "original_max_position_embeddings"),
        beta_fast=real(rope, "beta_fast", 32.0),
        beta_slow=real(rope, "beta_slow", 1.0),
        truncate=flag(rope, "truncate", True) is not False,
        amplitude=real(rope, "attention_factor", mscale(factor, over) / mscale(factor, under)),
    )
