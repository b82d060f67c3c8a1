"""w4a16: the checkpoint's own order, sharded and fused; for plain kernels, the CPU, other engines.

A matrix [N, K] stays int32 [N, K/8] (nibble j of word m is column 8m + j) with scales [N, K/g].
"""

import numpy as np
from numpy.typing import NDArray

NAME = "w4a16"


def constraint(n: int, k: int) -> str | None:
    """Why a matrix [n, k] cannot be stored, or None: a word holds 8 columns."""
    return f"{k} columns do not divide into words of 8" if k % 8 else None


def weight_shape(n: int, k: int) -> tuple[int, int]:
    """Shape in int32 words of a packed [n, k] matrix."""
    return n, k // 8


def scale_shape(n: int, groups: int) -> tuple[int, int]:
    """Shape of the scales of an [n, k] matrix with `groups` scales a row."""
    return n, groups


def pack_weight_into(
    source: NDArray[np.int32], rows: range, columns: range, out: NDArray[np.int32], at: int
) -> None:
    """Copy `rows` × `columns` of source int32 [N, K/8] into out int32 [M, len(columns)/8] from
    row `at` on."""
    words = slice(columns.start // 8, columns.stop // 8)
    out[at : at + len(rows)] = source[rows.start : rows.stop, words]


def unpack_weight(packed: NDArray[np.int32]) -> NDArray[np.int32]:
    """int32 [N, K/8] → the same: the order is the source's."""
    return packed


def pack_scales_into(
    source: NDArray[np.generic], rows: range, groups: range, out: NDArray[np.generic], at: int
) -> None:
    """Copy scales `rows` × `groups` of source [N, G] into out [M, len(groups)] from row `at` on."""
    out[at : at + len(rows)] = source[rows.start : rows.stop, groups.start : groups.stop]


def unpermute_scales(permuted: NDArray[np.generic]) -> NDArray[np.generic]:
    """Scales [N, G] → the same: the order is the source's."""
    return permuted
