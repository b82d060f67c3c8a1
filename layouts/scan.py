"""Signs of a damaged source in scales and codes, found in one pass while they are in memory; and
scales cast to bfloat16."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.numba_jit import jit

# Bits of the exponent: all set in infinities and NaN. All bits but the sign are magnitude. MXFP4's
# byte is an exponent: 255 is no number, and 0 is read as zero by the kernels.
_EXPONENT = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000, "U8": 0xFF, "F8_E8M0": 0xFF}
_MAGNITUDE = {"BF16": 0x7FFF, "F16": 0x7FFF, "F32": 0x7FFFFFFF, "U8": 0xFF, "F8_E8M0": 0xFF}


class ScaleScan(NamedTuple):
    """A matrix's scales: the first (row, group) that is not finite, and how many are zero."""

    not_finite: tuple[int, int] | None
    zeros: int


def scan_scales(bits: NDArray[Any], dtype: str) -> ScaleScan:
    """Look through scales [N, G], given as the bits of their safetensors `dtype`."""
    exponent = bits.dtype.type(_EXPONENT[dtype])
    not_finite, zeros = _count(bits, exponent, bits.dtype.type(_MAGNITUDE[dtype]))
    if not not_finite:
        return ScaleScan(None, int(zeros))
    row, group = np.argwhere((bits & exponent) == exponent)[0]
    return ScaleScan((int(row), int(group)), int(zeros))


@jit
def _count(bits, exponent, magnitude):  # type: ignore[no-untyped-def]
    not_finite = zeros = 0
    for row in range(bits.shape[0]):
        for value in bits[row]:
            not_finite += (value & exponent) == exponent
            zeros += (value & magnitude) == 0
    return not_finite, zeros


def all_one_code(words: NDArray[np.int32], bits: int = 4) -> bool:
    """Whether every code of a matrix's plain words is the same, as in a file that was never
    written. It stops at the first word that differs."""
    first = int(words.reshape(-1)[0]) & 0xFFFFFFFF
    field = (1 << bits) - 1
    return first == (first & field) * (0xFFFFFFFF // field) and bool(_all_equal(words))


@jit
def _all_equal(words):  # type: ignore[no-untyped-def]
    for row in range(words.shape[0]):
        for value in words[row]:
            if value != words[0, 0]:
                return False
    return True


def widened(bits: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Scales, given as the bits of their `dtype` (BF16, F16 or F32), as float32, exactly."""
    if dtype == "BF16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(np.float32 if dtype == "F32" else np.float16).astype(np.float32)


def cast_to_bf16(bits: NDArray[Any], dtype: str, out: NDArray[np.uint16]) -> int:
    """Round finite scales to bfloat16, to the nearest, ties to even, as torch does, and write their
    bits into `out`. → How many were changed by it."""
    wide = np.ascontiguousarray(widened(bits, dtype)).view(np.uint32)
    rounded = wide + np.uint32(0x7FFF) + (wide >> np.uint32(16) & np.uint32(1))
    np.right_shift(rounded, np.uint32(16), out=rounded)
    out[...] = rounded
    return int(np.count_nonzero(rounded << np.uint32(16) != wide))
