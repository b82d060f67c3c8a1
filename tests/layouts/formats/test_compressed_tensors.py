"""What a quantization_config may say beside the quantization."""

import copy
import json
from typing import Any

import pytest
from kit import KIMI_MINI

from kconvert.layouts.errors import UnsupportedError
from kconvert.layouts.formats.known import find_quantization_config, read_format
from kconvert.layouts.quantization import Quantization

CONFIG = json.loads((KIMI_MINI / "config.json").read_text())
DENSE = {
    "format": "dense", "global_sparsity": 0.14, "ignore": [], "targets": [],
    "registry_requires_subclass": False, "sparsity_structure": "unstructured",
}  # fmt: skip


def read_with(key: str, value: Any) -> Quantization:
    config = copy.deepcopy(CONFIG)
    find_quantization_config(config)[key] = value
    return read_format(config).quantization


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("sparsity_config", value) for value in (None, {}, "dense", {"format": "dense"}, DENSE)),
        *(("transform_config", value) for value in (None, {}, {"config_groups": {}})),
    ],
)
def test_what_says_that_there_is_none(key: str, value: Any) -> None:
    assert read_with(key, value) == Quantization(32)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sparsity_config", {"format": "sparse-24-bitmask"}),
        ("sparsity_config", {**DENSE, "format": None}),
        ("sparsity_config", {**DENSE, "unheard_of": 1}),
        ("sparsity_config", "sparse"),
        ("transform_config", {"config_groups": {"u": {"type": "hadamard"}}}),
    ],
)
def test_what_says_that_there_is_one_is_refused(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedError, match=f"quantization_config.{key} is"):
        read_with(key, value)
