"""An outside opinion: the codes of a source matrix as the compressed-tensors library reads them."""

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.errors import said_if_slow
from kconvert.layouts.formats.compressed_tensors import PackQuantized
from kconvert.layouts.formats.mxfp4 import PackedMxfp4
from kconvert.layouts.quantization import Quantization

DECODED = (PackQuantized.name, PackedMxfp4.name)  # the formats that the library knows


def library_codes(quantization: Quantization, packed: NDArray[np.int32]) -> NDArray[np.int8]:
    """Plain words int32 [N, K·bits/32] → int8 [N, K], decoded by compressed-tensors: codes less the
    middle of their range; for MXFP4, twice their values."""
    with said_if_slow("loading compressed-tensors and torch, which decode the source's codes too"):
        import torch  # seconds to import, and only this check needs it
        from compressed_tensors.compressors import unpack_fp4_from_uint8, unpack_from_int32

    if quantization.scheme == "mxfp4":
        n, k = len(packed), 8 * packed.shape[1]
        values = unpack_fp4_from_uint8(torch.from_numpy(packed.view(np.uint8)), n, k, torch.float32)
        doubled: NDArray[np.int8] = (2 * values).to(torch.int8).numpy()
        return doubled
    bits = quantization.bits
    shape = torch.Size((packed.shape[0], packed.shape[1] * 32 // bits))
    decoded: NDArray[np.int8] = unpack_from_int32(torch.from_numpy(packed), bits, shape).numpy()
    return decoded
