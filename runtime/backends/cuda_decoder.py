"""Texts on a GPU: a step is one captured graph, draft to compaction, that takes no number from the
host. Committed tokens come through a ring in pinned memory; the host launches one step ahead."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kconvert.layouts.errors import CheckpointError, UnavailableError
from kconvert.runtime.backends.cuda import CudaBackend, sampling_tensor
from kconvert.runtime.backends.protocol import Sampling
from kconvert.runtime.clock import Clock
from kconvert.runtime.drafting.budget import CostCurve, Pauses
from kconvert.runtime.drafting.cuda_drafter import CudaDrafter
from kconvert.runtime.kernels.tree import launch as tree
from kconvert.runtime.model import Model
from kconvert.runtime.sampling import not_finite

BUCKETS = (1, 2, 4, 8, 16, 33, 65)  # rows of a captured step
MOST_NODES = tree.NODES
# Kinds of step: without a drafter; with one that only reads; with its draft; with a draft cut.
ALONE, PAUSED, DRAFTED, AUTO = "alone", "paused", "drafted", "auto"
PREFILL_ROWS = 1024
_ENTRIES = 16  # of the ring; at most two steps are under way
_PATIENCE = 60.0  # seconds that a step may take


@dataclass
class Round:
    """A captured step, and the tensors it leaves behind."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor  # float32 [rows, V / ranks]
    accepted: Tensor  # int32 [rows]


@dataclass(frozen=True)
class Drafts:
    """What is drafted: `width` choices at each depth, up to `budget` nodes; if `auto`, as many as
    pay."""

    width: int
    budget: int
    chain_seed: bool
    auto: bool


class CudaDecoder:
    """Runs one text at a time over one cache, which grows. Graphs are captured at first use."""

    def __init__(self, model: Model, drafter: CudaDrafter | None) -> None:
        self.model, self.drafter = model, drafter
        self._ops: CudaBackend = model.backend
        device = self._ops.device
        self._state = torch.zeros(tree.STATE, dtype=torch.int32, device=device)
        self._options = torch.zeros(5, dtype=torch.int32, device=device)
        self._seconds = torch.zeros(
            tree.NODES + 2 + tree.LEARNT, dtype=torch.float64, device=device
        )
        self._seconds[tree.NODES + 2 + tree.KEPT] = 1
        self._sampling = torch.zeros(2, dtype=torch.float64, device=device)
        self._ring = torch.zeros(
            _ENTRIES, tree.ROWS + tree.HEADER, dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self._entries = self._ring.numpy()
        self._rounds: dict[tuple[int, str], Round] = {}
        self._capacity = 0
        self.pauses = Pauses()
        self.forwards = 0

    def rounds(
        self,
        prompt: NDArray[np.int64],
        new_tokens: int,
        sampling: Sampling,
        drafts: Drafts | None,
        clock: Clock,
        keep_logits: bool,
        bucket: int | None = None,
        prompt_rows: int | None = None,
    ) -> Iterator[tuple[list[int], NDArray[np.float32]]]:
        """For each target forward, the committed tokens and, if they are kept, the logits they were
        chosen from. `bucket`: rows of the graph, if not the fewest that hold the draft."""
        self._reserve(len(prompt) + new_tokens + 3 * BUCKETS[-1])
        self.forwards = 0
        rows = bucket or bucket_of(1 + (drafts.budget if drafts else 0))
        if drafts and drafts.auto:  # what may be needed later is captured now
            self._round(1, PAUSED)
            for size in BUCKETS:
                self._round(size, AUTO)
            rows = BUCKETS[3]
        else:
            self._round(rows, DRAFTED if drafts else ALONE)
        self._begin(sampling, drafts)
        logits = self._prefill(prompt, prompt_rows or PREFILL_ROWS, drafts is not None)
        self._wait(1)
        tokens, _, _ = self._read(1)
        clock("prefill")
        yield tokens, self._ops.gather(logits) if keep_logits else _NOTHING
        launched = read = 1
        while True:
            while launched < read + (1 if keep_logits else 2):
                launched += 1
                made = self._launch(rows, drafts)
            read += 1
            clock("host")
            self._wait(read)
            clock("wait")
            tokens, count, pays = self._read(read)
            kept = _NOTHING
            if keep_logits:
                kept = self._ops.gather(made.logits)[made.accepted[: len(tokens)].cpu().numpy()]
            yield tokens, kept
            if drafts and drafts.auto:
                rows = bucket_of(2 * count if count == rows else count)
                if not self.pauses:
                    self.pauses.drafted(pays)

    def _launch(self, rows: int, drafts: Drafts | None) -> Round:
        if drafts and drafts.auto and self.pauses:
            self.pauses.over()
            made = self._round(1, PAUSED)
        else:
            kind = ALONE if not drafts else AUTO if drafts.auto else DRAFTED
            made = self._round(rows, kind)
            self.forwards += drafts is not None
        made.graph.replay()
        return made

    def _reserve(self, slots: int) -> None:
        if slots <= self._capacity:
            return
        self._rounds.clear()
        self._capacity = max(1024, 1 << (slots - 1).bit_length())
        self._cache = self._ops.new_cache(self._capacity)
        if self.drafter:
            self.drafter.reserve(self._capacity)

    def _begin(self, sampling: Sampling, drafts: Drafts | None) -> None:
        """Prepare the device for a text: wait until it is idle, and set its numbers."""
        torch.cuda.synchronize(self._ops.device)
        self._entries[:] = 0
        self._state.zero_()
        self._sampling.copy_(sampling_tensor(sampling, self._ops.device))
        if drafts and self.drafter:
            levels = self.drafter.config.block - 1
            numbers = levels, drafts.width, drafts.budget, drafts.chain_seed, drafts.auto
            self._options.copy_(torch.tensor(numbers, dtype=torch.int32))
        else:
            self._options.zero_()

    def _prefill(
        self, prompt: NDArray[np.int64], at_once: int, drafts: bool, first: int = 0
    ) -> Tensor:
        """Run the prompt from position `first` on, and choose the token after it. → The logits
        [1, V / ranks] it was chosen from."""
        aux = self.drafter.config.target_layer_ids if drafts and self.drafter else ()
        for begin in range(first, len(prompt), at_once):
            step = self._ops.sequence(prompt[begin : begin + at_once], begin)
            hidden, features = self.model.forward(step, self._cache, aux)
            if drafts and self.drafter:
                base = torch.tensor([begin], dtype=torch.int32).to(self._ops.device)
                self.drafter.extend(torch.cat(features, dim=1), base, None)
        self._state[tree.START] = len(prompt) - 1
        self._state[tree.COUNT] = 1
        last = self._ops.sequence(prompt[-1:], len(prompt) - 1)
        logits: Tensor = self.model.head(hidden[-1:])
        self._choose(logits, last, torch.empty(1, dtype=torch.int32, device=hidden.device), None)
        return logits

    def _choose(
        self, logits: Tensor, step: tree.StepRows, accepted: Tensor, learnt: Tensor | None
    ) -> None:
        values, tokens = self._ops.choices(logits, step, self._sampling)
        chosen = torch.empty_like(accepted)
        tree.walk(values, tokens, step, self._state, accepted, chosen, learnt, self._ring)

    def _round(self, rows: int, kind: str) -> Round:
        key = rows, kind
        if key not in self._rounds:
            self._state.zero_()
            self._options.zero_()
            self._step(*key)  # compiles and loads, which no capture may
            torch.cuda.synchronize(self._ops.device)
            graph = torch.cuda.CUDAGraph()
            # thread_local, as NCCL's own thread queries events meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                logits, accepted = self._step(*key)
            self._rounds[key] = Round(graph, logits, accepted)
        return self._rounds[key]

    def _step(self, rows: int, kind: str) -> tuple[Tensor, Tensor]:
        """Draft, grow, verify, pick, walk, compact; then extend the drafter's context. → The
        target's logits and the accepted rows."""
        ops, state = self._ops, self._state
        step = tree.empty_rows(rows, self._capacity // tree.SPLIT + 1, ops.device)
        drafter = self.drafter if kind != ALONE else None
        drafts = drafter is not None and kind != PAUSED
        if drafter and drafts:
            logits = drafter.draft(state)
            keys, sums = tree.top_k(logits, ops.first_token(logits))
            keys, sums = ops.exchange(keys), ops.exchange(sums)
        else:
            keys, sums = self._no_draft
        tree.grow(keys, sums, self._options if drafts else self._none, self._seconds, state, step)
        aux = drafter.config.target_layer_ids if drafter else ()
        hidden, features = self.model.forward(step, self._cache, aux)
        logits = self.model.head(hidden)
        accepted = torch.zeros(rows, dtype=torch.int32, device=ops.device)
        learnt = self._seconds[tree.NODES + 2 :] if kind == AUTO else None
        self._choose(logits, step, accepted, learnt)
        tree.compact(state, accepted, self._cache.keys)
        if drafter:
            context = torch.empty(
                drafter.config.block, drafter.config.features, dtype=torch.bfloat16,
                device=ops.device,
            )  # fmt: skip
            for i, layer in enumerate(features):
                tree.gather(state, accepted, layer, i * layer.shape[1], context)
            drafter.extend_accepted(context, state)
        return logits, accepted

    @cached_property
    def _no_draft(self) -> tuple[Tensor, Tensor]:
        device = self._ops.device
        keys = torch.zeros(1, 1, 1, tree.NODES, dtype=torch.int64, device=device)
        return keys, torch.zeros(1, 1, 1, 2, dtype=torch.float64, device=device)

    @cached_property
    def _none(self) -> Tensor:
        return torch.zeros(5, dtype=torch.int32, device=self._ops.device)

    def _wait(self, step: int) -> None:
        """Wait until a step has written what it committed."""
        entry = self._entries[(step - 1) % _ENTRIES]
        begin = time.perf_counter()
        while entry[0] != step:
            if time.perf_counter() - begin > _PATIENCE:
                torch.cuda.current_stream(self._ops.device).query()  # raises a kernel's error
                raise UnavailableError(
                    f"the GPU has not ended a step in {_PATIENCE:.0f} s: see whether another"
                    " program holds it (nvidia-smi), and run the same command again."
                )

    def _read(self, step: int) -> tuple[list[int], int, bool]:
        """The tokens that a step committed, its rows, and whether its draft paid."""
        entry = self._entries[(step - 1) % _ENTRIES]
        if entry[3] >= 0:
            raise not_finite(int(entry[3]))
        if entry[4]:
            raise CheckpointError(
                "the drafter's logits hold NaN or +inf: its weights are damaged or of another"
                " precision; download the drafter again."
            )
        count = int(entry[1])
        return entry[tree.HEADER : tree.HEADER + count].tolist(), int(entry[2]), bool(entry[5])

    def wrong_slot(self) -> int | None:
        """The first slot of the cache that is not as the last step should have left it: finite for
        a committed token, NaN for a rejected row."""
        start, _, before, _, count = self._state[:5].tolist()
        finite = self._cache.keys.isfinite().all(dim=2).all(dim=0)
        nan = self._cache.keys[:, start : before + count].isnan().all(dim=2).all(dim=0)
        wrong = torch.cat([~finite[:start], ~nan]).nonzero()
        return int(wrong[0]) if len(wrong) else None

    def unlike_tokens(self, count: int) -> NDArray[np.int64]:
        """Random tokens, which go to different experts, as a tree's do."""
        return np.random.default_rng(0).integers(self.model.config.vocabulary, size=count)

    def measure(self) -> CostCurve:
        """Measure the seconds of a step by its rows, and of a draft; `auto` cuts trees by them."""
        self._reserve(4 * BUCKETS[-1])
        tokens = self.unlike_tokens(BUCKETS[-1])
        points = []
        for rows in BUCKETS:
            step = self._ops.sequence(tokens[:rows], BUCKETS[-1])
            run = lambda step=step: self.model.head(self.model.forward(step, self._cache)[0])  # noqa: E731
            points.append((rows, seconds_of(captured(run, self._ops.device))))
        self._state.zero_()
        draft = seconds_of(captured(lambda: self.drafter.draft(self._state), self._ops.device))  # type: ignore[union-attr]
        # Clocks differ, and all ranks must cut the same trees: they take what rank 0 measured.
        points, draft = self._ops.ranks.broadcast((points, draft))
        curve = CostCurve.measured(points)
        table = [draft, *curve(np.arange(1, tree.NODES + 2)).tolist()]
        self._seconds[: tree.NODES + 2] = torch.tensor(table, dtype=torch.float64)
        return curve


_NOTHING = np.empty((0, 0), np.float32)


def bucket_of(rows: int) -> int:
    """The smallest bucket that holds so many rows, or the largest bucket."""
    return next((bucket for bucket in BUCKETS if bucket >= rows), BUCKETS[-1])


def captured(run: Callable[[], object], device: torch.device) -> torch.cuda.CUDAGraph:
    """One call of `run`, captured as a graph."""
    run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph


def seconds_of(graph: torch.cuda.CUDAGraph, repeats: int = 20) -> float:
    """The median time of a replay."""
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return float(np.median(times))
