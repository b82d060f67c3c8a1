"""The draft tree: the most probable continuations of one draft, verified in one target forward.

Formulas: DDTree, arXiv 2604.12989, sections 3 and 4. The drafter gives L independent marginals, one
for each depth; the probability of a path is their product. Node 0 is the root, the token that is
decided but that the target has not seen yet; nodes 1…n are drafts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kconvert.layouts.errors import CheckpointError, OptionError
from kconvert.layouts.numba_jit import jit


@dataclass(frozen=True, eq=False)
class Tree:
    """A draft tree of n nodes and its root; parents come before their children.

    `first(b)` of a tree of budget B ≥ b is the tree of budget b, with a chain seed or without.
    Without one, path probabilities never rise along the nodes: every prefix is the best tree of its
    size.
    """

    token_ids: NDArray[np.int64]  # [n], of nodes 1…n
    depths: NDArray[np.int64]  # [n], of nodes 1…n; a child of the root has depth 1
    parents: NDArray[np.int64]  # [n + 1], of nodes 0…n; the root's is −1
    path_logprobs: NDArray[np.float64]  # [n], of nodes 1…n; the root's would be 0

    def __len__(self) -> int:
        """n, the root not counted."""
        return len(self.token_ids)

    def first(self, budget: int) -> "Tree":
        """The tree of the first `budget` nodes, or of all if there are fewer."""
        n = _checked(budget)
        return Tree(
            self.token_ids[:n], self.depths[:n], self.parents[: n + 1], self.path_logprobs[:n]
        )


def top_k(logits: torch.Tensor, k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The K = min(k, V) most probable tokens of each row of `logits` (float32 [L, V]).

    Returns ids int64 [L, K], most probable first and ties to the lowest id, and their
    log-probabilities float32 [L, K]: float32 logit − float32 logsumexp of the row. A token whose
    logit is −inf has −inf, and so has every token of a row that is all −inf. Raises CheckpointError
    for NaN and +inf: no draft can be drawn from them.
    """
    values = logits.float().cpu().numpy()
    k = min(_checked(k), values.shape[1])
    ids, logprobs = np.empty((len(values), k), np.int64), np.empty((len(values), k), np.float32)
    least = np.partition(values, -k, axis=1)[:, -k] if k else values[:, 0]
    wrong = _top_k(values, least, ids, logprobs)
    if wrong >= 0:
        raise CheckpointError(
            f"the drafter's logits of slot {wrong + 1} hold NaN or +inf: its weights are"
            " damaged or of another precision; download the drafter again."
        )
    return ids, logprobs


@jit
def _top_k(logits, least, ids, best):  # type: ignore[no-untyped-def]
    """Sort the tokens that reach `least`, the k-th value of their row, into ids and best [L, K],
    and normalize them. → The first row with NaN or +inf, or −1."""
    k = ids.shape[1]
    for row in range(len(logits)):
        highest, total = logits[row].max(), 0.0
        for value in logits[row]:
            total += np.exp(value - highest)
        normalizer = highest + np.float32(np.log(total))
        if highest != -np.inf and not normalizer < np.inf:  # NaN too
            return row
        count = 0
        for token, value in enumerate(logits[row]):
            if value < least[row]:
                continue
            at = min(count, k)
            count += 1
            while at > 0 and value > best[row, at - 1]:  # an equal value with a lower id stays
                at -= 1
                if at + 1 < k:
                    ids[row, at + 1], best[row, at + 1] = ids[row, at], best[row, at]
            if at < k:
                ids[row, at], best[row, at] = token, value
        for at in range(k):
            if best[row, at] > -np.inf:
                best[row, at] -= normalizer
    return -1


def build_tree(
    ids: NDArray[np.int64],
    logprobs: NDArray[np.float32],
    budget: int,
    chain_seed: bool = False,
) -> Tree:
    """The tree of at most `budget` nodes over `top_k`'s ids and logprobs, both [L, K].

    Nodes come best first; of equal path probabilities, the lowest tuple of ranks along the path
    comes first. With `chain_seed` the top-1 chain comes before all others, which commits less at
    every budget measured. A node of probability zero is never made, so the tree may be smaller than
    the budget. It is the best tree of its size if K ≥ budget or K is the whole vocabulary.
    """
    seeds = len(ids) if chain_seed else 0
    return Tree(*_grow(ids, logprobs.astype(np.float64), _checked(budget), seeds))


def chain(ids: NDArray[np.int64], logprobs: NDArray[np.float32], budget: int) -> Tree:
    """Only the most probable token of each depth, at most `budget` of them: a tree too."""
    return build_tree(ids[:, :1], logprobs[:, :1], budget)


@jit
def _grow(ids, logprobs, budget, seeds):  # type: ignore[no-untyped-def]
    """token_ids, depths, parents and path_logprobs of the tree; its first `seeds` nodes are the
    top-1 chain's, if there are so many.

    Every node that is taken makes two candidates: its next sibling and its first child. Costs are
    float64 sums of float32 −log-probabilities, so that equal sums compare equal.
    """
    levels, width = logprobs.shape
    tokens, tree_depths = np.empty(budget, np.int64), np.empty(budget, np.int64)
    tree_parents, path_logprobs = np.full(budget + 1, -1), np.empty(budget)
    # Candidates. The first stands for the root, which is taken but is no node of the result.
    costs, parents = np.zeros(2 * budget + 3), np.zeros(2 * budget + 3, np.int64)
    depths = np.zeros(2 * budget + 3, np.int64)
    paths = np.full((2 * budget + 3, levels + 1), -1)  # ranks by depth
    count, best, node, on_chain = 1, 0, 0, True
    while True:
        cost, depth = costs[best], depths[best]
        costs[best] = np.inf  # taken
        if depth > 0:
            row, rank = logprobs[depth - 1], paths[best, depth - 1]
            tokens[node], tree_depths[node] = ids[depth - 1, rank], depth
            path_logprobs[node] = -cost
            node += 1
            tree_parents[node] = parents[best]
            if rank + 1 < width and row[rank + 1] > -np.inf:
                costs[count] = cost + row[rank] - row[rank + 1]
                parents[count], depths[count], paths[count] = parents[best], depth, paths[best]
                paths[count, depth - 1] += 1
                count += 1
        has_child = depth < levels and width > 0 and logprobs[depth, 0] > -np.inf
        if has_child:
            costs[count] = cost - logprobs[depth, 0]
            parents[count], depths[count], paths[count] = node, depth + 1, paths[best]
            paths[count, depth] = 0
            count += 1
        on_chain = on_chain and has_child and node < seeds
        best = count - 1 if on_chain else _cheapest(costs[:count], paths)
        if node == budget or costs[best] == np.inf:
            break
    return tokens[:node], tree_depths[:node], tree_parents[: node + 1], path_logprobs[:node]


@jit
def _cheapest(costs, paths):  # type: ignore[no-untyped-def]
    """The candidate with the least cost; of equal ones, the first by ranks. A look at all of them
    is quicker than a heap at these sizes."""
    best = 0
    for c in range(1, len(costs)):
        if costs[c] < costs[best] or (costs[c] == costs[best] and _before(paths[c], paths[best])):
            best = c
    return best


@jit
def _before(a, b):  # type: ignore[no-untyped-def]
    for i in range(len(a)):
        if a[i] != b[i]:
            return a[i] < b[i]
    return False


def walk(
    tree: Tree, next_token_of_node: Sequence[int] | NDArray[np.int64]
) -> tuple[NDArray[np.int64], int]:
    """Follow the target's own choices from the root, as long as a child carries them.

    `next_token_of_node` [n + 1]: the token that the target's row of each node chose. Returns the
    accepted nodes int64 [A], root first, and the bonus: the choice at the last of them, the next
    root.
    """
    choices = np.asarray(next_token_of_node, np.int64)
    if len(choices) != len(tree) + 1:
        raise ValueError(f"{len(choices)} tokens for {len(tree) + 1} nodes, the root included")
    accepted = _walk(tree.token_ids, tree.parents, choices)
    return accepted, int(choices[accepted[-1]])


@jit
def _walk(tokens, parents, choices):  # type: ignore[no-untyped-def]
    accepted, last = np.zeros(len(parents), np.int64), 0
    for node in range(1, len(parents)):  # children come after their parents
        parent = parents[node]
        if parent == accepted[last] and tokens[node - 1] == choices[parent]:
            last += 1
            accepted[last] = node
    return accepted[: last + 1]


def _checked(budget: int) -> int:
    if budget < 0:
        raise OptionError(f"the budget is {budget} nodes, expected 0 or more.")
    return budget
