"""Who owns what: the place of every tensor name, and the slice of each expert a rank holds.

The routed experts are cut; everything else stays whole (DESIGN.md, Parallelism). A name without
a rule is refused: a tensor nobody placed is a tensor silently lost.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from kconvert.layouts.checkpoint import natural, positive, text_config
from kconvert.layouts.compressed_tensors import Quantization, read_quantization
from kconvert.layouts.errors import UnsupportedError

MOST = 10_000  # layers, experts, ranks: more is a damaged file or a slip of the finger
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
_NUMBER = "(0|[1-9][0-9]{0,4})"  # one spelling a number: "01" is another name than "1"
_LAYER_NAME = re.compile(rf"(?:language_model\.)?model\.layers\.{_NUMBER}\.(.+)")
_EXPERT_NAME = re.compile(
    rf"(?:language_model\.)?model\.layers\.{_NUMBER}\.mlp\.experts\.{_NUMBER}\."
    r"(gate_proj|up_proj|down_proj)\.(weight_packed|weight_scale|weight_shape)"
)
_UNSUPPORTED = {
    "weight_zero_point": "asymmetric weights (zero points) cannot be converted",
    "weight_g_idx": "act-order with g_idx (actorder group or dynamic) cannot be converted",
}


class Place(NamedTuple):
    """Where a tensor belongs: `layer` N, or the `outer` or `vision` file; `order` within it."""

    group: str  # "layer", "expert", "outer", "vision"
    layer: int = -1
    expert: int = -1
    order: int = 0


class ModelDims(NamedTuple):
    """The sizes of a model that sharding depends on."""

    layers: int
    mtp_layers: int  # DeepSeek's, numbered behind the others; a checkpoint may lack them
    first_moe: int  # layers below are dense
    experts: int
    hidden: int
    intermediate: int  # of one routed expert
    quantization: Quantization


class Parallelism(NamedTuple):
    """World size `tp`; `ep` divides it; each expert is cut over tp/ep ranks."""

    tp: int = 1
    ep: int = 1

    @property
    def moe_tp(self) -> int:
        """How many ranks share one expert."""
        return self.tp // self.ep


class RankSlice(NamedTuple):
    """What a rank holds of every MoE layer: whole experts, of each the same intermediate rows."""

    experts: range
    rows: range  # of gate and up; the same columns of down


def place(name: str) -> Place:
    """The place of the tensor called `name`; UnsupportedError where no rule covers it."""
    found = _EXPERT_NAME.fullmatch(name)
    if found:
        return Place("expert", int(found[1]), int(found[2]))
    found = _LAYER_NAME.fullmatch(name)
    if found:
        order = _LAYER_ORDER.get(found[2])
        if order is not None:
            return Place("layer", int(found[1]), order=order)
    elif name.startswith(_VISION):
        return Place("vision")
    else:
        bare = name.removeprefix("language_model.")
        if bare in _OUTER:
            return Place("outer", order=_OUTER.index(bare))
    if ".mlp.experts." in name and name.endswith("_proj.weight"):
        raise UnsupportedError(f"tensor {name}: this expert is not quantised, INT4 is expected.")
    reason = _UNSUPPORTED.get(
        name.rpartition(".")[2],
        "no sharding rule covers that name; known are DeepSeek-V3-style text models, Kimi's among"
        " them",
    )
    raise UnsupportedError(f"tensor {name}: {reason}.")


def expert_base(prefix: str, expert: int, projection: str) -> str:
    """The name of an expert's projection up to its last dot; `prefix` ends in `experts.`"""
    return f"{prefix}{expert}.{projection}."


def stacked_names(prefix: str) -> tuple[str, str, str, str]:
    """The four tensors that a layer's experts become; `prefix` ends in `experts.`"""
    return (
        f"{prefix}w13_weight_packed",
        f"{prefix}w13_weight_scale",
        f"{prefix}w2_weight_packed",
        f"{prefix}w2_weight_scale",
    )


def model_dims(whole_config: dict[str, Any]) -> ModelDims:
    """The sizes in a config.json; CheckpointError or UnsupportedError naming the key."""
    config = text_config(whole_config)
    if config.get("n_routed_experts") is None:
        raise UnsupportedError(
            "config.json has no n_routed_experts: known are DeepSeek-V3-style text models,"
            " Kimi's among them."
        )
    if natural(config, "moe_layer_freq", 1) != 1:
        raise UnsupportedError(
            f"config.json: moe_layer_freq is {config['moe_layer_freq']}, only 1 is known."
        )
    return ModelDims(
        positive(config, "num_hidden_layers", MOST),
        natural(config, "num_nextn_predict_layers", 0, MOST),
        natural(config, "first_k_dense_replace", 0, MOST),
        positive(config, "n_routed_experts", MOST),
        positive(config, "hidden_size"),
        positive(config, "moe_intermediate_size"),
        read_quantization(whole_config),
    )


def rank_slice(dims: ModelDims, parallelism: Parallelism, rank: int) -> RankSlice:
    """What `rank` holds: ep_rank = rank div moe_tp of the experts, rank mod moe_tp of the rows."""
    moe_tp_rank = rank % parallelism.moe_tp
    rows = dims.intermediate // parallelism.moe_tp
    return RankSlice(
        rank_experts(dims.experts, parallelism, rank),
        range(moe_tp_rank * rows, (moe_tp_rank + 1) * rows),
    )


def rank_experts(experts: int, parallelism: Parallelism, rank: int) -> range:
    """The routed experts of which `rank` holds a part."""
    ep_rank, part = rank // parallelism.moe_tp, experts // parallelism.ep
    return range(ep_rank * part, (ep_rank + 1) * part)


def check_parallelism(
    dims: ModelDims, parallelism: Parallelism, constraint: Callable[[int, int], str | None]
) -> None:
    """Raise UnsupportedError, with the sizes and what would work, where a cut is impossible.

    `constraint(n, k)` is the layout's reason against a matrix [n, k], or None.
    """
    problem = _problem(dims, parallelism, constraint)
    if problem is None:
        return
    same_tp = [Parallelism(parallelism.tp, ep) for ep in range(1, min(parallelism.tp, MOST) + 1)]
    other_tp = [Parallelism(1 << i) for i in range(8)]
    fits = [f"--tp {p.tp} --ep {p.ep}" for p in same_tp if not _problem(dims, p, constraint)]
    fits = fits or [f"--tp {p.tp}" for p in other_tp if not _problem(dims, p, constraint)]
    advice = f"; what works: {', '.join(fits)}" if fits else "; no parallelism would do"
    raise UnsupportedError(f"--tp {parallelism.tp} --ep {parallelism.ep}: {problem}{advice}.")


def _problem(
    dims: ModelDims, parallelism: Parallelism, constraint: Callable[[int, int], str | None]
) -> str | None:
    tp, ep = parallelism
    if not (1 <= tp <= MOST and 1 <= ep <= MOST):
        return f"both must be 1 to {MOST:,}"
    if tp % ep:
        return f"ep {ep} does not divide tp {tp}"
    if dims.experts % ep:
        return f"{dims.experts} experts do not divide over ep {ep}"
    moe_tp = parallelism.moe_tp
    if dims.intermediate % moe_tp:
        return f"{dims.intermediate} rows an expert do not divide over {moe_tp} ranks"
    rows = dims.intermediate // moe_tp
    sliced = f"an expert's {dims.intermediate} rows over {moe_tp} ranks are {rows} a rank, and"
    group = dims.quantization.group_size
    if group and (rows % group or dims.hidden % group):
        return f"{sliced} a quantisation group of {group} would be cut"
    for n, k in ((rows, dims.hidden), (dims.hidden, rows)):
        reason = constraint(n, k)
        if reason:
            return f"{sliced} {reason}"
    return None
