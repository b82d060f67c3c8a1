"""An outside opinion: the codes of a source matrix as the compressed-tensors library reads them."""

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.errors import said_if_slow
from kconvert.layouts.formats.compressed_tensors import PackQuantized
from kconvert.layouts.quantization import Quantization

DECODED = (PackQuantized.name,)  # the formats that the library knows and that have integers


def library_codes(quantization: Quantization, packed: NDArray[np.int32]) -> NDArray[np.int8]:
    """int32 [N, K·bits/32] → int8 [N, K], decoded by compressed-tensors; zero points not taken off,
    but for the middle of the codes' range."""
    with said_if_slow("loading compressed-tensors and torch, which decode the source's codes too"):
        import torch  # seconds to import, and only this check needs it
        from compressed_tensors.compressors import unpack_from_int32

    bits = quantization.bits
    shape = torch.Size((packed.shape[0], packed.shape[1] * 32 // bits))
    decoded: NDArray[np.int8] = unpack_from_int32(torch.from_numpy(packed), bits, shape).numpy()
    return decoded
