"""`kconvert bench exact`: every mode and budget against `ar`, bit for bit."""

import json
import time
from collections.abc import Sequence
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

from kconvert.layouts.errors import UnsupportedError
from kconvert.layouts.manifest import read_manifest
from kconvert.runtime.backends.protocol import DTYPES
from kconvert.runtime.bench.agreement import agreement
from kconvert.runtime.bench.prompts import BUDGETS, Report, configurations
from kconvert.runtime.bench.texts import NEW, cases, compare, rows_of
from kconvert.runtime.distributed import team_from_environment
from kconvert.runtime.engine import Engine

LONGEST = {"cpu": 1100, "cuda": 8192}  # tokens of a context, if not given
_COMPARED = 30  # prompts whose logits are compared with the CPU's


def bench_exact(
    outputs: Sequence[Path],
    drafter: Path,
    prompts: list[list[int]],
    new_tokens: int,
    report: Report,
    temperatures: Sequence[float] = (0.0, 0.8),
    dtypes: Sequence[str] | None = None,
    device: str = "auto",
    longest: int | None = None,
) -> dict[str, Any]:
    """Every mode and budget against `ar`, by the float32 bits of every committed logit.

    Each output, dtype, temperature, mode and budget gives a row: tokens compared, and the prompts
    that differ with their first differing position (there should be none). Then the same for longer
    texts, in contexts of up to `longest` tokens (texts.py); 0: none. Every rank compares its own
    logits. If there are more processes than ranks, each team of ranks takes some of the prompts.
    On a GPU, also how near its logits are to the CPU's (agreement.py).
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

    for output in outputs:  # refuse what cannot be run before hours of measuring
        engine = Engine.open(output, drafter, ranks=team.ranks, device=device)
        engine.set_threads()
        for prompt in prompts:
            engine.checked(prompt, new_tokens)
    rows, device = [], engine.device
    dtypes = dtypes or (DTYPES if device == "cpu" else ("bfloat16",))
    longest = LONGEST[device] if longest is None else longest
    for output in outputs:
        for dtype in dtypes:
            engine = Engine.open(output, drafter, dtype, team.ranks, device)
            engine.set_threads()
            for temperature in temperatures:
                part = list(enumerate(prompts))[team.index :: team.count]
                rows += _exact_rows(engine, part, new_tokens, temperature, tell)
                if longest:
                    mine = slice(team.index, None, team.count)
                    rows += _text_rows(engine, prompts, longest, mine, temperature, tell)
    near = None
    if device == "cuda":
        cpu = Engine.open(outputs[-1], None, "bfloat16", team.ranks, "cpu")
        near = agreement(engine, cpu, prompts[:_COMPARED])
        tell(json.dumps(near))
    rows = _merged(team.all_gather_object(rows), team.ranks.size)
    return {
        "bench": "exact",
        "rank": team.process,
        "tp": team.ranks.size,
        "device": device,
        "date": time.strftime("%Y-%m-%d"),
        "prompts": len(prompts),
        "new_tokens": new_tokens,
        "longest": longest,
        "exact": not any(row["differ"] for row in rows),
        "against_cpu": near,
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
    if engine.device == "cuda":  # on the CPU its trees depend on the machine's noise
        kinds.append(("ddtree", "auto"))
    rows: list[dict[str, Any]] = [
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
            compare(engine, row, index, made, truth, len(prompt))
    for row in rows:
        report(json.dumps(row))
    return rows


def _text_rows(
    engine: Engine,
    prompts: list[list[int]],
    longest: int,
    mine: slice,
    temperature: float,
    report: Report,
) -> list[dict[str, Any]]:
    longest = min(longest, engine.model.config.positions - NEW)
    text = list(islice(cycle(chain.from_iterable(prompts)), longest))
    head = {"layout": engine.model.blobs.manifest.layout, "dtype": engine.model.backend.dtype,
            "temperature": temperature}  # fmt: skip
    rows = [head | row for row in rows_of(engine, text, cases(engine, longest), mine, temperature)]
    for row in rows:
        report(json.dumps(row))
    return rows
