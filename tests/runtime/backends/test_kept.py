"""Dequantized experts stay within a bound, the newest of them."""

import numpy as np

from kconvert.runtime.backends.kept import Kept
from kconvert.runtime.engine import Engine


def test_what_was_used_longest_ago_is_given_up() -> None:
    kept, made = Kept(300), []

    def get(key: str) -> None:
        def make() -> tuple[np.ndarray, ...]:
            made.append(key)
            return np.zeros(60, np.uint8), np.zeros(40, np.uint8)

        kept.get(key, make)
        assert kept.nbytes <= 300

    for key in "abcabdabcd":
        get(key)
    assert "".join(made) == "abcdcd"


def test_one_that_is_larger_than_the_bound_is_kept_alone() -> None:
    kept = Kept(10)
    for key in "ab":
        (array,) = kept.get(key, lambda: (np.zeros(100, np.uint8),))
        assert array.size == kept.nbytes == 100


def test_a_bound_costs_time_and_no_bit(mini) -> None:
    tokens = np.random.default_rng(0).integers(0, 512, 40).tolist()
    wide, narrow = (Engine.open(mini["marlin"]) for _ in range(2))
    narrow.model.backend.kept = Kept(1 << 20)
    assert np.array_equal(wide.logits(tokens), narrow.logits(tokens))
    assert narrow.model.backend.kept.nbytes <= 1 << 20 < wide.model.backend.kept.nbytes
