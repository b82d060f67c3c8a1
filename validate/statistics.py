"""What codes and scales look like, layer by layer and expert by expert; seen in the bytes of the
blobs while they are in memory, in whatever order they lie."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.numba_jit import jit
from kconvert.layouts.scan import widened


@dataclass(frozen=True)
class ScaleSums:
    """Magnitudes of some scales; `least` and `greatest` of those that are finite and not zero."""

    count: int
    zeros: int
    denormals: int
    total: float
    least: float
    greatest: float


class LayerStatistics:
    """Of one layer's routed experts; all ranks' parts together."""

    def __init__(self, experts: int, bits: int) -> None:
        self.codes = np.zeros((experts, 1 << bits), np.int64)  # how often each code is there
        self.scales = np.zeros((experts, 3), np.int64)  # how many, zero, denormal
        self.totals = np.zeros(experts)  # of scales' magnitudes
        self.least, self.greatest = np.full(experts, np.inf), np.zeros(experts)

    def add_codes(self, expert: int, counts: NDArray[np.int64]) -> None:
        """Some of an expert's codes."""
        self.codes[expert] += counts

    def add_scales(self, expert: int, sums: ScaleSums) -> None:
        """Some of an expert's scales."""
        self.scales[expert] += (sums.count, sums.zeros, sums.denormals)
        self.totals[expert] += sums.total
        self.least[expert] = min(self.least[expert], sums.least)
        self.greatest[expert] = max(self.greatest[expert], sums.greatest)

    def table(self) -> dict[str, Any]:
        """All experts together, for --json."""
        count, zeros, denormals = self.scales.sum(axis=0).tolist()
        return {
            "codes": self.codes.sum(axis=0).tolist(),
            "scales": count,
            "zero_scales": zeros,
            "denormal_scales": denormals,
            "least_scale": _finite(float(self.least.min())),
            "mean_scale": float(self.totals.sum() / count) if count else None,
            "greatest_scale": float(self.greatest.max()),
        }

    @property
    def means(self) -> NDArray[np.float64]:
        """The mean magnitude of each expert's scales; NaN of one that was not read."""
        count = self.scales[:, 0]
        means = np.full(len(count), np.nan)
        np.divide(self.totals, count, out=means, where=count > 0)
        return means


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def count_codes(words: NDArray[Any], bits: int) -> NDArray[np.int64]:
    """How often each code of 4 or 8 bits is among these bytes: int64 [2^bits]."""
    counts = np.zeros((4, 256), np.int64)
    _count_bytes(words.reshape(-1).view(np.uint8), counts)
    whole: NDArray[np.int64] = counts.sum(axis=0)
    if bits == 8:
        return whole
    pairs = whole.reshape(16, 16)  # high nibble, low nibble
    nibbles: NDArray[np.int64] = pairs.sum(axis=0) + pairs.sum(axis=1)
    return nibbles


@jit
def _count_bytes(data, counts):  # type: ignore[no-untyped-def]
    """In four tables: a byte that follows its like would wait for the same counter."""
    end = len(data) // 4 * 4
    for i in range(0, end, 4):
        counts[0, data[i]] += 1
        counts[1, data[i + 1]] += 1
        counts[2, data[i + 2]] += 1
        counts[3, data[i + 3]] += 1
    for i in range(end, len(data)):
        counts[0, data[i]] += 1


_LEAST_NORMAL = {"F16": 2.0**-14, "BF16": 2.0**-126, "F32": 2.0**-126}


def sum_scales(bits: NDArray[Any], dtype: str) -> ScaleSums:
    """Look at scales, given as the bits of their safetensors `dtype`."""
    if dtype in ("U8", "F8_E8M0"):  # an exponent; 0 is read as zero by the kernels
        flat = bits.reshape(-1)
        values = np.where(flat > 0, np.exp2(flat.astype(np.float64) - 127), 0.0)
    else:
        values = np.abs(widened(bits.reshape(-1), dtype).astype(np.float64))
    finite = values[np.isfinite(values)]
    positive = finite[finite > 0]
    return ScaleSums(
        count=values.size,
        zeros=int(finite.size - positive.size),
        denormals=int(np.count_nonzero(positive < _LEAST_NORMAL.get(dtype, 0.0))),
        total=float(finite.sum()),
        least=float(positive.min()) if positive.size else np.inf,
        greatest=float(positive.max()) if positive.size else 0.0,
    )
