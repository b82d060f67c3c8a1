"""Marlin W4A16: the order vLLM's and SGLang's Marlin kernels, and ours, read INT4 weights in.

A matrix [N, K] becomes int32 [K/16, 2N]: tiles of 16 k × 64 n, 128 words each, k-tile major.
With word(k, n) and nibble(k, n) the place of the code at row n, column k:

    word   = (k div 16)·2N + 128·(n div 64) + 16·(n mod 8) + 4·((k mod 8) div 2) + (n div 16) mod 4
    nibble = (k div 8) mod 2 + 2·((n div 8) mod 2) + 4·(k mod 2)

Source of the formulas: vLLM 0.33's `gptq_marlin_repack` and `marlin_permute_scales`, whose
outputs the golden tests compare with. Codes keep their values (value = nibble − 8).
Packing and unpacking share no index arithmetic: one is the proof of the other.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.layout import Layout
from kconvert.layouts.numba_jit import jit
from kconvert.layouts.quantization import Quantization, Role
from kconvert.layouts.repack import TILE_K, TILE_N, repack_marlin, transpose_scales


class Marlin(Layout):
    """Tiles for tensor cores: codes int32 [K/16, 2N], scales [G, N] with permuted columns."""

    name = "marlin"

    def constraint(self, n: int, k: int) -> str | None:
        """Tiles are 16 k × 64 n."""
        if n % TILE_N:
            return f"{n} rows do not divide into {TILE_N}-column tiles"
        if k % TILE_K:
            return f"{k} columns do not divide into {TILE_K}-row tiles"
        return None

    def shape(self, role: Role, n: int, k: int) -> tuple[int, int]:
        if role == "code":
            return k // TILE_K, 2 * n
        return len(self.quantization.groups(range(k))), n

    def pack_into(
        self,
        role: Role,
        source: NDArray[Any],
        rows: range,
        columns: range,
        out: NDArray[Any],
        at: int,
    ) -> None:
        reason = self.constraint(len(rows), len(columns)) or self.constraint(at, columns.start)
        if reason:
            raise ValueError(f"marlin: {reason}")
        if role == "code":
            _pack_codes(source, rows, columns, out, at)
        else:
            _pack_scales(source, rows, self.quantization.groups(columns), out, at)

    def unpack(self, role: Role, packed: NDArray[Any]) -> NDArray[Any]:
        return unpack_weight(packed) if role == "code" else unpermute_scales(packed)


_CODES = Marlin(Quantization(None))  # codes lie the same way whatever the groups


def pack_weight(weight_packed: NDArray[np.int32]) -> NDArray[np.int32]:
    """compressed-tensors int32 [N, K/8] → Marlin int32 [K/16, 2N].

    Raises ValueError unless N % 64 == 0, K % 16 == 0 and the words are int32.
    """
    rows, words = weight_packed.shape
    n, k = rows, 8 * words
    out = np.empty(_CODES.shape("code", n, k), np.int32)
    _CODES.pack_into("code", np.ascontiguousarray(weight_packed), range(n), range(k), out, 0)
    return out


def unpack_weight(packed: NDArray[np.int32]) -> NDArray[np.int32]:
    """Marlin int32 [K/16, 2N] → compressed-tensors int32 [N, K/8], by the inverse formulas.

    Raises ValueError unless N % 64 == 0 and the words are int32.
    """
    packed = np.ascontiguousarray(packed)
    k_tiles, words = packed.shape
    _check_array(packed, np.int32, k_tiles, words)
    if words % 2:
        raise ValueError("marlin: an odd number of words")
    _check_rows(words // 2)
    out = np.zeros((words // 2, 2 * k_tiles), np.int32)
    _unpack(packed, out)
    return out


def permute_scales(scales: NDArray[np.generic]) -> NDArray[np.generic]:
    """Scales [N, G] → Marlin [G, N], same dtype (bf16 bits as uint16).

    Raises ValueError unless N % 64 == 0.
    """
    n, groups = scales.shape
    out = np.empty((groups, n), scales.dtype)
    _pack_scales(np.ascontiguousarray(scales), range(n), range(groups), out, 0)
    return out


def unpermute_scales(permuted: NDArray[np.generic]) -> NDArray[np.generic]:
    """Marlin scales [G, N] → [N, G]: column n is looked up where the kernel reads it.

    Raises ValueError unless N % 64 == 0.
    """
    groups, columns = permuted.shape
    _check_rows(columns)
    n = np.arange(columns)
    if groups > 1:
        place = 64 * (n // 64) + 8 * (n % 8) + (n % 64) // 8
    else:
        place = 32 * (n // 32) + 8 * ((n % 8) // 2) + 2 * ((n % 32) // 8) + n % 2
    return np.ascontiguousarray(permuted[:, place].T)


def _pack_codes(
    source: NDArray[np.int32], rows: range, columns: range, out: NDArray[np.int32], at: int
) -> None:
    _check_array(source, np.int32, rows.stop, columns.stop // 8)
    _check_array(out, np.int32, len(columns) // TILE_K, 2 * (at + len(rows)))
    repack_marlin(source, rows.start, len(rows), columns.start // 8, len(columns) // 8, out, 2 * at)


def _pack_scales(
    source: NDArray[np.generic], rows: range, groups: range, out: NDArray[np.generic], at: int
) -> None:
    """The column order depends on the number of groups alone, as the kernel decides by it."""
    _check_rows(len(rows))
    _check_array(source, source.dtype, rows.stop, groups.stop)
    _check_array(out, source.dtype, len(groups), at + len(rows))
    order = _column_order(len(rows), len(groups))
    transpose_scales(source, rows.start, groups.start, out, at, order)


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


def _check_rows(n: int) -> None:
    if n % TILE_N:
        raise ValueError(f"marlin: {_CODES.constraint(n, TILE_K)}")


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
