"""One forward pass's rows: which token at which position, where its latent goes, what it reads."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kconvert.runtime.cpu_ops import REACH, SPLIT, prefix_length
from kconvert.runtime.ddtree import Tree

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Step:
    """Rows of a forward pass. A committed position's slot is the position itself."""

    tokens: Ints  # [T]
    positions: Ints  # [T], absolute
    slots: Ints  # [T], where the row's latent is written
    prefix: Ints  # [T], keys below are read in splits
    windows: Ints  # [T, W], slots of the positions prefix … position, in order
    counts: Ints  # [T], of which so many
    prefill: bool  # attention in its plain form, which is less work a key; else absorbed


def sequence(tokens: Ints, start: int) -> Step:
    """Committed tokens in a row, from position `start` on."""
    positions = np.arange(start, start + len(tokens))
    nothing = [np.empty(0, np.int64)] * len(tokens)
    return _step(tokens, positions, positions, nothing, positions + 1, prefill=True)


def drafted(anchor: int, tree: Tree, start: int) -> Step:
    """A committed token at position `start`, not yet run, and the drafted tree below it.

    Node i's latent goes to slot start + i; node i reads the committed positions, then its
    ancestors' slots and its own, which is the order a committed row reads the same values in.
    """
    tokens = np.concatenate([[anchor], tree.token_ids]).astype(np.int64)
    paths: list[Ints] = [np.array([start])]
    for node in range(1, len(tokens)):
        paths.append(np.append(paths[tree.parents[node]], start + node))
    depths = np.concatenate([[0], tree.depths]).astype(np.int64)
    slots = np.arange(start, start + len(tokens))
    committed = np.full(len(tokens), start)
    return _step(tokens, start + depths, slots, paths, committed, prefill=False)


def _step(
    tokens: Ints,
    positions: Ints,
    slots: Ints,
    paths: list[Ints],
    committed: Ints,
    prefill: bool,
) -> Step:
    """`committed[t]`: positions below it are read at their own slots, then come paths[t]."""
    prefix = prefix_length(positions)
    windows = np.zeros((len(tokens), SPLIT + REACH + 1), np.int64)
    counts = positions - prefix + 1
    for t, path in enumerate(paths):
        own = np.arange(prefix[t], committed[t])
        windows[t, : counts[t]] = np.concatenate([own, path])
    return Step(tokens, positions, slots, prefix, windows, counts, prefill)
