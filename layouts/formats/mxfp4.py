"""MXFP4: codes of 4-bit floats (E2M1), 32 columns a scale byte (E8M0: 2^(byte − 127)).

Byte b of a row holds the columns 2b (low nibble) and 2b + 1, so that four bytes read as one
little-endian int32 are a plain word. Scales stay bytes: through a float some would be lost.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.checkpoint import SourceTensor
from kconvert.layouts.errors import UnsupportedError
from kconvert.layouts.experts import Projection
from kconvert.layouts.fields import ANY, CONFIG_NAME, check_fields
from kconvert.layouts.formats.format import Format, Kind, Take
from kconvert.layouts.quantization import Quantization, Role

GROUP_SIZE = 32
_BYTES, _E8M0 = ("U8", "I8"), ("U8", "F8_E8M0")  # the same bytes, whatever they are called


class PackedMxfp4(Format):
    """compressed-tensors `mxfp4-pack-quantized`: weight_packed U8 [N, K/2], weight_scale U8
    [N, K/32], and no weight_shape."""

    name = "mxfp4-pack-quantized"
    restores = True
    quantization = Quantization(GROUP_SIZE, scheme="mxfp4")
    roles: Mapping[str, Role | None] = {"weight_packed": "code", "weight_scale": "scale"}

    def kinds(self, n: int, k: int) -> dict[str, Kind]:
        return {
            "weight_packed": Kind(_BYTES, (n, k // 2)),
            "weight_scale": Kind(_E8M0, (n, k // GROUP_SIZE)),
        }

    def plain(
        self,
        projection: Projection,
        role: Role,
        tensor: SourceTensor,
        stored: NDArray[Any],
        take: Take,
    ) -> NDArray[Any]:
        return stored.view(np.int32) if role == "code" else stored

    def check_dropped(self, tensor: SourceTensor, stored: NDArray[Any], n: int, k: int) -> None:
        """No companion is dropped."""


class GptOssBlocks(Format):
    """gpt-oss: `gate_up_proj` and `down_proj`, each with all E experts: `_blocks` U8
    [E, N, K/32, 16], `_scales` U8 [E, N, K/32], `_bias` BF16 [E, N]. Rows of gate and up alternate,
    gate first."""

    name = "mxfp4"
    quantization = Quantization(GROUP_SIZE, scheme="mxfp4", bias=True)
    roles: Mapping[str, Role | None] = {
        "_blocks": "code",
        "_scales": "scale",
        "_bias": "bias",
    }
    fused = True

    def kinds(self, n: int, k: int) -> dict[str, Kind]:
        return {
            "_blocks": Kind(("U8",), (n, k // GROUP_SIZE, GROUP_SIZE // 2)),
            "_scales": Kind(_E8M0, (n, k // GROUP_SIZE)),
            "_bias": Kind(("BF16",), (n,)),
        }

    def plain(
        self,
        projection: Projection,
        role: Role,
        tensor: SourceTensor,
        stored: NDArray[Any],
        take: Take,
    ) -> NDArray[Any]:
        if role == "code":
            stored = stored.reshape(len(stored), -1).view(np.int32)
        return stored if projection == "down" else stored[("gate", "up").index(projection) :: 2]

    def check_dropped(self, tensor: SourceTensor, stored: NDArray[Any], n: int, k: int) -> None:
        """No companion is dropped."""


def read_gpt_oss(table: dict[str, Any]) -> GptOssBlocks:
    """The format of a quantization_config with quant_method mxfp4.

    Raises UnsupportedError naming a field that is not known.
    """
    check_fields("quantization_config", table, {"quant_method": ANY, "modules_to_not_convert": ANY})
    return GptOssBlocks()


def refuse_nvfp4(where: str) -> UnsupportedError:
    """Why NVFP4 is not converted, and what is."""
    return UnsupportedError(
        f"{CONFIG_NAME}: {where}: NVFP4 cannot be converted, as its kernels rescale a layer's"
        " scales by a factor common to all experts of a rank; the same model in MXFP4 or INT4 can."
    )
