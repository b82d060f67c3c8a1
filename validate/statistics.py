"""What codes and scales look like, layer by layer and expert by expert; seen in the bytes of the
blobs while they are in memory, in whatever order they lie."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from kconvert.layouts.numba_jit import jit
from kconvert.layouts.quantization import Quantization, meaning
from kconvert.layouts.scan import widened

_FAR = 8.0  # deviations from the middle of a layer, from which on an expert is an outlier
_MAD = 1.4826  # of a normal distribution: its deviation in median absolute deviations


@dataclass(frozen=True)
class ScaleSums:
    """Magnitudes of some scales; `least` and `greatest` of those that are finite and not zero."""

    count: int
    zeros: int
    denormals: int
    not_finite: int
    total: float
    squares: float  # the sum of their squares
    least: float
    greatest: float


class LayerStatistics:
    """What one layer's routed experts hold; all ranks' parts together."""

    def __init__(self, experts: int, quantization: Quantization) -> None:
        self.values = code_values(quantization)
        self.codes = np.zeros((experts, len(self.values)), np.int64)  # how often each is there
        self.scales = np.zeros((experts, 4), np.int64)  # how many, zero, denormal, not finite
        self.bytes = 0  # of all that is stored of the experts that were read
        self.totals = np.zeros(experts)  # of scales' magnitudes
        self.squares = np.zeros(experts)  # of scales
        self._bare = not quantization.zero_point  # a code by itself says what it means
        self.least, self.greatest = np.full(experts, np.inf), np.zeros(experts)

    def add_codes(self, expert: int, counts: NDArray[np.int64]) -> None:
        """Some of an expert's codes."""
        self.codes[expert] += counts

    def add_scales(self, expert: int, sums: ScaleSums) -> None:
        """Some of an expert's scales."""
        self.scales[expert] += (sums.count, sums.zeros, sums.denormals, sums.not_finite)
        self.totals[expert] += sums.total
        self.squares[expert] += sums.squares
        self.least[expert] = min(self.least[expert], sums.least)
        self.greatest[expert] = max(self.greatest[expert], sums.greatest)

    def table(self) -> dict[str, Any]:
        """All experts together, for --json."""
        count, zeros, denormals, not_finite = self.scales.sum(axis=0).tolist()
        return {
            "codes": self.codes.sum(axis=0).tolist(),
            "code_values": self.values.tolist(),
            "bits_a_weight": self.bits_a_weight,
            "outliers": self.outliers,
            "scales": count,
            "zero_scales": zeros,
            "denormal_scales": denormals,
            "not_finite_scales": not_finite,
            "least_scale": _finite(float(self.least.min())),
            "mean_scale": float(self.totals.sum() / count) if count else None,
            "greatest_scale": float(self.greatest.max()),
        }

    @property
    def bits_a_weight(self) -> float | None:
        """With scales, zero points and biases."""
        weights = int(self.codes.sum())
        return 8 * self.bytes / weights if weights else None

    @property
    def outliers(self) -> list[int]:
        """Experts whose mean scale is far from the layer's middle one: more than 8 deviations,
        as the median absolute deviation gives them, in logarithms."""
        with np.errstate(divide="ignore"):
            means = np.log(self.means)
        seen = np.isfinite(means)
        if not seen.any():
            return []
        away = np.abs(means - np.median(means[seen]))
        deviation = _MAD * np.median(away[seen])
        return [int(n) for n in np.flatnonzero(seen & (away > _FAR * deviation)) if deviation > 0]

    @property
    def means(self) -> NDArray[np.float64]:
        """The mean magnitude of each expert's scales; NaN of one that was not read."""
        count = self.scales[:, 0]
        means = np.full(len(count), np.nan)
        np.divide(self.totals, count, out=means, where=count > 0)
        return means

    @property
    def sizes(self) -> NDArray[np.float64]:
        """The root mean square of each expert's weights, estimated: of its codes times of its
        scales, which is exact where the one does not hang on the other. NaN of one that was not
        read, and where codes hang on zero points."""
        codes, scales = self.codes.sum(axis=1), self.scales[:, 0]
        seen = (codes > 0) & (scales > 0) & self._bare
        found = np.full(len(codes), np.nan)
        of_codes = (self.codes @ self.values**2)[seen] / codes[seen]
        found[seen] = np.sqrt(of_codes * self.squares[seen] / scales[seen])
        return found


def code_values(quantization: Quantization) -> NDArray[np.float64]:
    """What each code means before its scale; with zero points the code itself."""
    codes = np.arange(1 << quantization.bits, dtype=np.uint8)
    if quantization.zero_point:
        return codes.astype(np.float64)
    return meaning(quantization, codes) / (2.0 if quantization.scheme == "mxfp4" else 1.0)


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def count_codes(words: NDArray[Any], bits: int) -> NDArray[np.int64]:
    """How often each code of 4 or 8 bits is among these words: int64 [2^bits]."""
    flat, whole = words.reshape(-1), words.size - words.size % _WORDS
    counts = np.zeros(1 << bits, np.int64)
    if bits == 8:
        tables = np.zeros((4, 256), np.int64)
        _count_bytes(flat.view(np.uint8), tables)
        whole_bytes: NDArray[np.int64] = tables.sum(axis=0)
        return whole_bytes
    _count_nibbles(flat[:whole].view(np.uint64), counts)
    rest = flat[whole:].view(np.uint8)
    return counts + np.bincount(np.concatenate([rest & 15, rest >> 4]), minlength=16)


@intrinsic
def _popcount(typingctx, word):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), codegen


_WORDS = 8  # int32: four of 64 bits
_LOW = np.uint64(0x1111111111111111)


@jit
def _count_nibbles(words, counts):  # type: ignore[no-untyped-def]
    """Four words, 64 nibbles, at a time: bit i of each goes into plane i, and a code is wherever
    the planes are its bits. Few instructions for many nibbles, and LLVM makes vectors of them."""
    one, two, three, every = np.uint64(1), np.uint64(2), np.uint64(3), ~np.uint64(0)
    n0 = n1 = n2 = n3 = n4 = n5 = n6 = n7 = np.uint64(0)
    n8 = n9 = n10 = n11 = n12 = n13 = n14 = n15 = np.uint64(0)
    for i in range(len(words) // 4):
        a, b, c, d = words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]
        p0, p1 = _plane(a, b, c, d), _plane(a >> one, b >> one, c >> one, d >> one)
        p2 = _plane(a >> two, b >> two, c >> two, d >> two)
        p3 = _plane(a >> three, b >> three, c >> three, d >> three)
        q0, q1, q2, q3 = p0 ^ every, p1 ^ every, p2 ^ every, p3 ^ every
        low0, low1, low2, low3 = q1 & q0, q1 & p0, p1 & q0, p1 & p0
        high = q3 & q2
        n0, n1 = n0 + _popcount(high & low0), n1 + _popcount(high & low1)
        n2, n3 = n2 + _popcount(high & low2), n3 + _popcount(high & low3)
        high = q3 & p2
        n4, n5 = n4 + _popcount(high & low0), n5 + _popcount(high & low1)
        n6, n7 = n6 + _popcount(high & low2), n7 + _popcount(high & low3)
        high = p3 & q2
        n8, n9 = n8 + _popcount(high & low0), n9 + _popcount(high & low1)
        n10, n11 = n10 + _popcount(high & low2), n11 + _popcount(high & low3)
        high = p3 & p2
        n12, n13 = n12 + _popcount(high & low0), n13 + _popcount(high & low1)
        n14, n15 = n14 + _popcount(high & low2), n15 + _popcount(high & low3)
    found = (n0, n1, n2, n3, n4, n5, n6, n7, n8, n9, n10, n11, n12, n13, n14, n15)
    for code in range(16):
        counts[code] += np.int64(found[code])


@jit
def _plane(a, b, c, d):  # type: ignore[no-untyped-def]
    """The lowest bits of all nibbles, side by side in some order."""
    one, two, three = np.uint64(1), np.uint64(2), np.uint64(3)
    return a & _LOW | (b & _LOW) << one | (c & _LOW) << two | (d & _LOW) << three


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


_EXPONENTS = np.array([0.0, *(2.0 ** (e - 127) for e in range(1, 255)), np.inf], np.float32)
_LEAST_NORMAL = {"F16": 2.0**-14, "BF16": 2.0**-126, "F32": 2.0**-126}
_INFINITE = np.uint32(0x7F800000)


def sum_scales(bits: NDArray[Any], dtype: str) -> ScaleSums:
    """Look at scales, given as the bits of their safetensors `dtype`."""
    wide = flat = bits.reshape(-1)
    if dtype in ("U8", "F8_E8M0"):  # exponents: 0 is read as zero by the kernels
        wide = _EXPONENTS[flat].view(np.uint32)
    elif dtype != "BF16":
        wide = widened(flat, dtype).view(np.uint32)
    normal = np.float32(_LEAST_NORMAL.get(dtype, 0.0)).view(np.uint32)
    shift = np.uint32(8 * (4 - wide.itemsize))
    zeros, denormals, not_finite, total, squares, *ends = _sum(wide, shift, normal)
    least, greatest = np.array(ends, np.uint32).view(np.float32).tolist()
    return ScaleSums(flat.size, zeros, denormals, not_finite, total, squares, least, greatest)


@intrinsic
def _as_float(typingctx, bits):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.uint32), codegen


@partial(jit, fastmath={"reassoc", "nsz"})  # sums in any order, which makes vectors of them
def _sum(bits, shift, normal):  # type: ignore[no-untyped-def]
    """Of float32 whose upper bits these are. Magnitudes are in the order of their bits, and nothing
    branches."""
    zeros = small = not_finite = 0
    total = squares = 0.0
    least, greatest = _INFINITE, np.uint32(0)
    for i in range(len(bits)):
        magnitude = np.uint32((np.uint32(bits[i]) << shift) & np.uint32(0x7FFFFFFF))
        finite = np.uint32(magnitude if magnitude < _INFINITE else np.uint32(0))
        not_finite += int(magnitude >= _INFINITE)
        zeros += magnitude == 0
        small += magnitude < normal
        value = np.float64(_as_float(finite))
        total += value
        squares += value * value
        least = min(least, np.uint32(magnitude if magnitude != 0 else _INFINITE))
        greatest = max(greatest, finite)
    return zeros, max(small - zeros, 0), not_finite, total, squares, least, greatest
