"""The draft tree: the most probable continuations of one draft, verified in one target forward.

Formulas: DDTree, arXiv 2604.12989, sections 3 and 4. The drafter gives L independent marginals,
one a depth; the probability of a path is their product. Node 0 is the root, the token that is
decided but not yet seen by the target; nodes 1…n are drafts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

import numpy as np
import torch
from numpy.typing import NDArray

from kconvert.layouts.errors import CheckpointError, UnsupportedError

_IMPOSSIBLE = float("-inf")  # log-probability; `> _IMPOSSIBLE` is false for NaN too
# Cost (−log-probability of the path), rank at each depth of the path, parent: in the heap's order,
# in which the parent never decides, as no two nodes share their ranks.
_Node = tuple[float, tuple[int, ...], int]


@dataclass(frozen=True, eq=False)
class Tree:
    """A draft tree of n nodes and its root; parents come before their children.

    `first(b)` of a tree of budget B ≥ b is the tree of budget b, chain seed or not. Without the
    seed path probabilities never rise along the nodes: every prefix is the best tree of its size.
    """

    token_ids: NDArray[np.int64]  # [n], of nodes 1…n
    depths: NDArray[np.int64]  # [n], of nodes 1…n; a child of the root has depth 1
    parents: NDArray[np.int64]  # [n + 1], of nodes 0…n; the root's is −1
    path_logprobs: NDArray[np.float64]  # [n], of nodes 1…n, the root's being 0

    def __len__(self) -> int:
        """n, the root not counted."""
        return len(self.token_ids)

    @cached_property
    def children(self) -> tuple[dict[int, int], ...]:
        """Of each node 0…n: token id → the child that carries it."""
        children: tuple[dict[int, int], ...] = tuple({} for _ in self.parents)
        parents = self.parents.tolist()
        for node, token in enumerate(self.token_ids.tolist(), start=1):
            children[parents[node]][token] = node
        return children

    @cached_property
    def visibility(self) -> NDArray[np.bool_]:
        """[n + 1, n + 1]: row i is true on node i and its ancestors."""
        visible = np.eye(len(self.parents), dtype=bool)
        for node, parent in enumerate(self.parents[1:].tolist(), start=1):
            visible[node, :node] = visible[parent, :node]
        return visible

    def positions(self, start: int) -> NDArray[np.int64]:
        """int64 [n + 1]: absolute positions when the root is at `start`; siblings share one."""
        return np.concatenate([[start], start + self.depths])

    def first(self, budget: int) -> "Tree":
        """The tree of the first `budget` nodes, or of all where there are fewer."""
        n = _checked(budget)
        return Tree(
            self.token_ids[:n], self.depths[:n], self.parents[: n + 1], self.path_logprobs[:n]
        )


def top_k(logits: torch.Tensor, k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The K = min(k, V) most probable tokens of each row of `logits` (float32 [L, V]).

    Returns ids int64 [L, K], most probable first and ties to the lowest id, and their
    log-probabilities float32 [L, K]: float32 logit − float32 logsumexp of the row. A token of
    logit −inf has −inf, and so has all of a row that is −inf throughout. Raises CheckpointError
    for NaN and +inf: no draft can be drawn from them.
    """
    logits = logits.float()
    k = min(_checked(k), logits.shape[1])
    if k == 0:
        shape = (logits.shape[0], 0)
        return np.empty(shape, np.int64), np.empty(shape, np.float32)
    normalizer = torch.logsumexp(logits, dim=1, keepdim=True)
    # torch.topk does not say which of equal values it takes, so ids are chosen from all that
    # reach the k-th value.
    least = torch.topk(logits, k, dim=1).values.amin(dim=1, keepdim=True)
    rows = torch.cat([normalizer, least], dim=1).tolist()
    ids = np.empty((len(rows), k), np.int64)
    for depth, (total, bound) in enumerate(rows):
        if not total < float("inf"):  # NaN too
            raise CheckpointError(
                f"the drafter's logits of slot {depth + 1} hold NaN or +inf: its weights are"
                " damaged or of another precision."
            )
        reach = torch.nonzero(logits[depth] >= bound)[:, 0]  # rising ids
        order = torch.sort(logits[depth, reach], descending=True, stable=True).indices[:k]
        ids[depth] = reach[order].cpu().numpy()
    chosen = logits.gather(1, torch.from_numpy(ids).to(logits.device))
    logprobs = torch.where(chosen > _IMPOSSIBLE, chosen - normalizer, chosen)
    return ids, logprobs.cpu().numpy()


def build_tree(
    ids: NDArray[np.int64],
    logprobs: NDArray[np.float32],
    budget: int,
    chain_seed: bool = True,
) -> Tree:
    """The tree of at most `budget` nodes over `top_k`'s ids and logprobs, both [L, K].

    Nodes come best first, equal path probabilities by the path's tuple of ranks, lowest first.
    With `chain_seed` the top-1 chain comes before all others. A node of probability zero is never
    made, so the tree may be smaller than the budget. It is the best of its size if K ≥ budget or
    K is the whole vocabulary.
    """
    _checked(budget)
    # float64 from here on, so that sums of float32 log-probabilities that are equal compare equal.
    lps: list[list[float]] = logprobs.tolist()
    nodes: list[_Node] = []
    heap: list[_Node] = []

    def push_sibling(cost: float, ranks: tuple[int, ...], parent: int) -> None:
        row, rank = lps[len(ranks) - 1], ranks[-1]
        if rank + 1 < len(row) and row[rank + 1] > _IMPOSSIBLE:
            heappush(heap, (cost + row[rank] - row[rank + 1], (*ranks[:-1], rank + 1), parent))

    if chain_seed:
        nodes.extend(_chain(lps, budget))
        for node in nodes:
            push_sibling(*node)
    else:
        heap.extend(_chain(lps, 1))
    while heap and len(nodes) < budget:
        cost, ranks, parent = heappop(heap)
        nodes.append((cost, ranks, parent))
        push_sibling(cost, ranks, parent)
        depth = len(ranks)
        if depth < len(lps) and lps[depth][0] > _IMPOSSIBLE:
            heappush(heap, (cost - lps[depth][0], (*ranks, 0), len(nodes)))
    return _tree(ids, nodes)


def chain(ids: NDArray[np.int64], logprobs: NDArray[np.float32], budget: int) -> Tree:
    """Only the most probable token of each depth, at most `budget` of them: a tree too."""
    return _tree(ids, list(_chain(logprobs.tolist(), _checked(budget))))


def walk(
    tree: Tree, next_token_of_node: Sequence[int] | NDArray[np.int64]
) -> tuple[list[int], int]:
    """Follow the target's own choices from the root, as long as a child carries them.

    `next_token_of_node` [n + 1]: the token that the target's row of each node chose. Returns the
    accepted nodes, root first, and the bonus: the choice at the last of them, the next root.
    """
    if len(next_token_of_node) != len(tree) + 1:
        raise ValueError(
            f"{len(next_token_of_node)} tokens for {len(tree) + 1} nodes, the root included"
        )
    children, node, accepted = tree.children, 0, [0]
    while (child := children[node].get(int(next_token_of_node[node]))) is not None:
        accepted.append(child)
        node = child
    return accepted, int(next_token_of_node[node])


def _chain(lps: list[list[float]], budget: int) -> Iterator[_Node]:
    """The top-1 chain's nodes, down to the first depth where nothing is possible."""
    cost = 0.0
    for depth, row in enumerate(lps[:budget]):
        if not row or not row[0] > _IMPOSSIBLE:
            return
        cost -= row[0]
        yield cost, (0,) * (depth + 1), depth


def _tree(ids: NDArray[np.int64], nodes: list[_Node]) -> Tree:
    rows: list[list[int]] = ids.tolist()
    return Tree(
        np.array([rows[len(ranks) - 1][ranks[-1]] for _, ranks, _ in nodes], np.int64),
        np.array([len(ranks) for _, ranks, _ in nodes], np.int64),
        np.array([-1, *(parent for _, _, parent in nodes)], np.int64),
        np.array([-cost for cost, _, _ in nodes], np.float64),
    )


def _checked(budget: int) -> int:
    if budget < 0:
        raise UnsupportedError(f"a budget of {budget} nodes cannot be: give 0 or more.")
    return budget
