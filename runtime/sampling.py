"""Choosing a token from logits, reproducibly: a function of logits, seed, position and token ids.

At a temperature T > 0, T times Gumbel noise is added to the logits and the largest is taken, which
samples from softmax(logits / T) (Gumbel-max). The noise of a token depends only on (seed, position,
token), so every mode draws the same token from the same logits. It has the same bits on the GPU:
its logarithm is written out below in float64 operations that are rounded one by one.
"""

import math

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.errors import CheckpointError
from kconvert.layouts.numba_jit import jit

Ints = NDArray[np.int64]

LN2 = 0.6931471805599453
SQRT_HALF = 0.7071067811865476
# ln((1 + s) / (1 − s)) = 2 s · Σ s^2k / (2k + 1); with |s| ≤ 0.1716 twelve terms leave 1e-20.
SERIES = tuple(1.0 / (2 * k + 1) for k in reversed(range(12)))


def pick(
    logits: NDArray[np.float32], positions: Ints, temperature: float, seed: int
) -> NDArray[np.int64]:
    """One token for each row of logits [T, V]; `positions` [T] are where the tokens will stand.

    Ties go to the lowest id. Raises CheckpointError if a row is not finite.
    """
    return chosen([best(logits, positions, temperature, seed, 0)], positions)


def best(
    logits: NDArray[np.float32], positions: Ints, temperature: float, seed: int, first: int
) -> NDArray[np.float64]:
    """logits [T, n], which are the columns from token `first` on of larger rows → float64 [T, 2]:
    the greatest value with its noise (NaN if the row is not finite), and its token."""
    found = np.empty((len(logits), 2), np.float64)
    _best(logits, positions, float(temperature), np.uint64(seed), first, found)
    return found


def chosen(parts: list[NDArray[np.float64]], positions: Ints) -> Ints:
    """The tokens [T] with the greatest value among the parts' `best`; the parts are in the order of
    their columns. Raises CheckpointError if a row is not finite."""
    values = np.stack([part[:, 0] for part in parts])
    finite = ~np.isnan(values).any(axis=0)
    if not finite.all():
        raise not_finite(int(positions[np.argmin(finite)]))
    tokens = np.stack([part[:, 1] for part in parts])
    best: Ints = tokens[values.argmax(axis=0), np.arange(len(positions))].astype(np.int64)
    return best


def not_finite(position: int) -> CheckpointError:
    """The error for logits that hold NaN or an infinity."""
    return CheckpointError(
        f"the logits for position {position} are not finite: the weights are damaged or"
        " overflow in this dtype; run `kconvert validate` with --source."
    )


@jit
def _best(logits, positions, temperature, seed, first, out):  # type: ignore[no-untyped-def]
    for t in range(logits.shape[0]):
        row = mix(mix(seed) ^ np.uint64(positions[t]))
        greatest, token = -np.inf, 0
        for v in range(logits.shape[1]):
            value = np.float64(logits[t, v])
            if not abs(value) < np.inf:
                greatest = np.nan
                break
            if temperature > 0:
                value = value + temperature * gumbel(row, first + v)
            if value > greatest:  # of equal values the lowest id stays
                greatest, token = value, v
        out[t, 0], out[t, 1] = greatest, first + token


@jit
def gumbel(row, token):  # type: ignore[no-untyped-def]
    """−ln(−ln u) for the u in (0, 1) that row (seed and position) and token give."""
    bits = mix(row ^ np.uint64(token)) >> np.uint64(12)
    uniform = (np.float64(bits) + 0.5) / 4503599627370496.0  # 2**52: exact, never 0 or 1
    return -logarithm(-logarithm(uniform))


@jit
def logarithm(x):  # type: ignore[no-untyped-def]
    """ln x of a normal x > 0, within 2 units in the last place."""
    mantissa, exponent = math.frexp(x)
    if mantissa < SQRT_HALF:
        mantissa, exponent = 2 * mantissa, exponent - 1
    s = (mantissa - 1) / (mantissa + 1)
    square, series = s * s, 0.0
    for term in SERIES:
        series = series * square + term
    return exponent * LN2 + 2 * s * series


@jit
def mix(x):  # type: ignore[no-untyped-def]
    """splitmix64's step: https://prng.di.unimi.it/splitmix64.c"""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
