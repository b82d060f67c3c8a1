"""DeepSeek-V3's names and sizes, Kimi K2's among them: where every tensor belongs.

A name without a rule is refused: a tensor nobody placed is a tensor silently lost.
"""

import re
from typing import Any, NamedTuple

from kconvert.layouts.errors import UnsupportedError
from kconvert.layouts.fields import natural, positive, text_config
from kconvert.layouts.formats.compressed_tensors import read_quantization
from kconvert.layouts.sharding import MOST, ModelDims

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


class Location(NamedTuple):
    """Where a tensor belongs: `layer` N, or the `outer` or `vision` file; `order` within it."""

    group: str  # "layer", "expert", "outer", "vision"
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
