"""Marlin W4A16: the order vLLM's and SGLang's Marlin kernels, and ours, read INT4 weights in.

A matrix [N, K] becomes int32 [K/16, 2N]: tiles of 16 k × 64 n, 128 words each, k-tile major.
With word(k, n) and nibble(k, n) the place of the code at row n, column k:

    word   = (k div 16)·2N + 128·(n div 64) + 16·(n mod 8) + 4·((k mod 8) div 2) + (n div 16) mod 4
    nibble = (k div 8) mod 2 + 2·((n div 8) mod 2) + 4·(k mod 2)

Source of the formulas: vLLM 0.33's `gptq_marlin_repack` and `marlin_permute_scales`, whose
outputs the golden tests compare with. Codes keep their values (value = nibble − 8).
`pack_*` and `unpack_*` are inverses that share no index arithmetic: one is the proof of the other.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.numba_jit import jit
from kconvert.layouts.repack import TILE_K, TILE_N, repack_marlin, transpose_scales

NAME = "marlin"


def constraint(n: int, k: int) -> str | None:
    """Why a matrix [n, k] cannot be tiled, or None."""
    if n % TILE_N:
        return f"{n} rows do not divide into {TILE_N}-column tiles"
    if k % TILE_K:
        return f"{k} columns do not divide into {TILE_K}-row tiles"
    return None


def weight_shape(n: int, k: int) -> tuple[int, int]:
    """Shape in int32 words of a packed [n, k] matrix."""
    return k // TILE_K, 2 * n


def scale_shape(n: int, groups: int) -> tuple[int, int]:
    """Shape of the scales of an [n, k] matrix with `groups` scales a row."""
    return groups, n


def pack_weight_into(
    source: NDArray[np.int32], rows: range, columns: range, out: NDArray[np.int32], at: int
) -> None:
    """Pack `rows` × `columns` of a matrix into `out`, as its rows from `at` on.

    source int32 [N, K/8] in compressed-tensors' order; out int32 [len(columns)/16, 2M], M ≥ at +
    len(rows) being the rows of the (fused) packed matrix. Both C-contiguous.
    Raises ValueError for other arrays, or where tiles would be cut or lie outside.
    """
    reason = constraint(len(rows), len(columns)) or constraint(at, columns.start)
    if reason:
        raise ValueError(f"marlin: {reason}")
    _check_array(source, np.int32, rows.stop, columns.stop // 8)
    _check_array(out, np.int32, len(columns) // TILE_K, 2 * (at + len(rows)))
    repack_marlin(source, rows.start, len(rows), columns.start // 8, len(columns) // 8, out, 2 * at)


def pack_weight(weight_packed: NDArray[np.int32]) -> NDArray[np.int32]:
    """compressed-tensors int32 [N, K/8] → Marlin int32 [K/16, 2N].

    Raises ValueError unless N % 64 == 0, K % 16 == 0 and the words are int32.
    """
    rows, words = weight_packed.shape
    n, k = rows, 8 * words
    out = np.empty(weight_shape(n, k), np.int32)
    pack_weight_into(np.ascontiguousarray(weight_packed), range(n), range(k), out, 0)
    return out


def unpack_weight(packed: NDArray[np.int32]) -> NDArray[np.int32]:
    """Marlin int32 [K/16, 2N] → compressed-tensors int32 [N, K/8], by the inverse formulas.

    Raises ValueError unless N % 64 == 0 and the words are int32.
    """
    packed = np.ascontiguousarray(packed)
    k_tiles, words = packed.shape
    _check_array(packed, np.int32, k_tiles, words)
    reason = "an odd number of words" if words % 2 else constraint(words // 2, TILE_K * k_tiles)
    if reason:
        raise ValueError(f"marlin: {reason}")
    out = np.zeros((words // 2, 2 * k_tiles), np.int32)
    _unpack(packed, out)
    return out


@jit
def _unpack(packed, out):  # type: ignore[no-untyped-def]
    for k_tile in range(packed.shape[0]):
        for c in range(packed.shape[1]):
            word = np.uint32(packed[k_tile, c])
            a, b, d = (c % 128) // 16, (c // 4) % 4, c % 4
            for p in range(8):
                k = 16 * k_tile + 8 * (p & 1) + 2 * b + (p >> 2)
                n = 64 * (c // 128) + 16 * d + 8 * ((p >> 1) & 1) + a
                code = (word >> np.uint32(4 * p)) & np.uint32(15)
                out[n, k // 8] |= np.int32(code << np.uint32(4 * (k % 8)))


def pack_scales_into(
    source: NDArray[np.generic], rows: range, groups: range, out: NDArray[np.generic], at: int
) -> None:
    """Put scales `rows` × `groups` of source [N, G] into out [len(groups), M], columns from `at`.

    One unsigned dtype for both (bf16 bits as uint16). The column order depends on the number of
    groups alone, as the kernel decides by it. Raises ValueError for other arrays or sizes.
    """
    if len(rows) % TILE_N:
        raise ValueError(f"marlin: {constraint(len(rows), TILE_K)}")
    _check_array(source, source.dtype, rows.stop, groups.stop)
    _check_array(out, source.dtype, len(groups), at + len(rows))
    order = _column_order(len(rows), len(groups))
    transpose_scales(source, rows.start, groups.start, out, at, order)


def permute_scales(scales: NDArray[np.generic]) -> NDArray[np.generic]:
    """Scales [N, G] → Marlin [G, N], same dtype (bf16 bits as uint16). N % 64 == 0."""
    n, groups = scales.shape
    out = np.empty(scale_shape(n, groups), scales.dtype)
    pack_scales_into(np.ascontiguousarray(scales), range(n), range(groups), out, 0)
    return out


def unpermute_scales(permuted: NDArray[np.generic]) -> NDArray[np.generic]:
    """Marlin scales [G, N] → [N, G]: column n is looked up where the kernel reads it."""
    groups, columns = permuted.shape
    if columns % TILE_N:
        raise ValueError(f"marlin: {constraint(columns, TILE_K)}")
    n = np.arange(columns)
    if groups > 1:
        place = 64 * (n // 64) + 8 * (n % 8) + (n % 64) // 8
    else:
        place = 32 * (n // 32) + 8 * ((n % 8) // 2) + 2 * ((n % 32) // 8) + n % 2
    return np.ascontiguousarray(permuted[:, place].T)


def _check_array(array: NDArray[Any], dtype: Any, rows: int, columns: int) -> None:
    """The kernels work by address: what is not so would be garbage, or somebody else's memory."""
    if array.dtype != dtype or not array.flags.c_contiguous or not array.flags.aligned:
        raise ValueError(f"marlin: expected C-contiguous {np.dtype(dtype)}, found {array.dtype}")
    if array.ndim != 2 or array.shape[0] < rows or array.shape[1] < columns:
        raise ValueError(f"marlin: expected at least {[rows, columns]}, found {array.shape}")


def _column_order(n: int, groups: int) -> NDArray[np.int64]:
    """The source row that each of n packed scale columns comes from."""
    if groups > 1:  # 8×8 transpose of every 64
        return np.arange(n).reshape(-1, 8, 8).transpose(0, 2, 1).reshape(-1)
    # One group: of every 32, pairs two apart in j (n = 8i + 2j + parity) lie together.
    return np.arange(n).reshape(-1, 4, 4, 2).transpose(0, 2, 1, 3).reshape(-1)
