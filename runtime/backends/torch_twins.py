"""The operations in plain torch, on any device: tests compare every backend's with them.

Roundings are those of the table in ../kernels/NOTES.md; sums are taken as torch takes them, in
float32 or, for a reference without rounding, in float64. They are not row-invariant, and not for
generating text.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kconvert.runtime import sampling
from kconvert.runtime.backends.cpu import SPLIT, rope_tables, weight_bits
from kconvert.runtime.backends.protocol import ExpertSource, LatentNorms, Norm, Sampling, Source
from kconvert.runtime.config import ModelConfig
from kconvert.runtime.distributed import Ranks
from kconvert.runtime.drafting.ddtree import Tree, build_tree, walk
from kconvert.runtime.step import Step, drafted, sequence

Pair = tuple[Tensor, Tensor]


class Cache:
    """Latents and rotated keys, [slots, C + R] a layer."""

    def __init__(self, layers: list[Tensor]) -> None:
        self.layers = layers


class TwinBackend:
    """See protocol.py. Activations are bfloat16; with dtype float32 (`wide`) nothing is rounded."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: str,
        device: str = "cpu",
        wide: torch.dtype = torch.float32,
    ) -> None:
        self.config, self.ranks, self.dtype = config, Ranks(), dtype
        self._device, self._wide = device, wide
        self._kind = torch.bfloat16 if dtype == "bfloat16" else wide
        self._bits = dtype == "bfloat16"
        self._cos, self._sin = (self._read(table) for table in rope_tables(config, 0))

    def _read(self, source: Source) -> Tensor:
        """A tensor of the blobs, which has bf16 as its bits, widened."""
        tensor = torch.from_numpy(np.ascontiguousarray(source))
        if tensor.dtype == torch.uint16:
            tensor = tensor.view(torch.bfloat16)
        return tensor.to(self._device, self._wide)

    def _rounded(self, values: Tensor) -> Tensor:
        return values.to(self._kind)

    def matrix(self, *parts: Source) -> Tensor:
        return torch.cat([self._read(part) for part in parts])

    def embedding(self, table: Source) -> Tensor:
        return self._read(table)

    def vector(self, values: Source) -> Tensor:
        return self._read(values)

    def experts_of(self, source: ExpertSource) -> dict[int, Pair]:
        def read(matrix: Any, number: int) -> Tensor:
            codes, scales = source.codes(matrix, number), source.scales(matrix, number)
            return self._read(weight_bits(codes, scales, self._bits))

        return {n: (read("w13", n), read("w2", n)) for n in source.experts}

    def new_cache(self, slots: int) -> Cache:
        c = self.config
        self._cos, self._sin = (self._read(table) for table in rope_tables(c, slots))
        shape = slots, c.kv_lora + c.rope_dim
        return Cache([
            torch.zeros(shape, dtype=self._kind, device=self._device) for _ in range(c.layers)
        ])  # fmt: skip

    def sequence(self, tokens: NDArray[np.int64], start: int) -> Step:
        return self._step(sequence(tokens, start, SPLIT))

    def drafted(self, token: int, start: int, tree: Tree) -> Step:
        return self._step(drafted(token, tree, start, SPLIT))

    def _step(self, step: Step) -> Step:
        fields: dict[str, Any] = {
            name: torch.from_numpy(value).to(self._device) for name, value in vars(step).items()
        }
        return replace(step, **fields)

    def embed(self, table: Tensor, tokens: Tensor) -> Tensor:
        return self._rounded(table[tokens])

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._rounded(self.sums(x, weight))

    def sums(self, x: Tensor, weight: Tensor) -> Tensor:
        return x.to(self._wide) @ weight.T

    def gated(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.silu_mul(self.linear(x, weight))

    def sums_gated(self, x: Tensor, weight: Tensor, sums: int) -> Pair:
        return self.sums(x, weight[:sums]), self.gated(x, weight[sums:])

    def add_norm(self, x: Tensor, sums: Tensor | None, norm: Norm) -> Pair:
        if sums is not None:
            x = self._rounded(x.to(self._wide) + sums)
        return x, self._norm(x, norm)

    def _norm(self, x: Tensor, norm: Norm) -> Tensor:
        values = x.to(self._wide)
        scale = (values.square().mean(-1, keepdim=True) + norm.epsilon).rsqrt()
        return self._rounded(norm.weight * (values * scale))

    def store_latents(self, low: Tensor, norms: LatentNorms, step: Any, layer: Tensor) -> Tensor:
        c = self.config
        q_low, latent, key = low.split([c.q_lora, c.kv_lora, c.rope_dim], dim=1)
        rotated = self._rotated(key[:, None], step)[:, 0]
        layer[step.slots] = torch.cat([self._norm(latent, norms.key), rotated], dim=1)
        return q_low if norms.query is None else self._norm(q_low, norms.query)

    def _rotated(self, x: Tensor, step: Any) -> Tensor:
        """RoPE on interleaved pairs of [T, H, R], each product and each sum rounded."""
        cos, sin = (table[step.positions][:, None] for table in (self._cos, self._sin))
        even, odd = x[..., ::2].to(self._wide), x[..., 1::2].to(self._wide)
        turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
        return self._rounded(turned.flatten(-2))

    def queries(self, q: Tensor, kv_b: Tensor, step: Any) -> Tensor:
        c = self.config
        heads = q.unflatten(1, (-1, c.nope_dim + c.rope_dim))
        plain, turned = heads.split([c.nope_dim, c.rope_dim], dim=2)
        keys = self._heads(kv_b)[:, : c.nope_dim]  # [H, nope, C]
        latent = torch.einsum("thn,hnc->thc", plain.to(self._wide), keys)
        return torch.cat([self._rounded(latent), self._rotated(turned, step)], dim=2)

    def attend(self, queries: Tensor, step: Any, layer: Tensor) -> Tensor:
        c, out = self.config, []
        for t, query in enumerate(queries.to(self._wide)):
            prefix, count = int(step.prefix[t]), int(step.counts[t])
            slots = torch.cat([
                torch.arange(prefix, device=layer.device), step.windows[t, :count].long(),
            ])  # fmt: skip
            keys = layer[slots].to(self._wide)
            weights = (query @ keys.T * c.softmax_scale).softmax(dim=1)
            out.append(weights @ keys[:, : c.kv_lora])
        return self._rounded(torch.stack(out))

    def expand(self, context: Tensor, kv_b: Tensor) -> Tensor:
        values = self._heads(kv_b)[:, self.config.nope_dim :]  # [H, v, C]
        out = torch.einsum("thc,hvc->thv", context.to(self._wide), values)
        return self._rounded(out.flatten(1))

    def _heads(self, kv_b: Tensor) -> Tensor:
        heads: Tensor = kv_b.unflatten(0, (-1, self.config.nope_dim + self.config.value_dim))
        return heads

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.to(self._wide).chunk(2, dim=1)
        return self._rounded(gate / (1 + (-gate).exp()) * up)

    def route(self, logits: Tensor, bias: Tensor, step: Any) -> Pair:
        c = self.config
        scores = logits.sigmoid()
        ids = (scores + bias).sort(dim=-1, descending=True, stable=True).indices[:, : c.top_k]
        weights = scores.gather(1, ids)
        if c.norm_topk:
            weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
        return ids, weights * c.routed_scale

    def experts(
        self, h: Tensor, routing: Pair, experts: dict[int, Pair], shared: Tensor | None
    ) -> Tensor:
        ids, weights = routing
        y = torch.zeros(*ids.shape, h.shape[1], dtype=self._kind, device=h.device)
        for number, (w13, w2) in experts.items():
            token, slot = (ids == number).nonzero(as_tuple=True)
            act = self.silu_mul(self.sums(h[token], w13))
            y[token, slot] = self._rounded(weights[token, slot, None] * self.sums(act, w2))
        out = torch.zeros(h.shape, dtype=self._wide, device=h.device)
        for k in range(ids.shape[1]):
            out += y[:, k].to(self._wide)
        return out if shared is None else out + shared

    def pick(self, logits: Tensor, step: Any, how: Sampling) -> Tensor:
        positions = (step.positions + 1).cpu().numpy()
        tokens = sampling.pick(self.gather(logits), positions, how.temperature, how.seed)
        return torch.from_numpy(tokens).to(logits.device)

    def gather(self, logits: Tensor) -> NDArray[np.float32]:
        return logits.float().cpu().numpy()

    def grow(
        self, ids: NDArray[np.int64], logprobs: NDArray[np.float32], budget: int, chain_seed: bool
    ) -> Tree:
        return build_tree(ids, logprobs, budget, chain_seed)

    def walk(self, tree: Tree, chosen: Tensor) -> tuple[NDArray[np.int64], int]:
        return walk(tree, chosen.cpu().numpy())

    def compact(self, cache: Cache, step: Any, accepted: NDArray[np.int64]) -> None:
        start, end = int(step.slots[0]), int(step.slots[0]) + len(accepted)
        for layer in cache.layers:
            layer[start:end] = layer[start + torch.from_numpy(accepted).to(layer.device)]
            layer[end : int(step.slots[-1]) + 1] = float("nan")
