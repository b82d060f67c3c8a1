"""`kconvert bench tree`: what a drafted step does beside its forward passes, at K2.6's sizes.

The drafter's top-k and the tree (grow); then each row's choice (pick), the accepted path (walk) and
the cache's slots after it (compact). Each part is repeated in one CUDA graph.
"""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kconvert.layouts.errors import UnavailableError
from kconvert.runtime.backends.cuda import sampling_tensor
from kconvert.runtime.backends.cuda_decoder import bucket_of
from kconvert.runtime.backends.protocol import Sampling
from kconvert.runtime.bench.moe import graph_us
from kconvert.runtime.kernels.tree import launch as tree

BUDGETS = (3, 7, 16, 32, 64)
GOALS = {"top-k and grow": {16: 30, 64: 60}, "walk and compact": {64: 10}}  # µs, one rank
RANKS = (1, 8)
VOCABULARY, LEVELS, LAYERS, WIDTH = 163_840, 7, 61, 576
_SLOTS = 8192  # more than all repeats can commit
_ACCEPTED = 3  # nodes, if the tree is as deep


def bench_tree(
    budgets: Sequence[int] = BUDGETS, report: Callable[[str], object] = print
) -> dict[str, Any]:
    """Microseconds of each part by budget, with the whole vocabulary and with an eighth of it.

    The exchange of keys and choices between ranks is left out (`bench exchange`). Raises
    UnavailableError without a CUDA GPU.
    """
    if not torch.cuda.is_available():
        raise UnavailableError("bench tree needs an NVIDIA GPU, and torch finds none here.")
    device = torch.device("cuda", torch.cuda.current_device())
    cache = torch.zeros(LAYERS, _SLOTS, WIDTH, dtype=torch.bfloat16, device=device)
    rows = []
    for ranks in RANKS:
        for budget in budgets:
            us = _times(_Case(ranks, budget, device), cache)
            rows.append({"ranks": ranks, "budget": budget, **us})
            report(f"{ranks} rank(s), budget {budget}: {us}")
    return {
        "bench": "tree",
        "card": torch.cuda.get_device_name(),
        "date": datetime.now(UTC).date().isoformat(),
        "vocabulary": VOCABULARY,
        "levels": LEVELS,
        "layers": LAYERS,
        "method": "each part repeated in a CUDA graph, median of 25 replays",
        "goals": GOALS,
        "rows": rows,
    }


class _Case:
    """A draft's logits, its tree, and choices, some of which follow it."""

    def __init__(self, ranks: int, budget: int, device: torch.device) -> None:
        size = VOCABULARY // ranks
        generator = torch.Generator(device).manual_seed(budget)
        normal = partial(torch.randn, device=device, generator=generator)
        self.drafted: Tensor = 3 * normal(LEVELS, size)
        shards = [self.drafted, *(3 * normal(LEVELS, size) for _ in range(ranks - 1))]
        found = [tree.top_k(shard, rank * size) for rank, shard in enumerate(shards)]
        self.keys, self.sums = (torch.stack(part) for part in zip(*found, strict=True))
        self.options = torch.tensor(
            [LEVELS, budget, budget, 0, 0], dtype=torch.int32, device=device
        )
        count = tree.NODES + 2
        self.seconds = torch.zeros(count + tree.LEARNT, dtype=torch.float64, device=device)
        self.seconds[count + tree.KEPT] = 1
        self.state = torch.zeros(tree.STATE, dtype=torch.int32, device=device)
        self.state[tree.COUNT] = 1
        self.step = tree.empty_rows(bucket_of(1 + budget), _SLOTS // tree.SPLIT + 1, device)
        self.grow()
        self.sampling = sampling_tensor(Sampling(0.0, 0), device)
        self.logits: Tensor = normal(len(self.step.tokens), size)
        self.path = self._follow(budget, size)
        values, tokens = tree.pick(self.logits, 0, self.step.positions, self.sampling)
        spread = [ranks, *values.shape]  # the other ranks' choices are no better
        self.values = values.expand(spread).contiguous()
        self.tokens = tokens.expand(spread).contiguous()
        self.accepted = torch.zeros_like(self.step.tokens)
        self.chosen = torch.zeros_like(self.step.tokens)
        self.ring = torch.zeros(16, tree.ROWS + tree.HEADER, dtype=torch.int32, pin_memory=True)

    def top_k(self) -> None:
        tree.top_k(self.drafted, 0)

    def grow(self) -> None:
        tree.grow(self.keys, self.sums, self.options, self.seconds, self.state, self.step)

    def pick(self) -> None:
        tree.pick(self.logits, 0, self.step.positions, self.sampling)

    def walk(self) -> None:
        tree.walk(
            self.values, self.tokens, self.step, self.state, self.accepted, self.chosen, None,
            self.ring,
        )  # fmt: skip

    def _follow(self, budget: int, size: int) -> int:
        """Let the rows choose a path of the tree whose tokens are this rank's. → Its nodes."""
        tokens, parents = self.step.tokens.tolist(), self.step.parents.tolist()
        row = found = 0
        for node in range(1, 1 + budget):
            if found < _ACCEPTED and parents[node] == row and tokens[node] < size:
                self.logits[row, tokens[node]] = 100.0
                row, found = node, found + 1
        return found


def _times(case: _Case, cache: Tensor) -> dict[str, Any]:
    def draft() -> None:
        case.top_k()
        case.grow()

    def follow() -> None:
        case.walk()
        tree.compact(case.state, case.accepted, cache)

    parts = {
        "top-k": case.top_k, "grow": case.grow, "top-k and grow": draft, "pick": case.pick,
        "walk": case.walk, "walk and compact": follow,
    }  # fmt: skip
    times = {}
    for name, part in parts.items():
        case.state.zero_()
        case.grow()  # each walk uses up the step that was grown
        times[name] = round(graph_us([part]), 2)
    return {"accepted": case.path, **times}
