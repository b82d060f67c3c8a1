"""The DFlash drafter on a GPU: drafting/dflash.py's forward, without any number from the host. Each
of several ranks has a share of it (sharding.py); all grow the same tree."""

from typing import NamedTuple

import torch
from torch import Tensor

from kconvert.layouts.errors import UnsupportedError
from kconvert.runtime.backends.cuda import CudaBackend
from kconvert.runtime.backends.protocol import Norm
from kconvert.runtime.drafting.dflash import rope_frequencies, rope_tables
from kconvert.runtime.drafting.dflash_config import DrafterConfig
from kconvert.runtime.drafting.sharding import STEP, Share
from kconvert.runtime.kernels.drafter.launch import HeadShape, attend, heads
from kconvert.runtime.kernels.rows.launch import add_norm
from kconvert.runtime.kernels.tree.launch import ACCEPTED, BEFORE, LEVELS, START, TOKEN
from kconvert.runtime.model import Model


class Layer(NamedTuple):
    """A layer's weights; matrices that multiply the same rows are stacked."""

    input_norm: Tensor
    qkv: Tensor
    kv: Tensor
    head_norms: tuple[Tensor, Tensor]
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class CudaDrafter:
    """Weights, and keys and values of the context, whose length the text's state holds."""

    def __init__(self, share: Share, weights: dict[str, Tensor], model: Model) -> None:
        """`weights`: this rank's share of every tensor, bf16 on the device; they are removed from
        it. The sizes must have passed `check`."""
        # The sizes of this rank's share; rows that all ranks have keep their widths.
        self.config = config = share.config
        self._share, self._model = share, model
        self._ops: CudaBackend = model.backend
        self._device = self._ops.device

        def get(*names: str) -> Tensor:
            parts = [weights.pop(f"{name}.weight") for name in names]
            return torch.cat(parts) if len(parts) > 1 else parts[0]

        self._fc, self._hidden_norm, self._norm = get("fc"), get("hidden_norm"), get("norm")
        self._layers = []
        for i in range(config.layers):
            base, own = f"layers.{i}.", f"layers.{i}.self_attn."
            qkv = get(*(f"{own}{name}_proj" for name in "qkv"))
            self._layers.append(
                Layer(
                    input_norm=get(f"{base}input_layernorm"),
                    qkv=qkv,
                    kv=qkv[config.heads * config.head_dim :],
                    head_norms=(get(f"{own}q_norm"), get(f"{own}k_norm")),
                    output=get(f"{own}o_proj"),
                    mlp_norm=get(f"{base}post_attention_layernorm"),
                    gate_up=get(f"{base}mlp.gate_proj", f"{base}mlp.up_proj"),
                    down=get(f"{base}mlp.down_proj"),
                )
            )
        self._shape = HeadShape(config.heads, config.kv_heads, config.head_dim)
        self._tokens = torch.full(
            (config.block,), config.mask_token, dtype=torch.int32, device=self._device
        )

    def reserve(self, positions: int) -> None:
        """Make room for a context of so many positions."""
        c, positions = self.config, positions + self.config.block
        shape = positions, 2 * c.kv_heads, c.head_dim
        self._caches = [
            torch.zeros(shape, dtype=torch.bfloat16, device=self._device) for _ in self._layers
        ]
        factor = c.yarn.amplitude if c.yarn else 1.0
        tables = rope_tables(rope_frequencies(c), torch.arange(positions), factor)
        half = c.head_dim // 2
        cos, sin = (t[:, :half].contiguous().to(self._device) for t in tables)
        self._tables = cos, sin

    def extend(self, features: Tensor, base: Tensor, count: Tensor | None) -> None:
        """Add newly committed rows' features bf16 [T, F] from position `base` on; only the first
        `count` of them are there. Both are int32 on the device."""
        ops, mine = self._ops, self._share.features
        rows = features[:, mine.start : mine.stop].contiguous()
        _, context = self._add_norm(None, ops.sums(rows, self._fc), self._hidden_norm)
        for layer, cache in zip(self._layers, self._caches, strict=True):
            self._heads(ops.linear(context, layer.kv), base, count, layer, cache, only_keys=True)

    def extend_accepted(self, features: Tensor, state: Tensor) -> None:
        """The same for the rows that a step accepted."""
        self.extend(features, state[BEFORE:], state[ACCEPTED:])

    def draft(self, state: Tensor) -> Tensor:
        """This rank's columns of float32 logits [block − 1, V / ranks] below the newest token."""
        ops, c = self._ops, self.config
        self._tokens[:1].copy_(state[TOKEN : TOKEN + 1])
        start, sums = state[START:], None
        x = ops.embed(self._model.weights.embedding, self._tokens)
        for i, (layer, cache) in enumerate(zip(self._layers, self._caches, strict=True)):
            x, h = self._add_norm(x, sums, layer.input_norm)
            # After the context, where the next `extend` writes: nothing of a block stays.
            q = self._heads(ops.linear(h, layer.qkv), start, None, layer, cache)
            values = attend(q, cache, start, c.windows[i], c.causal[i], self._shape)
            x, h = self._add_norm(x, ops.sums(values, layer.output), layer.mlp_norm)
            sums = ops.sums(ops.gated(h, layer.gate_up), layer.down)
        _, h = self._add_norm(x, sums, self._norm)
        logits: Tensor = self._model.head(h[1:])
        return logits

    def _add_norm(
        self, x: Tensor | None, sums: Tensor | None, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """x + the sum of the ranks' sums [T, D], and it normed: bf16 [T, D] both."""
        if self._share.is_part:
            return self._ops.add_norm(x, sums, Norm(weight, self.config.eps))
        parts = None if sums is None else sums[None]
        return add_norm(x, parts, weight, self.config.eps)

    def _heads(
        self,
        x: Tensor,
        base: Tensor,
        count: Tensor | None,
        layer: Layer,
        cache: Tensor,
        only_keys: bool = False,
    ) -> Tensor:
        return heads(
            x, base, count, layer.head_norms, self.config.eps, self._tables, cache, self._shape,
            only_keys,
        )  # fmt: skip


def check(config: DrafterConfig) -> None:
    """Raise UnsupportedError for sizes that the kernels do not take."""
    sizes = (config.hidden, config.features, config.heads * config.head_dim, config.intermediate)
    if any(size % STEP for size in sizes) or config.head_dim not in (32, 64, 128):
        raise UnsupportedError(
            f"the drafter's sizes {', '.join(map(str, sizes))} and head_dim {config.head_dim}: the"
            f" GPU's kernels take multiples of {STEP} and 32, 64 or 128; use --device cpu."
        )
    if config.block - 1 > LEVELS:
        raise UnsupportedError(
            f"the drafter has block_size {config.block}, the GPU's kernels take at most"
            f" {LEVELS + 1}; use --device cpu."
        )
