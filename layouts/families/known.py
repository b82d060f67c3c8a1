"""The families by what a config.json calls them."""

from typing import Any

from kconvert.layouts.families import deepseek_v3
from kconvert.layouts.families.config_keys import UnknownKey
from kconvert.layouts.families.deepseek_v3 import DeepSeekV3
from kconvert.layouts.families.family import Family
from kconvert.layouts.families.glm4_moe import Glm4Moe
from kconvert.layouts.families.gpt_oss import GptOss
from kconvert.layouts.families.kimi_k3 import KimiK3
from kconvert.layouts.families.minimax_m2 import MiniMaxM2
from kconvert.layouts.families.mixtral import Mixtral
from kconvert.layouts.families.other import Other
from kconvert.layouts.families.qwen3_moe import Qwen3Moe
from kconvert.layouts.fields import text_config

FAMILIES: tuple[type[Family], ...] = (
    DeepSeekV3, KimiK3, Qwen3Moe, Mixtral, Glm4Moe, MiniMaxM2, GptOss,
)  # fmt: skip


def read_family(config: dict[str, Any]) -> Family:
    """The family of a config.json, with its sizes and format.

    Raises CheckpointError or UnsupportedError naming the key at fault.
    """
    return family_of(config)(config)


def unknown_config_keys(config: dict[str, Any]) -> list[UnknownKey]:
    """The keys of a config.json that are not known here. Only for the family that the engine runs:
    nothing is computed for the others."""
    return deepseek_v3.unknown_config_keys(config) if family_of(config) is DeepSeekV3 else []


def family_of(config: dict[str, Any]) -> type[Family]:
    """The family that a config.json belongs to."""
    text = text_config(config)
    for table in (text, config):
        names = table.get("architectures")
        said = [table.get("model_type"), *(names if isinstance(names, list) else [names])]
        for family in FAMILIES:
            if any(name in (*family.model_types, *family.architectures) for name in said):
                return family
    # MLA under another name: what is not DeepSeek's about it shows in its tensors.
    like_deepseek = text.get("kv_lora_rank") is not None or not text.get("model_type")
    return DeepSeekV3 if like_deepseek else Other
