"""The operations on the CPU: numpy arrays and numba's loops in float32, rounded to bf16 or not."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.quantization import dequantize
from kconvert.layouts.scan import widened
from kconvert.runtime import rope, sampling
from kconvert.runtime.backends import cpu_loops as loops
from kconvert.runtime.backends.kept import Kept
from kconvert.runtime.backends.protocol import ExpertSource, LatentNorms, Norm, Sampling, Source
from kconvert.runtime.cache import LatentCache
from kconvert.runtime.config import ModelConfig
from kconvert.runtime.distributed import Ranks
from kconvert.runtime.drafting.ddtree import Tree, build_tree, walk
from kconvert.runtime.step import Ints, Step, drafted, sequence

Array = NDArray[np.float32]
Matrix = tuple[Source, ...]

SPLIT = 64  # keys in a split of the committed prefix
EXPERT_BYTES = 4 << 30  # of dequantized experts, kept for later steps


class CpuBackend:
    """See protocol.py. Weights stay where they lie, mapped; experts are dequantized when they are
    first chosen."""

    def __init__(self, config: ModelConfig, ranks: Ranks, dtype: str) -> None:
        self.config, self.ranks, self.dtype = config, ranks, dtype
        self.kept = Kept(EXPERT_BYTES)
        self._bf16 = dtype == "bfloat16"
        self._scale = np.float32(config.softmax_scale)
        self._cos, self._sin = rope_tables(config, 0)

    def matrix(self, *parts: Source) -> Matrix:
        return parts

    def embedding(self, table: Source) -> Matrix:
        return (table,)

    def vector(self, values: Source) -> Source:
        return values

    def experts_of(self, source: ExpertSource) -> "Experts":
        return Experts(source, self.kept, self._bf16)

    def new_cache(self, slots: int) -> LatentCache:
        c = self.config
        if slots > len(self._cos):
            self._cos, self._sin = rope_tables(c, max(slots, 2 * len(self._cos)))
        return LatentCache(c.layers, slots, c.kv_lora + c.rope_dim)

    def sequence(self, tokens: Ints, start: int) -> Step:
        return sequence(tokens, start, SPLIT)

    def drafted(self, token: int, start: int, tree: Tree) -> Step:
        return drafted(token, tree, start, SPLIT)

    def embed(self, table: Matrix, tokens: Ints) -> Array:
        out = np.empty((len(tokens), table[0].shape[1]), np.float32)
        loops.embed(table[0], tokens, out)
        return out

    def linear(self, x: Array, weight: Matrix) -> Array:
        return self._linear(x, weight, self._bf16)

    def sums(self, x: Array, weight: Matrix) -> Array:
        return self._linear(x, weight, False)

    def gated(self, x: Array, weight: Matrix) -> Array:
        return self.silu_mul(self.linear(x, weight))

    def sums_gated(self, x: Array, weight: Matrix, sums: int) -> tuple[Array, Array]:
        assert len(weight[0]) == sums
        return self.sums(x, weight[:1]), self.gated(x, weight[1:])

    def _linear(self, x: Array, weight: Matrix, bf16: bool) -> Array:
        out = np.empty((len(x), sum(len(part) for part in weight)), np.float32)
        first = 0
        for part in weight:
            loops.linear(x, part, first, bf16, out)
            first += len(part)
        return out

    def add_norm(self, x: Array, sums: Array | None, norm: Norm) -> tuple[Array, Array]:
        if sums is not None:
            total = np.empty_like(x)
            loops.add(x, self.ranks.all_reduce(sums), self._bf16, total)
            x = total
        return x, self._norm(x, norm)

    def _norm(self, x: Array, norm: Norm) -> Array:
        out = np.empty_like(x)
        loops.norm_rows(x, norm.weight, np.float32(norm.epsilon), self._bf16, out)
        return out

    def store_latents(self, low: Array, norms: LatentNorms, step: Step, layer: Array) -> Array:
        c, (query, key) = self.config, norms
        q_low = np.ascontiguousarray(low[:, : c.q_lora])
        loops.store_latents(
            np.ascontiguousarray(low[:, c.q_lora :]), key.weight, np.float32(key.epsilon),
            step.positions, step.slots, self._cos, self._sin, c.kv_lora, self._bf16, layer,
        )  # fmt: skip
        return q_low if query is None else self._norm(q_low, query)

    def queries(self, q: Array, kv_b: Matrix, step: Step) -> Array:
        c = self.config
        q = q.reshape(len(q), -1, c.nope_dim + c.rope_dim)
        out = np.empty((*q.shape[:2], c.kv_lora + c.rope_dim), np.float32)
        loops.queries(q, self._heads(kv_b), step.positions, self._cos, self._sin, self._bf16, out)
        return out

    def attend(self, queries: Array, step: Step, layer: Array) -> Array:
        out = np.empty((*queries.shape[:2], self.config.kv_lora), np.float32)
        loops.attend(
            queries, layer, SPLIT, step.prefix, step.windows, step.counts, self._scale,
            self._bf16, out,
        )  # fmt: skip
        return out

    def expand(self, context: Array, kv_b: Matrix) -> Array:
        c = self.config
        out = np.empty((*context.shape[:2], c.value_dim), np.float32)
        loops.expand(context, self._heads(kv_b), c.nope_dim, self._bf16, out)
        return out.reshape(len(out), -1)

    def _heads(self, kv_b: Matrix) -> Source:
        """[H, nope + v, C]."""
        c = self.config
        return kv_b[0].reshape(-1, c.nope_dim + c.value_dim, c.kv_lora)

    def silu_mul(self, gate_up: Array) -> Array:
        """SiLU(gate) · up of [T, gate N | up N]: activations [T, N]."""
        out = np.empty((len(gate_up), gate_up.shape[1] // 2), np.float32)
        loops.silu_mul(gate_up, self._bf16, out)
        return out

    def route(self, logits: Array, bias: Source, step: Step) -> tuple[Ints, Array]:
        c = self.config
        ids = np.empty((len(logits), c.top_k), np.int64)
        weights = np.empty((len(logits), c.top_k), np.float32)
        loops.route(logits, bias, c.norm_topk, np.float32(c.routed_scale), ids, weights)
        return ids, weights

    def experts(
        self, h: Array, routing: tuple[Ints, Array], experts: "Experts", shared: Array | None
    ) -> Array:
        ids, weights = routing
        y = np.zeros((*ids.shape, h.shape[1]), np.float32)  # [T, k, D]
        for number in np.unique(ids):
            if number in experts.here:
                w13, w2 = experts[int(number)]
                loops.expert(h, ids, weights, number, w13, w2, self._bf16, y)
        out = np.zeros_like(h)
        loops.add_slots(y, out)
        return out if shared is None else out + shared

    def pick(self, logits: Array, step: Step, how: Sampling) -> Ints:
        first = self.ranks.rank * logits.shape[1]
        found = sampling.best(logits, step.positions + 1, how.temperature, how.seed, first)
        return sampling.chosen(self.ranks.gather(found), step.positions + 1)

    def gather(self, logits: Array) -> Array:
        return self.ranks.all_gather(logits)

    def grow(self, ids: Ints, logprobs: Array, budget: int, chain_seed: bool) -> Tree:
        return build_tree(ids, logprobs, budget, chain_seed)

    def walk(self, tree: Tree, chosen: Ints) -> tuple[Ints, int]:
        return walk(tree, chosen)

    def compact(self, cache: LatentCache, step: Step, accepted: Ints) -> None:
        cache.commit(step.slots, accepted)


class Weights(NamedTuple):
    """One expert: w13 [2N, D] and w2 [D, N], float32 exactly or bf16's bits."""

    w13: Source
    w2: Source


class Experts:
    """A layer's routed experts on this rank: dequantized when they are asked for."""

    def __init__(self, source: ExpertSource, kept: Kept, bf16: bool) -> None:
        self.here = source.experts
        self._source, self._kept, self._bf16 = source, kept, bf16

    def __getitem__(self, expert: int) -> Weights:
        """The expert with this number, dequantized: eight or four times the size of its codes."""
        key = self._source.layer, expert
        return Weights(*self._kept.get(key, lambda: tuple(self._made(expert))))

    def _made(self, expert: int) -> Weights:
        return Weights(*(
            weight_bits(self._source.codes(m, expert), self._source.scales(m, expert), self._bf16)
            for m in ("w13", "w2")
        ))  # fmt: skip


def weight_bits(codes: NDArray[np.int8], scales: Source, bf16: bool) -> Source:
    """codes [N, K] times scales [N, groups]: exact float32, or rounded to bf16's bits, uint16."""
    values = dequantize(codes, widen(scales))
    if not bf16:
        return values
    loops.rounded(values.reshape(-1), True)
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def widen(bits: Source) -> Array:
    """bf16 bits → float32; float32 as it is."""
    return bits if bits.dtype == np.float32 else widened(bits, "BF16")


def rope_tables(config: ModelConfig, positions: int) -> tuple[Array, Array]:
    """cos and sin float32 [positions, R/2]. Every backend takes them from here, so that their bits
    are the same."""
    return rope.tables(config.rope_dim, config.rope_theta, config.yarn, np.arange(positions))
