"""Transposing what a format stores transposed. Apart from the formats, as whoever only reads
headers loads those and does without numba."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.numba_jit import jit


def transpose_into(stored: NDArray[Any], out: NDArray[Any]) -> None:
    """Fill `out` [K, N] with the transpose of the C-contiguous matrix `stored` [N, K]."""
    _transpose(stored, out)


@jit
def _transpose(source, out):  # type: ignore[no-untyped-def]
    """out[j, i] = source[i, j], in blocks that stay in the first-level cache."""
    rows, columns = source.shape
    for top in range(0, rows, 32):
        for left in range(0, columns, 32):
            for j in range(left, min(left + 32, columns)):
                for i in range(top, min(top + 32, rows)):
                    out[np.uint64(j), np.uint64(i)] = source[np.uint64(i), np.uint64(j)]
