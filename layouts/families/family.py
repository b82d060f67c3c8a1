"""What a model family is: where tensors belong, the experts' sizes, what else there must be."""

import re
from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

from kconvert.layouts.errors import UnsupportedError
from kconvert.layouts.families.config_keys import UnknownKey
from kconvert.layouts.fields import CONFIG_NAME, text_config
from kconvert.layouts.formats.format import Format
from kconvert.layouts.formats.known import read_format
from kconvert.layouts.sharding import ModelDims

BUFFER = "buffer"  # the group of what is computed, not read
PROJ_NAMES = ("gate_proj", "up_proj", "down_proj")
W_NAMES = ("w1", "w3", "w2")
# The block of a layer that holds the experts → what gate, up and down are called there. Families
# share these schemes, and a family's exporters differ (Mixtral comes in the first two).
SPELLINGS: dict[str, tuple[str, str, str]] = {
    "mlp": PROJ_NAMES, "block_sparse_moe": W_NAMES, "ffn": W_NAMES, "feed_forward": PROJ_NAMES,
}  # fmt: skip
BLOCKS = tuple(SPELLINGS)
EXPERTS = ".experts."
SCHEMES = ", ".join(f"…layers.L.{block}.experts.E.{names[0]}" for block, names in SPELLINGS.items())
# Modules of a layer in the order a forward pass reads them, of all families. The last six are
# DeepSeek's MTP layer.
_LAYER_MODULES = (
    "input_layernorm",
    *(f"self_attn.{name}" for name in (
        "q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm",
        "kv_b_proj", "k_proj", "v_proj", "q_norm", "k_norm",
    )),
    "self_attn", "self_attn.o_proj",
    "post_attention_layernorm",
    *(f"{block}.{router}" for block in BLOCKS for router in ("gate", "router")),
    *BLOCKS,
    *(f"mlp.shared_experts.{name}" for name in PROJ_NAMES),
    *(f"mlp.{name}" for name in PROJ_NAMES),
    "embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head",
)  # fmt: skip
_PARAMETERS = (
    "weight", "bias", "e_score_correction_bias", "weight_packed", "weight_scale", "weight_shape",
    "weight_zero_point", "qweight", "scales", "qzeros", "g_idx", "sinks",
)  # fmt: skip
_LAYER_ORDER = {
    f"{module}.{parameter}": len(_PARAMETERS) * i + j
    for i, module in enumerate(_LAYER_MODULES)
    for j, parameter in enumerate(_PARAMETERS)
}
_LAST = len(_LAYER_ORDER)
_OUTER = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
_VISION = ("vision_tower.", "mm_projector.", "multi_modal_projector.", "visual.", "vision_model.")
_NUMBER = "(0|[1-9][0-9]{0,4})"  # one spelling a number: "01" is another name than "1"
_LAYER_NAME = re.compile(rf"(?:language_model\.)?(?:model\.)?layers\.{_NUMBER}\.(.+)")
_EXPERT_REST = re.compile(rf"({'|'.join(BLOCKS)})\.experts\.{_NUMBER}\.([a-z0-9_]+)\.([a-z_]+)")
_FUSED_REST = re.compile(r"mlp\.experts\.(?:gate_up_proj|down_proj)(_[a-z]+)")
_UNSUPPORTED = {
    "weight_zero_point": "asymmetric weights (zero points) cannot be converted if config.json does"
    " not declare them",
    "weight_g_idx": "act-order with g_idx (actorder group or dynamic) cannot be converted",
}


def projections(base: str) -> tuple[str, str, str]:
    """What gate, up and down are called in a layer whose experts' names begin with `base`, which
    ends in `experts.`"""
    return SPELLINGS[base.removesuffix(EXPERTS).rpartition(".")[2]]


class Location(NamedTuple):
    """Where a tensor belongs: `layer` N, or the `outer` or `vision` file; `order` within it."""

    group: str  # "layer", "expert", "fused", "outer", "vision" or BUFFER
    layer: int = -1
    expert: int = -1
    order: int = 0


class Stated(NamedTuple):
    """A module that the config implies: its weight's shape, and its parameters."""

    shape: tuple[int, ...]
    parameters: tuple[str, ...] = ("weight",)  # required
    optional: bool = False  # a checkpoint may lack it


def mlp_modules(name: str, size: int, hidden: int) -> dict[str, Stated]:
    """The three projections of a gated MLP called `name`, with `size` intermediate rows."""
    shapes = (size, hidden), (size, hidden), (hidden, size)
    return {
        f"{name}.{projection}": Stated(shape)
        for projection, shape in zip(PROJ_NAMES, shapes, strict=True)
    }


def mtp_modules(vocabulary: int, hidden: int) -> dict[str, Stated]:
    """What DeepSeek's multi-token prediction adds to a layer. Its embedding and head are often
    missing, as they are the model's own."""
    table, norm = (vocabulary, hidden), Stated((hidden,))
    return {
        "embed_tokens": Stated(table, optional=True), "enorm": norm, "hnorm": norm,
        "eh_proj": Stated((hidden, 2 * hidden)), "shared_head.norm": norm,
        "shared_head.head": Stated(table, optional=True),
    }  # fmt: skip


class Family(ABC):
    """A family's names and sizes, as one config.json has them."""

    architectures: ClassVar[tuple[str, ...]] = ()
    model_types: ClassVar[tuple[str, ...]] = ()
    # Whether `stated` lists every tensor, so that a missing or surplus one is refused by name. If
    # not, every tensor that is not an expert's is kept whole.
    complete: ClassVar[bool] = True
    fused: ClassVar[bool] = False  # whether its experts may lie in one tensor (`Format.fused`)

    def __init__(self, config: dict[str, Any]) -> None:
        """Raises CheckpointError or UnsupportedError naming the key of `config` at fault."""
        self.format: Format = read_format(config)
        if self.format.fused and not self.fused:
            raise UnsupportedError(
                f"{CONFIG_NAME}: quant_method mxfp4 is known for gpt-oss alone, where rows of gate"
                " and up alternate: another model's order is not known; the same model in"
                " llm-compressor's MXFP4 (mxfp4-pack-quantized) can be converted."
            )
        self.dims: ModelDims = self._read(text_config(config))

    @abstractmethod
    def _read(self, config: dict[str, Any]) -> ModelDims:
        """The sizes in the text model's config."""

    @abstractmethod
    def stated(self, layer: int | None, block: str) -> dict[str, Stated]:
        """The modules of a layer (None: embedding, norm and head) except the routed experts, by
        their names after `model.layers.N.` (or the prefix). `block` is what the layer calls its
        MLP."""

    @property
    def warnings(self) -> list[str]:
        """Sentences on what is not known about the model."""
        return []

    def locate(self, name: str) -> Location:
        """The place of the tensor called `name`; UnsupportedError if no rule covers it."""
        match = _LAYER_NAME.fullmatch(name)
        if match:
            layer, rest = int(match[1]), match[2]
            if EXPERTS in f".{rest}":
                return self._expert(name, layer, rest)
            order = _LAYER_ORDER.get(rest)
            if order is not None or not self.complete:
                return Location("layer", layer, order=_LAST if order is None else order)
            if rest == "self_attn.rotary_emb.inv_freq":
                return Location(BUFFER)
        elif name.startswith(_VISION):
            return Location("vision")
        else:
            bare = name.removeprefix("language_model.")
            if bare in _OUTER:
                return Location("outer", order=_OUTER.index(bare))
            if not self.complete:
                return Location("outer", order=len(_OUTER))
        raise _no_rule(name)

    def _expert(self, name: str, layer: int, rest: str) -> Location:
        match = _EXPERT_REST.fullmatch(rest)
        if match and match[3] not in SPELLINGS[match[1]]:
            match = None
        if match and match[4] in self.format.roles and not self.format.fused:
            return Location("expert", layer, int(match[2]))
        fused = _FUSED_REST.fullmatch(rest)
        if fused and fused[1] in self.format.roles:
            return Location("fused", layer)
        companion = name.rpartition(".")[2]
        if match and companion == "weight":
            raise UnsupportedError(
                f"tensor {name}: this expert is not quantized, {self.format.name} is expected"
                f" ({CONFIG_NAME})."
            )
        if companion in _UNSUPPORTED:
            raise UnsupportedError(f"tensor {name}: {_UNSUPPORTED[companion]}.")
        if match:
            raise UnsupportedError(
                f"tensor {name}: not one of {self.format.name}'s ({CONFIG_NAME}), which are"
                f" {', '.join(self.format.roles)}."
            )
        raise _no_rule(name)


def _no_rule(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"tensor {name}: no sharding rule covers this name; known are experts called {SCHEMES}, and"
        " the family's other tensors."
    )


def unknown_architecture(
    table: dict[str, Any], prefix: str, family: type[Family]
) -> list[UnknownKey]:
    """`architectures` and `model_type` of a config if they are not the family's."""
    unknown = []
    for key, names in (("architectures", family.architectures), ("model_type", family.model_types)):
        value = table.get(key)
        values = value if isinstance(value, list) else [value]
        if value is not None and any(name not in names for name in values):
            unknown.append(UnknownKey(f"{prefix}{key}", value))
    return unknown
