"""Rotary positions, with YaRN if a config sets it: the target's and the drafter's."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Yarn:
    """YaRN (https://arxiv.org/abs/2309.00071): rotary frequencies for longer texts than trained on.

    `amplitude` multiplies cosines and sines; `truncate` rounds the ramp's ends to whole pairs.
    """

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    amplitude: float = 1.0
    truncate: bool = True


def mscale(factor: float, scale: float) -> float:
    """YaRN's growth of attention with the stretching: 0.1 · scale · ln factor + 1."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def frequencies(dim: int, theta: float, yarn: Yarn | None) -> NDArray[np.float64]:
    """[dim/2] radians a position, from fast to slow.

    YaRN (§3.2 there): fast pairs keep their frequency, slow ones are divided by the factor, with a
    linear ramp between the pairs that turn beta_fast and beta_slow times over the original
    positions.
    """
    pairs = np.arange(dim // 2)
    plain = theta ** (-2 * pairs / dim)
    if yarn is None:
        return plain

    def pair_that_turns(times: float) -> float:
        return dim * math.log(yarn.original_positions / (times * math.tau)) / (2 * math.log(theta))

    low, high = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    slow = np.clip((pairs - low) / (high - low if high != low else 0.001), 0, 1)
    mixed: NDArray[np.float64] = plain / yarn.factor * slow + plain * (1 - slow)
    return mixed


def tables(
    dim: int, theta: float, yarn: Yarn | None, positions: NDArray[np.int64]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin float32 [T, dim/2] at `positions`; each row depends on its position alone."""
    angles = positions[:, None].astype(np.float64) * frequencies(dim, theta, yarn)
    amplitude = yarn.amplitude if yarn else 1.0
    return (
        (np.cos(angles) * amplitude).astype(np.float32),
        (np.sin(angles) * amplitude).astype(np.float32),
    )
