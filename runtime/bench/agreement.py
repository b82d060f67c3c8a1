"""How near two engines' logits are, and where their routers choose different experts.

If two experts' scores differ by less than rounding moves them, the choice between them is a toss:
another device may take the other expert, and from there on the position's logits are another sum.
Such positions are counted, and left out of the comparison.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kconvert.runtime.engine import Engine
from kconvert.runtime.model import Model

NEAR = 3e-2  # of a row of logits, relative
TOSS = 1e-2  # between scores of experts, sigmoids: a few of bf16's roundings below one
MOST_TOSSES = 0.02  # of all positions


class Recorded:
    """A backend that keeps what its router was given and what it chose."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.calls: list[tuple[NDArray[np.float32], NDArray[np.int64]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def route(self, logits: Any, bias: Any, step: Any) -> Any:
        ids, weights = self._backend.route(logits, bias, step)
        scores = 1 / (1 + np.exp(-_numpy(logits).astype(np.float64))) + _numpy(bias)
        self.calls.append((scores.astype(np.float32), _numpy(ids).astype(np.int64)))
        return ids, weights


@contextmanager
def recorded(model: Model) -> Iterator[Recorded]:
    """Record what the model's routers are given and choose, while the block runs."""
    whole = model.backend
    model.backend = kept = Recorded(whole)
    try:
        yield kept
    finally:
        model.backend = whole


def agreement(
    engine: Engine, reference: Engine, prompts: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """For every position of the prompts, the relative distance of its logits, and whether its
    experts differ. `unlike`: positions whose experts differ though the reference's scores, in the
    first layer that differs, are further apart than TOSS: that is no toss, but an error."""
    distances, tossed, margins = [], [], []
    for prompt in prompts:
        found, mine = _run(engine, prompt)
        wanted, theirs = _run(reference, prompt)
        size = np.linalg.norm(wanted, axis=1)
        distances += (np.linalg.norm(found - wanted, axis=1) / size).tolist()
        for position in range(len(prompt)):
            apart = margin(mine, theirs, position)
            tossed.append(apart is not None)
            margins.append(apart or 0.0)
    rest = np.array(distances)[~np.array(tossed)]
    return {
        "positions": len(distances),
        "tossed": sum(tossed),
        "tossed_share": sum(tossed) / len(tossed),
        "widest_margin": max(margins),
        "unlike": sum(apart > TOSS for apart in margins),
        "median": float(np.median(rest)),
        "largest": float(rest.max()),
        "further_than_near": int((rest > NEAR).sum()),
    }


def _run(engine: Engine, prompt: Sequence[int]) -> tuple[NDArray[np.float32], list[Any]]:
    """Logits [T, V], and for each layer with experts the scores [T, E] and the choices [T, k]."""
    config = engine.model.config
    with recorded(engine.model) as kept:
        logits = engine.logits(prompt)
    layers = config.layers - config.first_moe
    return logits, [
        tuple(np.concatenate(parts) for parts in zip(*kept.calls[i::layers], strict=True))
        for i in range(layers)
    ]


def margin(mine: list[Any], theirs: list[Any], position: int) -> float | None:
    """How far apart, by the other's scores, the experts are that the two chose differently in the
    first layer where they did; None if they chose the same."""
    for (_, ids), (scores, others) in zip(mine, theirs, strict=True):
        a, b = set(others[position].tolist()), set(ids[position].tolist())
        if a != b:
            row = scores[position]
            return float(max(row[list(a - b)]) - min(row[list(b - a)]))
    return None


def _numpy(array: Any) -> NDArray[Any]:
    return array if isinstance(array, np.ndarray) else array.cpu().numpy()
