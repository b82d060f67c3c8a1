"""`kconvert bench decode`: the three modes side by side on one prompt set."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from kconvert.layouts.errors import UnsupportedError
from kconvert.runtime.bench.prompts import BUDGETS, Report, configurations
from kconvert.runtime.distributed import ranks_from_environment
from kconvert.runtime.engine import Engine, Generation


def bench_decode(
    output: Path,
    drafter: Path,
    prompts: list[list[int]],
    new_tokens: int,
    dtype: str | None,
    report: Report,
    device: str = "auto",
) -> dict[str, Any]:
    """Tokens a second, target forwards and committed tokens a forward for `ar`, chains and trees of
    several budgets and of the budget `auto`; where a step's time goes (on a GPU also by its own
    time stamps); and the share of steps that `reached` each depth of their draft. Under torchrun,
    rank 0's clock counts."""
    ranks = ranks_from_environment(output)
    engine = Engine.open(output, drafter, dtype, ranks, device)
    engine.set_threads()
    report = report if ranks.rank == 0 else lambda _: None
    for prompt in prompts:
        engine.checked(prompt, new_tokens)
    engine.generate(prompts[0], 4, "ddtree", BUDGETS[-1])  # compiles
    engine.costs()
    for prompt in prompts:  # all modes write the same: none is the first to read an expert
        engine.generate(prompt, new_tokens)
    rows: list[dict[str, Any]] = []
    kinds: list[tuple[str, int | str]] = [("ar", 0), *configurations(BUDGETS, engine)]
    for mode, budget in [*kinds, ("ddtree", "auto")]:
        made = [engine.generate(prompt, new_tokens, mode, budget) for prompt in prompts]
        if not any(len(generation.tokens) > 1 for generation in made):
            raise UnsupportedError(
                "every prompt's text ends with its first token, which leaves nothing to measure:"
                " give other prompts."
            )
        rows.append({"mode": mode, "budget": budget, **summary(made)})
        report(json.dumps(rows[-1]))
    if engine.device == "cuda":
        from kconvert.runtime.bench.timeline import timeline

        for row in rows:
            row["timeline"] = timeline(engine, prompts[0], new_tokens, row["mode"], row["budget"])
    plain = rows[0]
    for row in rows:
        row["forwards_saved"] = plain["target_forwards"] / row["target_forwards"]
        row["speedup"] = row["tokens_per_second"] / plain["tokens_per_second"]
    return {
        "bench": "decode",
        "rank": ranks.rank,
        "tp": ranks.size,
        "date": time.strftime("%Y-%m-%d"),
        "dtype": engine.model.backend.dtype,
        "device": engine.device,
        "gpu_bytes": gpu_bytes() if engine.device == "cuda" else None,
        "prompts": len(prompts),
        "new_tokens": new_tokens,
        "rows": rows,
    }


def gpu_bytes() -> int:
    """Bytes of the GPU's memory in use, weights and CUDA's own included."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free


def summary(made: list[Generation]) -> dict[str, Any]:
    """Sums over prompts; the forwards and the time of the prompts themselves are left out."""
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
        "us_per_step": seconds / forwards * 1e6,
        "share": {name: part / seconds for name, part in sorted(parts.items())},
    }
