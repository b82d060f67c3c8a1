"""The operations on a GPU: torch tensors, the kernels of ../kernels, bf16.

Every launch goes to torch's current stream, takes no number that the device computed, and can be
captured in a CUDA graph.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kconvert.layouts.errors import UnsupportedError
from kconvert.layouts.experts import STACKED
from kconvert.runtime.backends.cpu import rope_tables
from kconvert.runtime.backends.protocol import (
    REACH,
    ExpertSource,
    LatentNorms,
    Norm,
    Sampling,
    Source,
)
from kconvert.runtime.config import ModelConfig
from kconvert.runtime.distributed import Ranks
from kconvert.runtime.drafting.ddtree import Tree
from kconvert.runtime.filling.device import bits_of
from kconvert.runtime.kernels.attention import launch as attention
from kconvert.runtime.kernels.linear.launch import can_gate, linear_into
from kconvert.runtime.kernels.moe import launch as moe
from kconvert.runtime.kernels.moe.shape import MoeShape
from kconvert.runtime.kernels.rows import launch as rowwise
from kconvert.runtime.kernels.tree import launch as tree
from kconvert.runtime.kernels.tree.launch import SPLIT, WINDOW, StepRows
from kconvert.runtime.sampling import not_finite
from kconvert.runtime.step import drafted

Pair = tuple[Tensor, Tensor]
_SIGNED = {2: torch.int16, 4: torch.int32}
PEER_ROWS = 128  # at most in an exchange through shared memory: their blocks all run at once


@dataclass(frozen=True)
class Embedding:
    """This rank's rows of the embedding, the tokens from `first` on."""

    table: Tensor
    first: int


@dataclass(frozen=True)
class Experts:
    """A layer's routed experts on this rank."""

    weights: moe.MoeWeights
    shape: MoeShape


class Cache:
    """Latents and rotated keys, bf16 [layers, slots, C + R]."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys
        self.layers = list(keys)


class CudaBackend:
    """See protocol.py."""

    dtype = "bfloat16"

    def __init__(self, config: ModelConfig, ranks: Ranks, device: torch.device) -> None:
        self.config, self.ranks, self.device = config, ranks, device
        self.shape = attention.AttentionShape(
            heads=config.heads // ranks.size, q_lora=config.q_lora, kv_lora=config.kv_lora,
            nope=config.nope_dim, rope=config.rope_dim, value=config.value_dim,
        )  # fmt: skip
        # Few rows go through memory that the ranks share, many through NCCL: the bits are the same.
        self.peers = make_peers(ranks, PEER_ROWS, config.hidden, device)
        self._tables = self._rope(0)
        self._works: dict[int, moe.MoeWorkspace] = {}  # kept: graphs point into them

    # ---- weights

    def matrix(self, *parts: Source) -> Tensor:
        n, k = sum(map(len, parts)), parts[0].shape[1]
        whole, at = torch.empty(n, k, dtype=torch.bfloat16, device=self.device), 0
        for part in parts:
            self._fill(whole[at : at + len(part)], part)
            at += len(part)
        return whole

    def embedding(self, table: Source) -> Embedding:
        mine = self.ranks.rank_slice("tokens of the vocabulary", len(table))
        return Embedding(self.matrix(table[mine.start : mine.stop]), mine.start)

    def vector(self, values: Source) -> Tensor:
        kind = torch.bfloat16 if values.dtype == np.uint16 else torch.float32
        vector = torch.empty(values.shape, dtype=kind, device=self.device)
        self._fill(vector, values)
        return vector

    def _fill(self, target: Tensor, values: Source) -> None:
        """Copy an array into `target`, or have a filler bring it (filling/unread.py)."""
        if values.dtype.itemsize != target.element_size():
            raise UnsupportedError(
                f"a weight {list(values.shape)} is {values.dtype}: the GPU's kernels take BF16;"
                " run it with --device cpu."
            )
        if isinstance(values, np.ndarray):
            signed = np.array(values).view(f"i{values.dtype.itemsize}")
            target.view(_SIGNED[signed.itemsize]).copy_(torch.from_numpy(signed))
        else:
            values.into(bits_of(target))

    def experts_of(self, source: ExpertSource) -> Experts:
        """One piece of memory, as the rank's file has them, with four views of it."""
        c, stacks, at = self.config, [], 0
        sources = [source.stack(stacked.matrix, stacked.role) for stacked in STACKED]
        image = torch.empty(sum(s.nbytes for s in sources), dtype=torch.uint8, device=self.device)
        for stacked, values in zip(STACKED, sources, strict=True):
            kind = torch.int32 if stacked.role == "code" else torch.bfloat16
            stacks.append(image[at : at + values.nbytes].view(kind).view(values.shape))
            self._fill(stacks[-1], values)
            at += values.nbytes
        weights = moe.MoeWeights(*stacks)
        here, intermediate = len(weights.w2), weights.w2.shape[1] * 16
        shape = MoeShape(
            hidden=c.hidden, intermediate=intermediate, experts=here, top_k=c.top_k,
            group=intermediate // weights.w2_scale.shape[1], total_experts=c.experts,
            first_expert=source.experts.start,
        )  # fmt: skip
        return Experts(weights, shape)

    # ---- a text

    def new_cache(self, slots: int) -> Cache:
        c = self.config
        if slots > len(self._tables[0]):
            self._tables = self._rope(max(slots, 2 * len(self._tables[0])))
        shape = c.layers, slots, c.kv_lora + c.rope_dim
        return Cache(torch.zeros(shape, dtype=torch.bfloat16, device=self.device))

    def _rope(self, positions: int) -> Pair:
        cos, sin = (
            torch.from_numpy(t).to(self.device) for t in rope_tables(self.config, positions)
        )
        return cos, sin

    def sequence(self, tokens: NDArray[np.int64], start: int) -> StepRows:
        count = len(tokens)
        positions = torch.arange(start, start + count, dtype=torch.int32, device=self.device)
        prefix = (positions - REACH).clamp(min=0) // SPLIT * SPLIT
        window = torch.arange(WINDOW, dtype=torch.int32, device=self.device)
        return StepRows(
            tokens=torch.tensor(tokens, dtype=torch.int32).to(self.device),
            positions=positions, slots=positions, prefix=prefix, counts=positions - prefix + 1,
            parents=torch.arange(-1, count - 1, dtype=torch.int32, device=self.device),
            windows=prefix[:, None] + window, parts=(start + count - 1) // SPLIT + 1,
        )  # fmt: skip

    def drafted(self, token: int, start: int, drafts: Tree) -> StepRows:
        """See the protocol; in texts, the device grows the tree."""
        step = drafted(token, drafts, start, SPLIT)

        def int32(values: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(values.astype(np.int32)).to(self.device)

        return StepRows(
            tokens=int32(step.tokens), positions=int32(step.positions), slots=int32(step.slots),
            prefix=int32(step.prefix), counts=int32(step.counts), parents=int32(drafts.parents),
            windows=int32(step.windows[:, :WINDOW]).contiguous(),
            parts=int(step.positions.max()) // SPLIT + 1,
        )  # fmt: skip

    # ---- the forward pass

    def embed(self, table: Embedding, tokens: Tensor) -> Tensor:
        kind = torch.bfloat16 if self.ranks.size == 1 else torch.float32
        out = torch.empty(len(tokens), self.config.hidden, dtype=kind, device=self.device)
        rowwise.embed(tokens, table.table, table.first, out)
        return out if self.ranks.size == 1 else self.exchange(out).sum(0).bfloat16()

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._product(x, weight, torch.bfloat16)

    def sums(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._product(x, weight, torch.float32)

    def gated(self, x: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty(len(x), len(weight) // 2, dtype=torch.bfloat16, device=self.device)
        linear_into(x, weight, out, gated=True)
        return out

    def sums_gated(self, x: Tensor, weight: Tensor, sums: int) -> Pair:
        size = (len(weight) - sums) // 2
        if not can_gate(sums, size):
            return self.sums(x, weight[:sums]), self.gated(x, weight[sums:])
        wide = torch.empty(len(x), sums, dtype=torch.float32, device=self.device)
        out = torch.empty(len(x), size, dtype=torch.bfloat16, device=self.device)
        linear_into(x, weight, wide, out, gated=True)
        return wide, out

    def _product(self, x: Tensor, weight: Tensor, kind: torch.dtype) -> Tensor:
        out = torch.empty(len(x), len(weight), dtype=kind, device=self.device)
        linear_into(x, weight, out)
        return out

    def add_norm(self, x: Tensor | None, sums: Tensor | None, norm: Norm) -> Pair:
        if sums is not None and self.peers and len(sums) <= self.peers.most:
            return rowwise.add_norm(x, sums, norm.weight, norm.epsilon, self.peers)
        parts = None if sums is None else self.exchange(sums)
        return rowwise.add_norm(x, parts, norm.weight, norm.epsilon)

    def exchange(self, sums: Tensor) -> Tensor:
        """Every rank's sums, [ranks, *shape], in rank order."""
        if self.ranks.size == 1:
            return sums[None]
        return self.ranks.all_gather_tensor(sums)

    def store_latents(
        self, low: Tensor, norms: LatentNorms, step: StepRows, layer: Tensor
    ) -> Tensor:
        query, key = norms
        return attention.store(
            low, query.weight if query else None, key.weight, key.epsilon, step.positions,
            step.slots, self._tables, layer, self.shape,
        )  # fmt: skip

    def queries(self, q: Tensor, kv_b: Tensor, step: StepRows) -> Tensor:
        return attention.queries(q, kv_b, step.positions, self._tables, self.shape)

    def attend(self, queries: Tensor, step: StepRows, layer: Tensor) -> Tensor:
        return attention.attend(
            queries, layer, step.positions, step.prefix, step.counts, step.windows, step.parts,
            self.config.softmax_scale, self.shape,
        )  # fmt: skip

    def expand(self, context: Tensor, kv_b: Tensor) -> Tensor:
        return attention.expand(context, kv_b, self.shape)

    def route(self, logits: Tensor, bias: Tensor, step: StepRows) -> Pair:
        rows, k = len(logits), self.config.top_k
        ids = torch.empty(rows, k, dtype=torch.int32, device=self.device)
        weights = torch.empty(rows, k, device=self.device)
        scale = self.config.routed_scale
        moe.router_into(logits, bias, scale, ids, weights, step.counts)
        return ids, weights

    def experts(self, h: Tensor, routing: Pair, experts: Experts, shared: Tensor | None) -> Tensor:
        ids, weights = routing
        work = self._workspace(experts.shape, len(h))
        out = torch.empty(h.shape, device=self.device)
        moe.align(ids, experts.shape, work)
        moe.experts(h, ids, weights, experts.weights, experts.shape, work, out, shared)
        return out

    def _workspace(self, shape: MoeShape, rows: int) -> moe.MoeWorkspace:
        size = max(128, 1 << (rows - 1).bit_length())
        if size not in self._works:
            self._works[size] = moe.MoeWorkspace(shape, size, self.device)
        return self._works[size]

    # ---- tokens and drafts

    def first_token(self, logits: Tensor) -> int:
        """The token of this rank's first column of logits."""
        return self.ranks.rank * logits.shape[1]

    def choices(self, logits: Tensor, step: StepRows, sampling: Tensor) -> Pair:
        """All ranks' best values and tokens [ranks, T, chunks]; `sampling` as `sampling_tensor`."""
        values, tokens = tree.pick(logits, self.first_token(logits), step.positions, sampling)
        return self.exchange(values), self.exchange(tokens)

    def pick(self, logits: Tensor, step: StepRows, how: Sampling) -> Tensor:
        values, tokens = (
            a.cpu() for a in self.choices(logits, step, sampling_tensor(how, self.device))
        )
        values, tokens = values.transpose(0, 1).flatten(1), tokens.transpose(0, 1).flatten(1)
        wrong = values.isnan().any(1)
        if wrong.any():
            raise not_finite(int(step.positions.cpu()[wrong.int().argmax()]) + 1)
        return tokens.gather(1, values.argmax(1, keepdim=True))[:, 0].long()

    def gather(self, logits: Tensor) -> NDArray[np.float32]:
        parts = self.exchange(logits)  # [ranks, T, V / ranks]
        return parts.transpose(0, 1).flatten(1).cpu().numpy()


def make_peers(ranks: Ranks, rows: int, size: int, device: torch.device) -> rowwise.Peers | None:
    """Shared memory for exchanges of `rows` rows; None for one rank. All ranks call it."""
    memory = ranks.shared_memory(rowwise.peer_bytes(ranks.size, rows, size), device)
    if memory is None:
        return None
    addresses, owner = memory
    epochs = torch.zeros(rows, dtype=torch.int32, device=device)
    table = torch.tensor(addresses, dtype=torch.int64).to(device)
    return rowwise.Peers(table, ranks.rank, rows, epochs, owner)


def sampling_tensor(how: Sampling, device: torch.device) -> Tensor:
    """float64 [2]: the temperature, and the bits of the seed."""
    seed = np.array([how.seed], np.uint64).view(np.float64)[0]
    return torch.from_numpy(np.array([how.temperature, seed])).to(device)
