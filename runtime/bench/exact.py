"""`kconvert bench exact`: every mode and budget against `ar`, bit for bit."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kconvert.layouts.errors import UnsupportedError
from kconvert.layouts.manifest import read_manifest
from kconvert.runtime.backends.protocol import DTYPES
from kconvert.runtime.bench.prompts import BUDGETS, Report, configurations
from kconvert.runtime.distributed import team_from_environment
from kconvert.runtime.engine import Engine
from kconvert.runtime.smoke import first_difference


def bench_exact(
    outputs: Sequence[Path],
    drafter: Path,
    prompts: list[list[int]],
    new_tokens: int,
    report: Report,
    temperatures: Sequence[float] = (0.0, 0.8),
    dtypes: Sequence[str] | None = None,
    device: str = "auto",
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
        engine = Engine.open(output, drafter, ranks=team.ranks, device=device)
        for prompt in prompts:
            engine.checked(prompt, new_tokens)
    rows, device = [], engine.device
    dtypes = dtypes or (DTYPES if device == "cpu" else ("bfloat16",))
    for output in outputs:
        for dtype in dtypes:
            engine = Engine.open(output, drafter, dtype, team.ranks, device)
            for temperature in temperatures:
                part = list(enumerate(prompts))[team.index :: team.count]
                rows += _exact_rows(engine, part, new_tokens, temperature, tell)
    rows = _merged(team.all_gather_object(rows), team.ranks.size)
    return {
        "bench": "exact",
        "rank": team.process,
        "tp": team.ranks.size,
        "device": device,
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
            for prompt, position in other["differ"].items():
                row["differ"][prompt] = min(position, row["differ"].get(prompt, position))
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
    kinds: list[tuple[str, int | str]] = [*configurations(BUDGETS, engine)]
    if engine.device == "cuda":  # on the CPU it drafts by the machine's noise
        kinds.append(("ddtree", "auto"))
    rows = [
        {
            "layout": engine.model.blobs.manifest.layout, "dtype": engine.model.backend.dtype,
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
            position = first_difference(made, truth, len(prompt))
            if position is not None:
                row["differ"][index] = position
            row["tokens"] += len(made.tokens)
            row["target_forwards"] += made.target_forwards
            row["ar_forwards"] += truth.target_forwards
    for row in rows:
        report(json.dumps(row))
    return rows
