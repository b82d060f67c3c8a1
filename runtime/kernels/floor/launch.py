"""The launches that only read."""

from functools import cache

import torch
from torch import Tensor

from kconvert.runtime.kernels.gpu import gpu, launch
from kconvert.runtime.kernels.moe.launch import MoeWeights


@cache
def _sink(index: int) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=f"cuda:{index}")


@cache
def _first(index: int) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=f"cuda:{index}")


def read_experts(layer: MoeWeights, chosen: Tensor) -> None:
    """Only read the weights and scales of the experts in chosen int32 [C]: w13, then w2.

    Two launches that do not overlap, the least that two kernels over these bytes can take. Raises
    ValueError if an expert's tensor is not a multiple of 16 KiB.
    """
    sms = gpu(chosen.device.index).sms
    for blobs in ((layer.w13, layer.w13_scale), (layer.w2, layer.w2_scale)):
        sizes = [blob[0].numel() * blob.element_size() for blob in blobs]
        if any(size % 16384 for size in sizes):
            raise ValueError(f"expert tensors of {sizes} bytes are not multiples of 16384")
        pieces = [
            arg for blob, size in zip(blobs, sizes, strict=True) for arg in (blob, size // 16384)
        ]
        args = (*pieces, chosen, len(chosen), _sink(chosen.device.index))
        launch("floor/read", {}, (sms * 4,), 512, args, overlap=False)


def read_matrix(matrix: Tensor) -> None:
    """Only read a matrix, in one launch. Raises ValueError if it is not a multiple of 16 KiB."""
    index, size = matrix.device.index, matrix.numel() * matrix.element_size()
    if size % 16384:
        raise ValueError(f"{size} bytes are not a multiple of 16384")
    args = (matrix, size // 16384, matrix, 0, _first(index), 1, _sink(index))
    launch("floor/read", {}, (gpu(index).sms * 4,), 512, args, overlap=False)
