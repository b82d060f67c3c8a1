"""The formats, by what a quantization_config calls them."""

from collections.abc import Callable
from typing import Any

from kconvert.layouts.errors import CheckpointError, UnsupportedError
from kconvert.layouts.fields import CONFIG_NAME, text_config
from kconvert.layouts.formats.compressed_tensors import read_compressed_tensors
from kconvert.layouts.formats.format import Format
from kconvert.layouts.formats.gptq import read_gptq
from kconvert.layouts.formats.mxfp4 import read_gpt_oss, refuse_nvfp4

# quant_method → what reads its table.
_READERS: dict[str, Callable[[dict[str, Any]], Format]] = {
    "compressed-tensors": read_compressed_tensors,
    "gptq": read_gptq,
    "mxfp4": read_gpt_oss,
}
# quant_method → why it is not converted, and what is.
_REFUSED = {
    "awq": "AWQ packs columns in an order of its own, which is not converted; the same model by"
    " GPTQ, or by llm-compressor as pack-quantized, can be",
    "fp8": "FP8 is not packed any further by the engines, so there is nothing to convert",
}


def read_format(config: dict[str, Any]) -> Format:
    """The format that `config` (a whole config.json) declares.

    Raises CheckpointError if it is malformed, UnsupportedError naming the field if it cannot
    be converted.
    """
    table = find_quantization_config(config)
    method = table.get("quant_method")
    if isinstance(method, str) and method in _READERS:
        return _READERS[method](table)
    if "nvfp4" in str(method).lower() or "nvfp4" in str(table.get("quant_algo")).lower():
        raise refuse_nvfp4(f"quant_method is {method!r:.60}")
    reason = _REFUSED.get(str(method).lower())
    raise UnsupportedError(
        f"{CONFIG_NAME}: quant_method is {method!r:.60}: "
        + (f"{reason}." if reason else f"known are {', '.join(_READERS)}.")
    )


def find_quantization_config(config: dict[str, Any]) -> dict[str, Any]:
    """The quantization_config at the first of its three places (the order engines look in)."""
    places = (
        config.get("quantization_config"),
        text_config(config).get("quantization_config"),
        config.get("compression_config"),
    )
    for table in places:
        if table is not None:
            if not isinstance(table, dict):
                raise CheckpointError(f"{CONFIG_NAME}: quantization_config is not an object.")
            return table
    raise UnsupportedError(
        f"{CONFIG_NAME} has no quantization_config (nor text_config.quantization_config,"
        " nor compression_config): only quantized checkpoints can be converted."
    )
