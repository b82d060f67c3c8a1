"""Rotary frequencies, with and without YaRN, against transformers' own."""

import math

import numpy as np
import pytest
from transformers import DeepseekV3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kconvert.runtime.rope import Yarn, frequencies, mscale, tables


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("dim", "theta", "factor"), [(64, 50_000.0, 64.0), (16, 1e4, 4.0)])
def test_yarn_is_transformers(dim: int, theta: float, factor: float, truncate: bool) -> None:
    rope = {
        "rope_type": "yarn", "rope_theta": theta, "factor": factor, "beta_fast": 32.0,
        "beta_slow": 1.0, "original_max_position_embeddings": 4096, "truncate": truncate,
    }  # fmt: skip
    config = DeepseekV3Config(head_dim=dim, qk_rope_head_dim=dim, rope_parameters=rope)
    wanted, amplitude = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    yarn = Yarn(factor, 4096, 32.0, 1.0, amplitude, truncate)
    assert np.allclose(frequencies(dim, theta, yarn), wanted.numpy(), rtol=2e-6)
    assert amplitude == pytest.approx(mscale(factor, 1.0))


def test_tables_depend_on_the_position_alone() -> None:
    positions = np.array([0, 3, 1_000_000])
    cos, sin = tables(8, 1e4, None, positions)
    assert cos.dtype == sin.dtype == np.float32
    for row, position in enumerate(positions):
        for pair in range(4):
            angle = float(position) * 1e4 ** (-2 * pair / 8)
            assert cos[row, pair] == np.float32(math.cos(angle))
            assert sin[row, pair] == np.float32(math.sin(angle))
        alone = tables(8, 1e4, None, positions[row : row + 1])
        assert np.array_equal(alone[0][0], cos[row]) and np.array_equal(alone[1][0], sin[row])
