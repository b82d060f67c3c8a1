"""The launch of the plain product."""

import torch
from torch import Tensor

from kconvert.runtime.kernels.gpu import launch


def w4a16_rows(x: Tensor, expert: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """The simple reference product: x bf16 [R, k], expert int32 [R] -> float32 [R, n].

    packed int32 [E, n, k/8], scales bf16 [E, n, k/g] in the checkpoint's order. A row whose expert
    is negative is not computed and comes back as zeros.
    """
    rows, k = x.shape
    n = packed.shape[1]
    y = torch.zeros(rows, n, dtype=torch.float32, device=x.device)
    args = (x, expert, packed, scales, y, n, k, k // scales.shape[2])
    launch("w4a16/rows", {}, (-(-n // 128), rows), 128, args)
    return y
