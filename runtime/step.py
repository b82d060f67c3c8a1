"""One forward pass's rows: which token at which position, where its latent goes, what it reads."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.numba_jit import jit
from kconvert.runtime.backends.protocol import REACH
from kconvert.runtime.drafting.ddtree import Tree

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Step:
    """Rows of a forward pass. A committed position's slot is the position itself.

    Keys below `prefix` are read in splits of the backend's size. That boundary is a fixed function
    of the position, a multiple of a split, and at most position − REACH: nothing drafted is below
    it.
    """

    tokens: Ints  # [T]
    positions: Ints  # [T], absolute
    slots: Ints  # [T], where the row's latent is written
    prefix: Ints  # [T]
    windows: Ints  # [T, W], slots of the positions prefix … position, in order, then anything
    counts: Ints  # [T], how many slots of `windows` count


def sequence(tokens: Ints, start: int, split: int) -> Step:
    """Consecutive committed tokens, from position `start` on."""
    parents = np.arange(-1, len(tokens) - 1)
    return _step(tokens, np.arange(len(tokens)), parents, start, split)


def drafted(anchor: int, tree: Tree, start: int, split: int) -> Step:
    """A committed token at position `start`, not yet run, and the drafted tree below it.

    Node i's latent goes to slot start + i; node i reads the committed positions, then its
    ancestors' slots and its own: the same values in the same order as a committed row.
    """
    tokens, depths = np.append(anchor, tree.token_ids), np.append(0, tree.depths)
    return _step(tokens, depths, tree.parents, start, split)


def _step(tokens: Ints, depths: Ints, parents: Ints, start: int, split: int) -> Step:
    """Row i is `depths[i]` below the row at position `start`, and a child of row parents[i]."""
    positions, slots, prefix, counts = np.empty((4, len(tokens)), np.int64)
    windows = np.empty((len(tokens), split + REACH + 1), np.int64)
    _fill(start, depths, parents, split, positions, slots, prefix, windows, counts)
    return Step(tokens, positions, slots, prefix, windows, counts)


@jit
def _fill(start, depths, parents, split, positions, slots, prefix, windows, counts):  # type: ignore[no-untyped-def]
    for row in range(len(depths)):
        positions[row], slots[row] = start + depths[row], start + row
        prefix[row] = max(positions[row] - REACH, 0) // split * split
        counts[row] = positions[row] - prefix[row] + 1
        committed = max(start - prefix[row], 0)  # 0 if a prompt's own rows fill the window
        for i in range(committed):
            windows[row, i] = prefix[row] + i
        node = row
        for i in range(counts[row] - 1, committed - 1, -1):
            windows[row, i] = start + node
            node = parents[node]
