"""An outside opinion: the codes of a source matrix as the compressed-tensors library reads them."""

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.errors import said_if_slow


def library_codes(packed: NDArray[np.int32]) -> NDArray[np.int8]:
    """int32 [N, K/8] → int8 [N, K], decoded by compressed-tensors."""
    with said_if_slow("loading compressed-tensors and torch, which decode the source's codes too"):
        import torch  # seconds to import, and only this check needs it
        from compressed_tensors.compressors import unpack_from_int32

    shape = torch.Size((packed.shape[0], 8 * packed.shape[1]))
    decoded: NDArray[np.int8] = unpack_from_int32(torch.from_numpy(packed), 4, shape).numpy()
    return decoded
