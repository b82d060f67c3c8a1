"""Tokens drawn from logits: the right distribution, and the same draw wherever the row stands."""

import numpy as np
import pytest

from kconvert.layouts.errors import CheckpointError
from kconvert.runtime.sampling import pick

LOGITS = np.array([[0.0, 1.0, 2.0, -1.0, 1.0]], np.float32)


def drawn(temperature: float, seed: int, count: int = 40_000) -> np.ndarray:
    positions = np.arange(count)
    return pick(np.repeat(LOGITS, count, axis=0), positions, temperature, seed)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    expected = np.exp(LOGITS[0] / temperature)
    expected /= expected.sum()
    found = np.bincount(drawn(temperature, 7), minlength=5) / 40_000
    assert np.abs(found - expected).max() < 0.01  # four standard deviations


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    whole = drawn(1.0, 3, 64)
    for position in (0, 1, 63):
        assert pick(LOGITS, np.array([position]), 1.0, 3)[0] == whole[position]
    assert (drawn(1.0, 4, 64) != whole).any() and len(set(whole.tolist())) > 1


@pytest.mark.parametrize("temperature", [0.0, 1e-310, 1e-9])
def test_cold_is_greedy_with_ties_to_the_lowest_id(temperature: float) -> None:
    assert set(drawn(temperature, 1, 100).tolist()) == {2}
    if temperature == 0:
        tied = np.array([[1.0, 3.0, 3.0]], np.float32)
        assert pick(tied, np.array([0]), temperature, 0).tolist() == [1]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite(value: float) -> None:
    logits = np.repeat(LOGITS, 3, axis=0)
    logits[1, 4] = value
    with pytest.raises(CheckpointError, match="position 8 are not finite"):
        pick(logits, np.array([7, 8, 9]), 0.0, 0)
