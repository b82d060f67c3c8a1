"""What is stored transposed, turned; apart from the formats, which whoever only reads headers loads
without numba."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.numba_jit import jit


def turned(stored: NDArray[Any], out: NDArray[Any]) -> NDArray[Any]:
    """Fill `out` with the transpose of a C-contiguous matrix, and return it."""
    _transpose(stored, out)
    return out


@jit
def _transpose(source, out):  # type: ignore[no-untyped-def]
    """out[j, i] = source[i, j], in blocks that stay in the first-level cache."""
    rows, columns = source.shape
    for top in range(0, rows, 32):
        for left in range(0, columns, 32):
            for j in range(left, min(left + 32, columns)):
                for i in range(top, min(top + 32, rows)):
                    out[np.uint64(j), np.uint64(i)] = source[np.uint64(i), np.uint64(j)]
