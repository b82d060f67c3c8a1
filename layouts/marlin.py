"""Marlin: the order vLLM's and SGLang's Marlin kernels, and ours, read quantized weights in.

A matrix [N, K] becomes int32 [K/16, 2N] of 4-bit codes, or [K/16, 4N] of 8-bit ones: tiles of
16 k × 64 n, k-tile major. The place of the code at row n, column k:

    4 bit:  word   = (k div 16)·2N + 128·(n div 64) + 16·(n mod 8) + 4·((k mod 8) div 2) + (n div 16) mod 4
            nibble = (k div 8) mod 2 + 2·((n div 8) mod 2) + 4·(k mod 2)
    8 bit:  word   = (k div 16)·4N + 256·(n div 64) + 32·(n mod 8) + 8·((k mod 8) div 2)
                     + 2·((n div 16) mod 4) + (n div 8) mod 2
            byte   = (k div 8) mod 2 + 2·(k mod 2)

Codes keep their values. Scales are [G, N] with permuted columns, zero points int32 [G, N/8].
Source of the formulas: vLLM 0.33's `gptq_marlin_repack`, `marlin_permute_scales`,
`moe_packed_to_marlin_zero_points` and `mxfp4_marlin_process_scales`, whose outputs the golden tests
compare with. Packing and unpacking share no index arithmetic: one is the proof of the other.
"""  # noqa: E501

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.errors import UnsupportedError
from kconvert.layouts.layout import Layout
from kconvert.layouts.numba_jit import jit
from kconvert.layouts.quantization import ZERO_POINTS_A_WORD, Quantization, Role, Scheme
from kconvert.layouts.repack import (
    TILE_K,
    TILE_N,
    repack_marlin,
    repack_zero_points,
    restore_eights,
    transpose_eights,
    transpose_scales,
    unpack_marlin,
)


class Marlin(Layout):
    """Tiles for tensor cores: codes, scales and zero points, all with permuted columns."""

    name = "marlin"

    def __init__(self, quantization: Quantization) -> None:
        super().__init__(quantization)
        if quantization.bias:
            raise UnsupportedError(
                "layout marlin has no order for experts with biases: those of gpt-oss are 2,880"
                " wide, which Marlin's kernels (128 columns a step) run only with padding, and a"
                " padded blob would be one engine's alone; --layout w4a16 takes them as they are."
            )

    def constraint(self, n: int, k: int) -> str | None:
        """Tiles are 16 k × 64 n."""
        if n % TILE_N:
            return f"{n} rows do not divide into {TILE_N}-column tiles"
        if k % TILE_K:
            return f"{k} columns do not divide into {TILE_K}-row tiles"
        return None

    def shape(self, role: Role, n: int, k: int) -> tuple[int, ...]:
        if role == "code":
            return k // TILE_K, n * self.quantization.bits // 2
        groups = len(self.quantization.groups(range(k)))
        return groups, n // ZERO_POINTS_A_WORD if role == "zero_point" else n

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
        q = self.quantization
        if role == "code":
            _pack_codes(source, rows, q.words(columns), q.bits, out, at)
        elif role == "scale":
            _pack_scales(source, rows, q.groups(columns), out, at, q.scheme)
        else:
            _pack_zero_points(source, rows, q.groups(columns), out, at)

    def unpack(self, role: Role, packed: NDArray[Any]) -> NDArray[Any]:
        q = self.quantization
        if role == "code":
            return unpack_weight(packed, q.bits)
        return unpermute_scales(packed, q.scheme) if role == "scale" else _unpack_points(packed)

    def restore(self, role: Role, packed: NDArray[Any]) -> NDArray[Any]:
        if role == "scale" and self.quantization.scheme == "int":
            return _restore_scales(packed)
        if role != "code" or self.quantization.bits != 4:
            return self.unpack(role, packed)
        k_tiles, words = packed.shape
        _check_array(packed, np.int32, k_tiles, words)
        _check_rows(words // 2)
        out = np.empty((words // 2, 2 * k_tiles), np.int32)
        unpack_marlin(packed, out)
        return out


def pack_weight(weight_packed: NDArray[np.int32], bits: int = 4) -> NDArray[np.int32]:
    """compressed-tensors int32 [N, K·bits/32] → Marlin int32 [K/16, N·bits/2].

    Raises ValueError unless N % 64 == 0, K % 16 == 0 and the words are int32.
    """
    rows, words = weight_packed.shape
    n, k, layout = rows, words * 32 // bits, Marlin(Quantization(None, bits))
    out = np.empty(layout.shape("code", n, k), np.int32)
    layout.pack_into("code", np.ascontiguousarray(weight_packed), range(n), range(k), out, 0)
    return out


def unpack_weight(packed: NDArray[np.int32], bits: int = 4) -> NDArray[np.int32]:
    """Marlin int32 [K/16, N·bits/2] → compressed-tensors int32 [N, K·bits/32], by the inverse
    formulas.

    Raises ValueError unless N % 64 == 0 and the words are int32.
    """
    packed = np.ascontiguousarray(packed)
    k_tiles, words = packed.shape
    _check_array(packed, np.int32, k_tiles, words)
    a_row = bits // 2  # words of a k-tile
    if words % a_row:
        raise ValueError("marlin: an odd number of words")
    _check_rows(words // a_row)
    out = np.zeros((words // a_row, a_row * k_tiles), np.int32)
    (_unpack if bits == 4 else _unpack_bytes)(packed, out)
    return out


def permute_scales(scales: NDArray[np.generic], scheme: Scheme = "int") -> NDArray[np.generic]:
    """Scales [N, G] → Marlin [G, N], same dtype (bf16 bits as uint16, MXFP4's bytes as uint8).

    Raises ValueError unless N % 64 == 0.
    """
    n, groups = scales.shape
    _check_rows(n)
    out = np.empty((groups, n), scales.dtype)
    _pack_scales(np.ascontiguousarray(scales), range(n), range(groups), out, 0, scheme)
    return out


def unpermute_scales(permuted: NDArray[np.generic], scheme: Scheme = "int") -> NDArray[np.generic]:
    """Marlin scales [G, N] → [N, G]: column n is looked up where the kernel reads it.

    Raises ValueError unless N % 64 == 0.
    """
    groups, columns = permuted.shape
    _check_rows(columns)
    n = np.arange(columns)
    j = n % 64 // 8
    if scheme == "mxfp4":
        place = 64 * (n // 64) + 8 * (n % 8) + 4 * (j // 4) + 2 * (j % 2) + j // 2 % 2
    elif groups > 1:
        place = 64 * (n // 64) + 8 * (n % 8) + j
    else:
        place = 32 * (n // 32) + 8 * ((n % 8) // 2) + 2 * ((n % 32) // 8) + n % 2
    return np.ascontiguousarray(permuted[:, place].T)


def _restore_scales(permuted: NDArray[np.generic]) -> NDArray[np.generic]:
    groups, columns = permuted.shape
    if permuted.itemsize != 2 or groups < 8:
        return unpermute_scales(permuted)
    _check_rows(columns)
    _check_array(permuted, permuted.dtype, groups, columns)
    out = np.empty((columns, groups), permuted.dtype)
    restore_eights(permuted, out)
    return out


def _pack_codes(
    source: NDArray[np.int32],
    rows: range,
    words: range,
    bits: int,
    out: NDArray[np.int32],
    at: int,
) -> None:
    k_tiles, a_row = 2 * len(words) // bits, bits // 2
    _check_array(source, np.int32, rows.stop, words.stop)
    _check_array(out, np.int32, k_tiles, a_row * (at + len(rows)))
    repack_marlin(source, rows.start, len(rows), words.start, len(words), out, a_row * at, bits)


def _pack_scales(
    source: NDArray[np.generic],
    rows: range,
    groups: range,
    out: NDArray[np.generic],
    at: int,
    scheme: Scheme,
) -> None:
    _check_array(source, source.dtype, rows.stop, groups.stop)
    _check_array(out, source.dtype, len(groups), at + len(rows))
    eights = source.itemsize == (1 if scheme == "mxfp4" else 2) and len(groups) >= 8
    if eights:
        transpose_eights(source, rows.start, len(rows), groups.start, out, at)
    else:
        order = _column_order(len(rows), len(groups), scheme)
        transpose_scales(source, rows.start, groups.start, out, at, order)


def _pack_zero_points(
    source: NDArray[np.int32], rows: range, groups: range, out: NDArray[np.int32], at: int
) -> None:
    _check_array(source, np.int32, rows.stop // 8, groups.stop)
    _check_array(out, np.int32, len(groups), (at + len(rows)) // 8)
    repack_zero_points(source, rows.start // 8, len(rows) // 8, groups.start, out, at // 8)


def _unpack_points(packed: NDArray[np.int32]) -> NDArray[np.int32]:
    """Marlin zero points int32 [G, N/8] → plain int32 [N/8, G]: word w's nibble q is that of row
    64·(w div 8) + 8·(2·(q mod 4) + q div 4) + w mod 8, whatever G is."""
    w, q = np.meshgrid(np.arange(packed.shape[1]), np.arange(8), indexing="ij")
    n = 64 * (w // 8) + 8 * (2 * (q % 4) + q // 4) + w % 8
    points = packed.view(np.uint32)[:, w] >> (4 * q).astype(np.uint32) & np.uint32(15)
    out = np.zeros((packed.shape[1], packed.shape[0]), np.uint32)
    for nibble in range(8):
        here = n % 8 == nibble
        out[n[here] // 8] |= points[:, here].T << np.uint32(4 * nibble)
    return out.view(np.int32)


@jit
def _unpack(packed, out):  # type: ignore[no-untyped-def]
    """Plain words are gathered: the 16 columns of a row and a k-tile are four nibbles of each of
    four words, k in bits 0 to 3, k + 8 in 4 to 7, and k + 1 and k + 9 half a word further. Eight
    k-tiles at a time fill a cache line of a row."""
    for n_tile in range(packed.shape[1] // 128):
        for first in range(0, packed.shape[0], 8):
            for n in range(64 * n_tile, 64 * n_tile + 64):
                start = 128 * n_tile + 16 * (n % 8) + n // 16 % 4
                low = np.uint32(8 * (n // 8 % 2))
                for k_tile in range(first, min(first + 8, packed.shape[0])):
                    left = right = np.uint32(0)
                    for pair in range(4):
                        word = np.uint32(packed[k_tile, start + 4 * pair]) >> low
                        two = word & np.uint32(15) | word >> np.uint32(12) & np.uint32(240)
                        left |= two << np.uint32(8 * pair)
                        word >>= np.uint32(4)
                        two = word & np.uint32(15) | word >> np.uint32(12) & np.uint32(240)
                        right |= two << np.uint32(8 * pair)
                    out[n, 2 * k_tile], out[n, 2 * k_tile + 1] = np.int32(left), np.int32(right)


@jit
def _unpack_bytes(packed, out):  # type: ignore[no-untyped-def]
    for k_tile in range(packed.shape[0]):
        for c in range(packed.shape[1]):
            word = np.uint32(packed[k_tile, c])
            a, b, d, h = (c % 256) // 32, (c // 8) % 4, (c // 2) % 4, c % 2
            n = 64 * (c // 256) + 16 * d + 8 * h + a
            for p in range(4):
                k = 16 * k_tile + 8 * (p & 1) + 2 * b + (p >> 1)
                code = (word >> np.uint32(8 * p)) & np.uint32(255)
                out[n, k // 4] |= np.int32(code << np.uint32(8 * (k % 4)))


def _check_rows(n: int) -> None:
    if n % TILE_N:
        raise ValueError(f"marlin: {n} rows do not divide into {TILE_N}-column tiles")


def _check_array(array: NDArray[Any], dtype: Any, rows: int, columns: int) -> None:
    """The kernels work by address: what is not so would be garbage, or somebody else's memory."""
    if array.dtype != dtype or not array.flags.c_contiguous or not array.flags.aligned:
        raise ValueError(f"marlin: expected C-contiguous {np.dtype(dtype)}, found {array.dtype}")
    if array.ndim != 2 or array.shape[0] < rows or array.shape[1] < columns:
        raise ValueError(f"marlin: expected at least {[rows, columns]}, found {array.shape}")


def _column_order(n: int, groups: int, scheme: Scheme) -> NDArray[np.int64]:
    """The source row that each of n packed scale columns comes from. For integers it depends on
    the number of groups alone, as the kernel decides by it."""
    if scheme == "mxfp4":  # the 8×8 transpose; then the middle pairs of each 8 change places
        eights = np.arange(n).reshape(-1, 8, 8).transpose(0, 2, 1)
        return eights.reshape(-1, 2, 2, 2).transpose(0, 1, 3, 2).reshape(-1)
    if groups > 1:  # 8×8 transpose of every 64
        return np.arange(n).reshape(-1, 8, 8).transpose(0, 2, 1).reshape(-1)
    # One group: of every 32, pairs two apart in j (n = 8i + 2j + parity) lie together.
    return np.arange(n).reshape(-1, 4, 4, 2).transpose(0, 2, 1, 3).reshape(-1)
