"""Where a step's time goes on the GPU, by CUPTI's time stamps of every kernel in its graph."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kconvert.runtime.engine import Engine

_AFTER = {"tree_grow": "verify", "tree_compact": "context"}  # the part that begins after a kernel
_LEAST = 20  # launches in a step: what has fewer is not a step


def timeline(
    engine: Engine, prompt: list[int], new_tokens: int, mode: str, budget: int | str
) -> dict[str, Any]:
    """`where` of the steps of one text."""
    engine.generate(prompt, new_tokens, mode, budget)
    return where(lambda: engine.generate(prompt, new_tokens, mode, budget))


def where(run: Callable[[], object]) -> dict[str, Any]:
    """About the graphs that `run` replays, in microseconds: the median time from one's last kernel
    to the next one's first, and from a step's first kernel to its last; its launches; the shares of
    its parts (draft, verify, tree: top-k to compaction, context: the drafter's); each kernel's time
    and launches. A kernel's time is from the end of the one before it to its own, as they
    overlap."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    steps: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            begin = event.start_ns()
            steps[event.correlation_id()].append((begin, begin + event.duration_ns(), event.name()))
    return summary(sorted(sorted(events) for events in steps.values() if len(events) > _LEAST))


def summary(graphs: list[list[tuple[int, int, str]]]) -> dict[str, Any]:
    """`where`'s table, from each replay's events: nanoseconds of begin and end, a kernel's name."""
    if len(graphs) < 3:
        return {"steps": len(graphs), "between_us": 0.0, "step_us": 0.0, "share": {}}
    kernels: dict[str, float] = defaultdict(float)
    launches: Counter[str] = Counter()
    parts: dict[str, float] = defaultdict(float)
    for events in graphs:
        last, phase = events[0][0], "draft"
        for _, end, name in events:
            took, last = max(0, end - last), max(last, end)
            kernels[name[:40]] += took
            launches[name[:40]] += 1
            parts["tree" if name.startswith("tree_") else phase] += took
            phase = _AFTER.get(name, phase)
    total = sum(kernels.values())
    between = [b[0][0] - max(e for _, e, _ in a) for a, b in itertools.pairwise(graphs)]
    length = [max(e for _, e, _ in g) - g[0][0] for g in graphs]
    ordered = sorted(kernels.items(), key=lambda item: -item[1])
    return {
        "steps": len(graphs),
        "between_us": float(np.median(between)) / 1e3,
        "step_us": float(np.median(length)) / 1e3,
        "launches": float(np.median([len(g) for g in graphs])),
        "share": {name: took / total for name, took in sorted(parts.items())},
        "kernels": {name: round(took / 1e3 / len(graphs), 2) for name, took in ordered},
        "launched": {name: round(launches[name] / len(graphs), 1) for name, _ in ordered},
    }
