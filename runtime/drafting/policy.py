"""The drafting policy on the CPU: the drafter's context, and a tree or none below each token."""

import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kconvert.runtime.backends.protocol import REACH, HostBackend
from kconvert.runtime.clock import Clock
from kconvert.runtime.drafting.budget import Calibration, CostCurve, Pauses, rates
from kconvert.runtime.drafting.ddtree import Tree, chain, top_k
from kconvert.runtime.drafting.dflash import Drafter
from kconvert.runtime.model import Model

AUTO = "auto"
MOST_AUTO = 64
NO_TREE = Tree(
    np.empty(0, np.int64), np.empty(0, np.int64), np.array([-1]), np.empty(0, np.float64)
)


def measured_costs(model: Model) -> CostCurve:
    """Measure the seconds of this model's verify step on this machine, by its rows."""
    start = 2 * REACH
    cache = model.new_cache(start + MOST_AUTO + 1)
    points = []
    # Random tokens go to different experts, as a tree's do.
    tokens = np.random.default_rng(0).integers(model.config.vocabulary, size=MOST_AUTO + 1)
    for rows in (1, 2, 4, 8, 16, 32, MOST_AUTO + 1):
        step = model.backend.sequence(tokens[:rows], start)
        model.head(model.forward(step, cache)[0])  # touches weights, compiles
        for _ in range(3):
            begin = time.perf_counter()
            model.head(model.forward(step, cache)[0])
            points.append((rows, time.perf_counter() - begin))
    return CostCurve.measured(points)


class Drafting:
    """The drafter's side of a generation: its context, and a tree below each newest token."""

    def __init__(
        self,
        model: Model,
        drafter: Drafter,
        mode: str,
        budget: int | str,
        chain_seed: bool,
        costs: CostCurve | None,
        pauses: Pauses,
        calibration: Calibration,
        clock: Clock,
    ) -> None:
        """`costs`, `pauses` and `calibration` are for the budget "auto", whose only bound is
        MOST_AUTO."""
        self._model, self._drafter = model, drafter
        self._ops: HostBackend = model.backend
        self._mode, self._chain_seed, self._clock = mode, chain_seed, clock
        self._costs = costs
        self.most = MOST_AUTO if budget == AUTO else int(budget)
        self._pauses = pauses if budget == AUTO else Pauses()
        self._calibration = calibration
        self._promised: float | None = None  # by the newest tree, until it is verified
        self._waiting: list[NDArray[np.float32]] = []  # features to add before the next draft
        self.aux_layers = drafter.config.target_layer_ids
        self.forwards = 0
        drafter.reset()

    def commit(self, features: Sequence[NDArray[np.float32]]) -> None:
        """Take newly committed rows' outputs [T, D] of each of the target layers, in order."""
        self._waiting.append(np.concatenate(features, axis=1))
        if self._promised is not None:
            self._calibration.verified(self._promised, len(features[0]) - 1)
            self._promised = None

    def catch_up(self, but: int = 0) -> None:
        """Add what was committed, except the newest `but` steps, to the drafter's context."""
        ready = len(self._waiting) - but
        if ready > 0:
            self._drafter.extend(torch.from_numpy(np.concatenate(self._waiting[:ready])))
            del self._waiting[:ready]

    def __call__(self, token: int, start: int) -> Tree:
        """The tree below `token` at position `start`."""
        if self._pauses:
            self._pauses.over()
            return NO_TREE
        self.catch_up(but=1)  # what piled up in a pause does not count as a cost of drafting
        begin = time.perf_counter()
        self.catch_up()
        logits = self._drafter.draft(token, start, self._embed, self._head)
        seconds = time.perf_counter() - begin
        self.forwards += 1
        self._clock("draft")
        tree: Tree
        if self._mode == "chain":
            tree = chain(*top_k(logits, 1), self.most)
        else:
            ids, logprobs = top_k(logits, self.most)
            tree = self._ops.grow(ids, logprobs, self.most, self._chain_seed)
        pays = True
        if self._costs is not None:
            probabilities = np.exp(tree.path_logprobs)
            promised = rates(probabilities, self._costs, seconds, self._calibration.kept)
            tree = tree.first(int(promised.argmax()))
            pays = bool(promised.max() * self._costs(1) >= 1)
        # Clocks differ, and ranks draft together: all take what rank 0 found.
        tree, pays = self._ops.ranks.broadcast((tree, pays))
        self._pauses.drafted(pays)
        if self._costs is not None:
            self._promised = float(np.exp(tree.path_logprobs).sum())
        return tree

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self._ops.embed(self._model.weights.embedding, ids.numpy())
        return torch.from_numpy(rows)

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._model.head(hidden.float().contiguous().numpy())
        return torch.from_numpy(self._ops.gather(logits))
