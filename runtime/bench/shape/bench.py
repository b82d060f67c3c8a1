"""`kconvert bench decode --shape`: the decode step of one rank, as the engine runs it."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from kconvert.layouts.errors import UnavailableError
from kconvert.runtime.backends.cuda_decoder import bucket_of, captured, seconds_of
from kconvert.runtime.bench.agreement import Recorded, recorded
from kconvert.runtime.bench.decode import gpu_bytes, summary
from kconvert.runtime.bench.moe import commit_here, versions_of
from kconvert.runtime.bench.shape.check import check
from kconvert.runtime.bench.shape.rank import (
    RankDecoder,
    drafter_config,
    nbytes_of,
    open_rank,
    some_tokens,
)
from kconvert.runtime.bench.timeline import timeline, where
from kconvert.runtime.config import ModelConfig, config_of
from kconvert.runtime.distributed import Ranks, all_ranks_from_environment
from kconvert.runtime.drafting.ddtree import Tree, build_tree
from kconvert.runtime.drafting.sharding import share_of
from kconvert.runtime.engine import Engine
from kconvert.runtime.kernels.nvrtc import sources_digest
from kconvert.runtime.kernels.tree.launch import StepRows

Report = Callable[[str], None]
Keep = Callable[[dict[str, Any]], object]
CONTEXTS = (1024, 8192, 32768)
CHECKED = (1024, 8192)  # contexts whose bits are compared
BUDGETS: tuple[int | str, ...] = (3, 7, 15, 32, "auto")
STEPS = 32  # of a text that is timed
_SEEN = 8  # of one that is looked at kernel by kernel
COLLAPSED = 0.9  # of the experts that unlike tokens touch: with fewer nothing is told of the time


class Verified(NamedTuple):
    """Drafted rows of a step: `texts`, each with a tree of so many rows."""

    texts: int
    rows: int


VERIFIED = (*(Verified(1, rows) for rows in (8, 16, 33, 65)), Verified(10, 9), Verified(10, 33))


def bench_shape(
    name: str,
    config: dict[str, Any],
    size: int,
    contexts: Sequence[int] = CONTEXTS,
    seed: int = 0,
    layers: int | None = None,
    checked: Sequence[int] | None = None,
    quick: bool = False,
    report: Report = print,
    keep: Keep = lambda _: None,
) -> dict[str, Any]:
    """A rank of `size` of the model that a parsed config.json describes, called `name`. Of torchrun
    the processes are the first ranks, and exchange for real. `layers`: only so many; `quick`: only
    few rows of one text. `checked`: contexts whose bits are compared before anything is timed, if
    not given those of CHECKED that are measured; if anything is wrong nothing is. `keep` is given
    what is there with every new row.

    Raises UnavailableError where there is no GPU or its memory is too small, UnsupportedError where
    the model is not one that the engine runs or does not divide.
    """
    if not torch.cuda.is_available():
        raise UnavailableError("bench decode --shape needs an NVIDIA GPU, torch finds none here.")
    here = all_ranks_from_environment().on_gpus()
    device = torch.device("cuda", torch.cuda.current_device())
    begin = time.perf_counter()
    read = config_of(config)
    read = replace(read, layers=layers or read.layers)
    engine = open_rank(read, size, here, seed, device)
    torch.cuda.synchronize(device)
    tell = report if here.rank == 0 else _nothing
    tell(f"{gpu_bytes() / 1e9:.1f} GB made in {time.perf_counter() - begin:.1f} s")
    result = {
        "bench": "decode",
        "shape": name,
        "rank": here.rank,
        "rank_of": size,
        "present": here.size,
        "exchange": exchange_text(size, here.size),
        "card": torch.cuda.get_device_name(device),
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions_of([]),
        "commit": commit_here(),
        "kernels": sources_digest()[:16],
        "seed": seed,
        "allocated_bytes": torch.cuda.memory_allocated(device),
        "layers": engine.model.config.layers,
    }
    if checked is None:
        checked = [context for context in CHECKED if context in contexts]
    rows: list[dict[str, Any]] = []
    with engine.model.backend.ranks.waiting():
        found = check(engine, checked, seed) if checked else None
        if found:
            everywhere = here.gather(np.array([found["right"]]))
            found["right"] = all(bool(right[0]) for right in everywhere)
            tell(str(found))
        result |= {"check": found, "gpu_bytes": gpu_bytes(), "rows": rows}
        keep(result)
        for row in (
            measured(engine, here, contexts, tell, quick) if not found or found["right"] else ()
        ):
            rows.append(row)
            keep(result | {"gpu_bytes": gpu_bytes()})
    return {**result, "gpu_bytes": gpu_bytes()}


def exchange_text(size: int, present: int) -> str:
    """What the ranks' exchange was."""
    if present == 1 < size:
        return f"none: 1 of {size} ranks is there, its kernels in the same places add its own sums"
    return f"between {present} of {size} ranks"


def measured(
    engine: Engine, here: Ranks, contexts: Sequence[int], tell: Report, quick: bool = False
) -> Iterator[dict[str, Any]]:
    """Every row of the table, from the shortest context on, as the cache grows with them; `quick`:
    only 1, 8, 16 and 33 rows of one text."""
    verified = VERIFIED[:3] if quick else VERIFIED
    budgets = () if quick else BUDGETS
    read, begin = Read.of(engine), time.perf_counter()
    for context in sorted(contexts):
        first = context == min(contexts)
        made = itertools.chain(
            (_text(engine, context, "ar", 0, first) for _ in range(1)),
            (_verified(engine, context, what, first) for what in verified),
            (_text(engine, context, "ddtree", budget, first) for budget in budgets),
        )
        for row in made:
            row |= read(row)
            ms = here.gather(np.array([row.get("ms", 0.0)]))
            if here.size > 1:
                row["ranks_ms"] = [round(float(value[0]), 4) for value in ms]
            said = {key: value for key, value in row.items() if key != "timeline"}
            tell(f"{time.perf_counter() - begin:6.1f} s {said}")
            yield row


def _text(
    engine: Engine, context: int, mode: str, budget: int | str, looked_at: bool
) -> dict[str, Any]:
    """Steps of one text, as a user's: ar, or trees of a budget."""
    prompt = some_tokens(engine.model, context, seed=context).tolist()
    engine.generate(prompt, 3, mode, budget)  # compiles, captures
    made = engine.generate(prompt, STEPS + 1, mode, budget)
    us = summary([made])["us_per_step"]
    row: dict[str, Any] = {"what": mode, "budget": budget, "texts": 1, "context": context}
    if budget != "auto":
        rows = 1 + int(budget)
        row |= {"rows": rows, "bucket": bucket_of(rows)}
        if mode != "ar":
            decoder: RankDecoder = engine.decoder  # type: ignore[assignment]
            row |= _experts(engine, lambda: decoder.again(bucket_of(rows)), rows)
    if row.get("collapsed"):
        return row
    row |= {
        "slots": engine.decoder.slots,  # type: ignore[union-attr]
        "ms": round(us / 1e3, 4),
        "committed": round(made.committed_per_forward, 3),
        "drafted_steps": made.drafter_forwards,
        "tokens_per_second": round(made.committed_per_forward / us * 1e6, 1),
    }
    if looked_at:
        row["timeline"] = _per_layer(engine, timeline(engine, prompt, _SEEN, mode, budget))
    return row


def _verified(engine: Engine, context: int, what: Verified, looked_at: bool) -> dict[str, Any]:
    """The target's part of a drafted step: forward, logits and choices, in a graph."""
    decoder: RankDecoder = engine.decoder  # type: ignore[assignment]
    step = drafted_rows(engine, what, context - 1)
    rows = len(step.tokens)
    row: dict[str, Any] = {
        "what": "verify", "budget": None, "texts": what.texts, "context": context, "rows": rows,
    }  # fmt: skip
    row |= _experts(engine, lambda: decoder.verify(step), rows)
    if row["collapsed"]:
        return row
    graph = captured(lambda: decoder.verify(step), step.tokens.device)
    seconds = seconds_of(graph)
    row |= {
        "slots": decoder.slots,
        "ms": round(seconds * 1e3, 4),
        "tokens_per_second": round(what.texts / seconds, 1),  # if no draft is accepted
    }
    if looked_at:
        row["timeline"] = _per_layer(engine, where(lambda: _replayed(graph)))
    return row


def _replayed(graph: torch.cuda.CUDAGraph) -> None:
    for _ in range(_SEEN):
        graph.replay()


def drafted_rows(engine: Engine, what: Verified, start: int) -> StepRows:
    """Trees below the newest token at position `start` of each text, of unlike tokens. Several
    texts have the tokens before it in common."""
    ops, (texts, rows) = engine.model.backend, what
    tokens = some_tokens(engine.model, texts * rows, seed=rows).reshape(texts, rows)
    shape = _tree(rows - 1)
    steps = []
    for text, mine in enumerate(tokens):
        tree = Tree(mine[1:], shape.depths, shape.parents, shape.path_logprobs)
        step, move = ops.drafted(int(mine[0]), start, tree), text * rows
        windows = torch.where(step.windows >= start, step.windows + move, step.windows)
        steps.append(replace(step, slots=step.slots + move, windows=windows))
    names = [field.name for field in fields(StepRows) if field.name != "parts"]
    joined = {name: torch.cat([getattr(step, name) for step in steps]) for name in names}
    return StepRows(**joined, parts=steps[0].parts)


def _tree(nodes: int) -> Tree:
    """The best tree of a drafter whose word falls with depth and halves with each rank."""
    levels, ranks = np.arange(7), np.arange(max(1, nodes))
    logprobs = -0.2 - 0.15 * levels[:, None] - 0.7 * ranks
    return build_tree(np.zeros(logprobs.shape, np.int64), logprobs.astype(np.float32), nodes)


def _experts(engine: Engine, run: Callable[[], object], rows: int) -> dict[str, Any]:
    """How many experts a layer's rows touch, on average and at least, and how many unlike tokens
    would."""
    with recorded(engine.model) as kept:
        run()
    counts = touched(kept)
    expected = expected_experts(engine.model.config, rows)
    mean = float(np.mean(counts))
    return {
        "experts": round(mean, 1), "experts_least": min(counts),
        "experts_expected": round(expected, 1), "collapsed": mean < COLLAPSED * expected,
    }  # fmt: skip


def touched(kept: Recorded) -> list[int]:
    """The experts that each layer's rows touch; a row past the count touches none."""
    return [len(np.unique(ids[ids >= 0])) for _, ids in kept.calls]


def expected_experts(config: ModelConfig, rows: int) -> float:
    """How many experts `rows` tokens touch if each chooses independently."""
    return config.experts * (1 - (1 - config.top_k / config.experts) ** rows)


class Read(NamedTuple):
    """Bytes that a rank's step reads at least: weights once, latents of the context once."""

    always: int  # all of the target but experts and embedding
    expert: int  # one in every layer
    drafter: int  # and the head again
    latents: int  # a token of context
    top_k: int

    @classmethod
    def of(cls, engine: Engine) -> "Read":
        weights, config = engine.model.weights, engine.model.config
        ranks = engine.model.backend.ranks
        shapes = [layer.moe.experts.shape for layer in weights.layers if layer.moe]
        everything = nbytes_of(weights) - nbytes_of(weights.embedding)
        share = share_of(drafter_config(config, ranks.size), ranks)
        return cls(
            always=everything - sum(shape.experts * shape.expert_bytes for shape in shapes),
            expert=sum(shape.expert_bytes for shape in shapes),
            drafter=share.nbytes + nbytes_of(weights.head),
            latents=config.layers * (config.kv_lora + config.rope_dim) * 2,
            top_k=config.top_k,
        )

    def __call__(self, row: dict[str, Any]) -> dict[str, int]:
        if row["budget"] == "auto":
            return {}
        experts = row.get("experts", self.top_k)
        drafter = self.drafter if row["what"] == "ddtree" else 0
        context = self.latents * row["context"]
        return {"bytes": round(self.always + experts * self.expert + drafter + context)}


def _per_layer(engine: Engine, seen: dict[str, Any]) -> dict[str, Any]:
    """With the launches of a MoE layer: of each kernel, those that every layer has."""
    config = engine.model.config
    layers = config.layers - config.first_moe
    return {**seen, "launches_a_layer": sum(
        int(count) // layers for count in seen.get("launched", {}).values()
    )}  # fmt: skip


def _nothing(_: str) -> None:
    return None
