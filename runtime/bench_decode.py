"""`kconvert bench decode` and `bench exact`: the three modes side by side on one prompt set."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kconvert.layouts.errors import UnsupportedError
from kconvert.layouts.manifest import read_manifest
from kconvert.runtime.engine import Engine, Generation
from kconvert.runtime.ranks import ranks_from_environment, team_from_environment
from kconvert.runtime.smoke import first_difference

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


def bench_exact(
    outputs: Sequence[Path],
    drafter: Path,
    prompts: list[list[int]],
    new_tokens: int,
    report: Report,
    temperatures: Sequence[float] = (0.0, 0.8),
    dtypes: Sequence[str] = ("float32", "bfloat16"),
) -> dict[str, Any]:
    """Every mode and budget against `ar`, by the float32 bits of every committed logit.

    A row an output, dtype, temperature, mode and budget: tokens compared, and the prompts that
    differ with their first differing position (there should be none). Every rank compares its own
    logits. Of more processes than an output has ranks each team takes some of the prompts.
    """
    sizes = sorted({read_manifest(output).tp for output in outputs})
    if len(sizes) > 1:
        raise UnsupportedError(
            f"the folders are for {' and '.join(map(str, sizes))} ranks: give those of one tp."
        )
    team = team_from_environment(sizes[0])

    def tell(row: str) -> None:
        if team.ranks.rank == 0:
            report(row if team.count == 1 else f"team {team.index + 1} of {team.count}: {row}")

    for output in outputs:  # what will be refused is refused before the hours of measuring
        engine = Engine.open(output, drafter, dtypes[0], team.ranks)
        for prompt in prompts:
            engine.checked(prompt, new_tokens)
    rows = []
    for output in outputs:
        for dtype in dtypes:
            engine = Engine.open(output, drafter, dtype, team.ranks)
            for temperature in temperatures:
                part = list(enumerate(prompts))[team.index :: team.count]
                rows += _exact_rows(engine, part, new_tokens, temperature, tell)
    rows = _merged(team.from_all(rows), team.ranks.size)
    return {
        "bench": "exact",
        "rank": team.process,
        "tp": team.ranks.size,
        "date": time.strftime("%Y-%m-%d"),
        "prompts": len(prompts),
        "new_tokens": new_tokens,
        "exact": not any(row["differ"] for row in rows),
        "rows": rows,
    }


def _merged(tables: list[list[dict[str, Any]]], size: int) -> list[dict[str, Any]]:
    """The processes' rows as one table: sums over teams of `size` ranks, what any rank found."""
    rows = tables[0]
    for process, table in enumerate(tables[1:], start=1):
        for row, other in zip(rows, table, strict=True):
            for prompt, place in other["differ"].items():
                row["differ"][prompt] = min(place, row["differ"].get(prompt, place))
            if process % size == 0:
                for name in ("tokens", "target_forwards", "ar_forwards"):
                    row[name] += other[name]
    return rows


def _exact_rows(
    engine: Engine,
    prompts: list[tuple[int, list[int]]],
    new_tokens: int,
    temperature: float,
    report: Report,
) -> list[dict[str, Any]]:
    kinds = configurations(BUDGETS, engine)
    rows = [
        {
            "layout": engine.model.blobs.layout.NAME, "dtype": engine.model.dtype,
            "temperature": temperature, "mode": mode, "budget": budget, "tokens": 0,
            "target_forwards": 0, "ar_forwards": 0, "differ": {},
        }
        for mode, budget in kinds
    ]  # fmt: skip
    for index, prompt in prompts:
        options: dict[str, Any] = {"temperature": temperature, "seed": index, "keep_logits": True}
        truth = engine.generate(prompt, new_tokens, **options)
        for row in rows:
            made = engine.generate(prompt, new_tokens, row["mode"], row["budget"], **options)
            place = first_difference(made, truth, len(prompt))
            if place is not None:
                row["differ"][index] = place
            row["tokens"] += len(made.tokens)
            row["target_forwards"] += made.target_forwards
            row["ar_forwards"] += truth.target_forwards
    for row in rows:
        report(json.dumps(row))
    return rows


def bench_decode(
    output: Path,
    drafter: Path,
    prompts: list[list[int]],
    new_tokens: int,
    dtype: str,
    report: Report,
) -> dict[str, Any]:
    """Tokens a second, target forwards and committed tokens a forward of `ar`, chains and trees
    of several budgets and of the budget `auto`, what each step's time goes to, and which share of
    the steps `reached` each depth of their draft. Started by torchrun, rank 0's clock counts."""
    ranks = ranks_from_environment()
    engine = Engine.open(output, drafter, dtype, ranks)
    report = report if ranks.rank == 0 else lambda _: None
    for prompt in prompts:
        engine.checked(prompt, new_tokens)
    engine.generate(prompts[0], 4, "ddtree", BUDGETS[-1])  # compiles
    engine.costs()
    for prompt in prompts:  # all modes write the same: none is the first to read an expert
        engine.generate(prompt, new_tokens)
    rows: list[dict[str, Any]] = []
    for mode, budget in [("ar", 0), *configurations(BUDGETS, engine), ("ddtree", "auto")]:
        made = [engine.generate(prompt, new_tokens, mode, budget) for prompt in prompts]
        if not any(len(generation.tokens) > 1 for generation in made):
            raise UnsupportedError(
                "every prompt's text ends with its first token, which leaves nothing to measure:"
                " give other prompts."
            )
        rows.append({"mode": mode, "budget": budget, **_summary(made)})
        report(json.dumps(rows[-1]))
    plain = rows[0]
    for row in rows:
        row["forwards_saved"] = plain["target_forwards"] / row["target_forwards"]
        row["speedup"] = row["tokens_per_second"] / plain["tokens_per_second"]
    return {
        "bench": "decode",
        "rank": ranks.rank,
        "tp": ranks.size,
        "date": time.strftime("%Y-%m-%d"),
        "dtype": dtype,
        "prompts": len(prompts),
        "new_tokens": new_tokens,
        "rows": rows,
    }


def _summary(made: list[Generation]) -> dict[str, Any]:
    """Sums over prompts; the prompts' own forwards and time are left out."""
    parts: dict[str, float] = {}
    for generation in made:
        for name, seconds in generation.parts.items():
            parts[name] = parts.get(name, 0.0) + seconds
    prefill = parts.pop("prefill", 0.0)
    seconds = sum(generation.seconds for generation in made) - prefill
    tokens = sum(len(generation.tokens) - 1 for generation in made)
    # The end of a text may cut its last step short.
    depths = np.array([n - 1 for generation in made for n in generation.accepted[1:-1]])
    forwards = sum(generation.target_forwards - 1 for generation in made)
    return {
        "tokens": tokens,
        "target_forwards": forwards,
        "committed_per_forward": tokens / forwards,
        "reached": [float((depths >= d).mean()) for d in range(1, max(depths, default=0) + 1)],
        "tokens_per_second": tokens / seconds,
        "share": {name: part / seconds for name, part in sorted(parts.items())},
    }
