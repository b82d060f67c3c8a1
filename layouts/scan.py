"""What scales and codes give away of a damaged source, seen in one pass while they are at hand."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.numba_jit import jit

# Bits of the exponent: all set in infinities and NaN. All bits but the sign are magnitude.
_EXPONENT = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}
_MAGNITUDE = {"BF16": 0x7FFF, "F16": 0x7FFF, "F32": 0x7FFFFFFF}


class ScaleScan(NamedTuple):
    """Of a matrix's scales: the first (row, group) that is not finite, and how many are zero."""

    not_finite: tuple[int, int] | None
    zeros: int


def scan_scales(bits: NDArray[Any], dtype: str) -> ScaleScan:
    """Look at scales [N, G], given as the bits of their safetensors `dtype`."""
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


def all_one_code(words: NDArray[np.int32]) -> bool:
    """Whether every 4-bit code of a matrix int32 [N, K/8] is the same: 0s of a file that was never
    written, say. It is over at the first word that differs."""
    first = int(words.reshape(-1)[0]) & 0xFFFFFFFF
    return first == (first & 15) * 0x11111111 and bool(_all_equal(words))


@jit
def _all_equal(words):  # type: ignore[no-untyped-def]
    for row in range(words.shape[0]):
        for value in words[row]:
            if value != words[0, 0]:
                return False
    return True
