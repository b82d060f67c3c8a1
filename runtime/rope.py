"""Rotary positions with YaRN, as DeepSeek-V3 has them: cosines and sines by absolute position."""

import math

import numpy as np
from numpy.typing import NDArray

from kconvert.runtime.config import ModelConfig


def frequencies(config: ModelConfig) -> NDArray[np.float64]:
    """Radians a position for each of the rope_dim/2 pairs.

    YaRN (https://arxiv.org/abs/2309.00071, §3.2): fast pairs keep their frequency, slow ones are
    divided by the factor, a linear ramp lies between the dimensions that turn beta_fast and
    beta_slow times over the original positions.
    """
    half, theta = config.rope_dim // 2, config.rope_theta
    plain = theta ** (-np.arange(half) / half)
    if config.yarn is None:
        return plain
    yarn = config.yarn

    def dimension(turns: float) -> float:
        full = yarn.original_positions / (2 * math.pi * turns)
        return config.rope_dim * math.log(full) / (2 * math.log(theta))

    low = max(math.floor(dimension(yarn.beta_fast)), 0)
    high = min(math.ceil(dimension(yarn.beta_slow)), config.rope_dim - 1)
    ramp = np.clip((np.arange(half) - low) / max(high - low, 0.001), 0, 1)
    return plain / yarn.factor * ramp + plain * (1 - ramp)


def tables(
    config: ModelConfig, positions: NDArray[np.int64]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin float32 [T, rope_dim/2] at `positions`; a function of the position alone."""
    angles = positions[:, None].astype(np.float64) * frequencies(config)
    amplitude = config.rope_amplitude
    return (
        (np.cos(angles) * amplitude).astype(np.float32),
        (np.sin(angles) * amplitude).astype(np.float32),
    )
