"""A step's rows: a drafted row reads what a committed one at its position would, in that order."""

import numpy as np
import pytest

from kconvert.runtime.backends.protocol import REACH
from kconvert.runtime.drafting.ddtree import Tree
from kconvert.runtime.step import drafted, sequence

SPLIT = 16


def tree(parents: list[int]) -> Tree:
    """A tree whose node i (from 1) hangs below node parents[i]; the root is row 0."""
    depths: list[int] = []
    for parent in parents[1:]:
        depths.append(1 + (depths[parent - 1] if parent else 0))
    return Tree(
        np.arange(100, 99 + len(parents)), np.array(depths), np.array(parents),
        np.zeros(len(parents) - 1),
    )  # fmt: skip


@pytest.mark.parametrize("start", [0, 1, REACH - 1, REACH, REACH + SPLIT, 100])
def test_committed_rows_read_every_position_up_to_their_own(start: int) -> None:
    step = sequence(np.arange(40), start, SPLIT)
    for row in range(40):
        own = start + row
        assert step.positions[row] == step.slots[row] == own
        assert step.prefix[row] % SPLIT == 0 and 0 <= step.prefix[row] <= max(own - REACH, 0)
        read = [*range(step.prefix[row]), *step.windows[row, : step.counts[row]]]
        assert read == [*range(own + 1)]


@pytest.mark.parametrize("start", [0, 5, 64])
def test_a_chain_is_what_committing_its_tokens_would_be(start: int) -> None:
    nodes = 6
    made = drafted(99, tree([-1, *range(nodes)]), start, SPLIT)
    plain = sequence(np.arange(99, 100 + nodes), start, SPLIT)
    for name in ("tokens", "positions", "slots", "prefix", "counts"):
        assert np.array_equal(getattr(made, name), getattr(plain, name)), name
    for row, count in enumerate(made.counts):
        assert np.array_equal(made.windows[row, :count], plain.windows[row, :count])


def test_siblings_read_their_ancestors_and_not_one_another() -> None:
    start = 50
    made = drafted(7, tree([-1, 0, 0, 1, 2]), start, SPLIT)  # two branches of two nodes
    for row, ancestors in enumerate([[], [0], [0], [0, 1], [0, 2]]):
        read = made.windows[row, : made.counts[row]]
        own = [start + a for a in (*ancestors, row)]
        assert list(read) == [*range(made.prefix[row], start), *own]
        assert made.positions[row] == start + len(ancestors)
