"""Choosing a token from logits, reproducibly: a function of logits, seed, position and token ids.

At temperature T > 0 T times Gumbel noise is added to the logits and the largest taken, which
samples from softmax(logits / T) (Gumbel-max). The noise of a token depends on (seed, position,
token) alone, so every mode draws the same token from the same logits.
"""

import math

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.errors import CheckpointError
from kconvert.layouts.numba_jit import jit


def pick(
    logits: NDArray[np.float32], positions: NDArray[np.int64], temperature: float, seed: int
) -> NDArray[np.int64]:
    """One token a row of logits [T, V]; `positions` [T] are where the tokens will stand.

    Ties go to the lowest id. Raises CheckpointError where a row is not finite.
    """
    finite = np.isfinite(logits).all(axis=1)
    if not finite.all():
        position = positions[np.argmin(finite)]
        raise CheckpointError(
            f"the logits for position {position} are not finite: the weights are damaged or"
            " overflow in this dtype; run `kconvert validate` with --source."
        )
    if temperature > 0:
        noisy = np.empty(logits.shape, np.float64)
        _add_gumbel(logits, positions, temperature, np.uint64(seed), noisy)
        return noisy.argmax(axis=1)
    return logits.argmax(axis=1)


@jit
def _add_gumbel(logits, positions, temperature, seed, out):  # type: ignore[no-untyped-def]
    for t in range(logits.shape[0]):
        row = _mix(_mix(seed) ^ np.uint64(positions[t]))
        for v in range(logits.shape[1]):
            bits = _mix(row ^ np.uint64(v)) >> np.uint64(12)
            uniform = (np.float64(bits) + 0.5) / 4503599627370496.0  # 2**52: exact, never 0 or 1
            out[t, v] = logits[t, v] - temperature * math.log(-math.log(uniform))


@jit
def _mix(x):  # type: ignore[no-untyped-def]
    """splitmix64's step: https://prng.di.unimi.it/splitmix64.c"""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
