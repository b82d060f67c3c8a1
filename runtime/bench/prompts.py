"""What `bench decode` and `bench exact` run on: prompts, modes, budgets."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from kconvert.layouts.errors import UnsupportedError
from kconvert.runtime.engine import Engine

BUDGETS = (1, 4, 7, 16, 33, 64)
Report = Callable[[str], None]


def read_prompts(path: Path, count: int | None) -> list[list[int]]:
    """The first `count` prompts of a JSON list of {"token_ids": [ids…], …}."""
    try:
        table = json.loads(path.read_text("utf-8"))
        prompts = [list(entry["token_ids"]) for entry in table]
    except (KeyError, RecursionError, TypeError, ValueError):
        prompts = []
    if not prompts or not all(type(token) is int for prompt in prompts for token in prompt):
        raise UnsupportedError(f'{path} is not a list of prompts, [{{"token_ids": [1, 2, …]}}, …].')
    return prompts[:count]


def configurations(budgets: Sequence[int], engine: Engine) -> list[tuple[str, int]]:
    """(mode, budget): chains are never longer than the drafter's block."""
    assert engine.drafter is not None
    longest = engine.drafter.config.block - 1
    chains = [("chain", budget) for budget in budgets if budget <= longest]
    return [*chains, *(("ddtree", budget) for budget in budgets)]
