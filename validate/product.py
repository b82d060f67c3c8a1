"""A second opinion on a layout's inverse: a product whose codes and scales are read as a GPU kernel
reads them, from the fragments of its matrix instruction, and not by the layout's formulas.

Sources: the fragments of `mma.m16n8k16` (PTX ISA, Matrix Fragments for mma.m16n8k16 with floating
point type): a lane holds of B k = 2·(lane mod 4) + {0, 1} and those + 8, at n = lane div 4; of the
sum, n = 2·(lane mod 4) + {0, 1}. And the order in which vLLM's Marlin takes a word apart: the
fields of k and k + 8 side by side, that of k + 1 half a word further.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.layout import Layout
from kconvert.layouts.marlin import Marlin
from kconvert.layouts.numba_jit import jit
from kconvert.layouts.quantization import Quantization, factors, integers, meaning
from kconvert.layouts.scan import widened

_ROWS = 128  # unpacked at once
_WARP = 32


def read_in_order(layout: Layout) -> bool:
    """Whether the kernels of a layout have an order of their own."""
    return layout.name in _SUMS


def products_agree(
    layout: Layout, codes: NDArray[np.int32], scales: NDArray[Any], dtype: str, seed: int
) -> bool:
    """Whether the stored codes and scales of a matrix [N, K], read in the kernels' order, times K
    whole numbers give the same as what the layout's inverse unpacks. This is done group by group,
    so nothing is rounded: the sums are integers, each times one scale in float64. Zero points and
    biases are left out."""
    quantization = layout.quantization._replace(zero_point=False)
    words = layout.unpack("code", codes)
    columns = words.shape[1] * 32 // quantization.bits
    numbers = np.random.default_rng(seed).integers(-99, 100, columns, np.int32)
    plain = _scaled(
        _plain_sums(quantization, words, numbers, scales.shape[0]),
        layout.unpack("scale", scales), quantization, dtype,
    )  # fmt: skip
    sums, order = _SUMS[layout.name], _SCALES[layout.name]
    ordered = np.empty((len(words), scales.shape[0]), scales.dtype)
    ordered[order(len(words), scales.shape[0], quantization)] = scales.T
    read = _scaled(sums(quantization, codes, numbers, scales.shape[0]), ordered,
                   quantization, dtype)  # fmt: skip
    return np.array_equal(read, plain, equal_nan=True)


def _scaled(
    sums: NDArray[np.int64], scales: NDArray[Any], quantization: Quantization, dtype: str
) -> NDArray[np.float64]:
    """[N, G] of both: each sum times its scale."""
    mxfp4 = quantization.scheme == "mxfp4"
    wide = factors(quantization, scales) if mxfp4 else widened(scales, dtype)
    with np.errstate(invalid="ignore"):  # infinity times 0
        product = np.multiply(sums, wide, dtype=np.float64)
    return product


def _plain_sums(
    quantization: Quantization, words: NDArray[np.int32], numbers: NDArray[np.int32], groups: int
) -> NDArray[np.int64]:
    sums = np.empty((len(words), groups), np.int64)
    for row in range(0, len(words), _ROWS):
        rows = integers(quantization, words[row : row + _ROWS]) * numbers
        rows.reshape(len(rows), groups, -1).sum(axis=2, out=sums[row : row + _ROWS])
    return sums


def _marlin_sums(
    quantization: Quantization, codes: NDArray[np.int32], numbers: NDArray[np.int32], groups: int
) -> NDArray[np.int64]:
    bits = quantization.bits
    sums = np.zeros((codes.shape[1] * 2 // bits, groups), np.int64)
    every = meaning(quantization, np.arange(1 << bits, dtype=np.uint8))
    _multiply(codes.view(np.uint32), bits, every, numbers, sums)
    return sums


@jit
def _multiply(codes, bits, integers, numbers, sums):  # type: ignore[no-untyped-def]
    """A warp at a time takes 16 k × 64 n: a lane as many neighboring words as codes have bits."""
    fields, group = 32 // bits, len(numbers) // sums.shape[1]
    mask = np.uint32((1 << bits) - 1)
    for k_tile in range(codes.shape[0]):
        for warp in range(codes.shape[1] // (_WARP * bits)):
            for lane in range(_WARP):
                for j in range(bits):
                    word = codes[k_tile, (warp * _WARP + lane) * bits + j]
                    for field in range(fields):
                        odd, rest = divmod(field, fields // 2)
                        fragment = j * (fields // 4) + rest // 2
                        k = 16 * k_tile + 8 * (rest % 2) + 2 * (lane % 4) + odd
                        n = 64 * warp + 8 * fragment + lane // 4
                        code = (word >> np.uint32(bits * field)) & mask
                        sums[n, k // group] += np.int64(integers[code]) * numbers[k]


def _marlin_scale_rows(n: int, groups: int, quantization: Quantization) -> NDArray[np.int64]:
    """The row of the matrix to which the scale at each place of a stored row belongs."""
    place = np.arange(n)
    if quantization.scheme != "mxfp4" and groups == 1:  # times the sum: a lane's 8 of 32
        lane, fragment, odd = place % 32 // 8, place % 8 // 2, place % 2
        return 32 * (place // 32) + 8 * fragment + 2 * lane + odd
    lane, fragment = place % 64 // 8, place % 8  # times B: a lane's 8 of 64, one a fragment
    if quantization.scheme == "mxfp4":  # bytes widen in pairs, the even ones first
        fragment = 4 * (fragment // 4) + 2 * (fragment % 2) + fragment // 2 % 2
    return 64 * (place // 64) + 8 * fragment + lane


# By a layout's name; a plain layout is read in the plain order.
_SUMS: dict[str, Callable[..., NDArray[np.int64]]] = {Marlin.name: _marlin_sums}
_SCALES: dict[str, Callable[..., NDArray[np.int64]]] = {Marlin.name: _marlin_scale_rows}
