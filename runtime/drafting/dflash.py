"""The DFlash drafter: one forward that proposes a whole block of tokens.

Formulas: DFlash, arXiv 2602.06036; names and format are those of z-lab's Hugging Face folders. It
is a qwen3-like model whose attention also reads the target's features of every committed token
(the context), and whose embedding and head are the target's. It decides only how many drafts are
accepted, never which tokens are committed, so its rows need not be independent of one another.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Self

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional

from kconvert.layouts.checkpoint import Checkpoint, read_checkpoint
from kconvert.layouts.errors import CheckpointError, UnsupportedError
from kconvert.layouts.fields import CONFIG_NAME
from kconvert.runtime.drafting.dflash_config import WEIGHT_DTYPES, DrafterConfig, TargetDims
from kconvert.runtime.rope import frequencies

TableOrCall = Tensor | Callable[[Tensor], Tensor]
Rope = tuple[Tensor, Tensor]  # cosines, sines


class Drafter:
    """Weights, and keys and values of the context committed so far."""

    def __init__(self, config: DrafterConfig, weights: dict[str, Tensor]) -> None:
        """`weights`: every tensor of `config.shapes()`, all of one dtype and device."""
        self.config, self._weights = config, weights
        self._frequencies = rope_frequencies(config).to(weights["fc.weight"].device)
        empty = weights["fc.weight"].new_empty((config.kv_heads, 0, config.head_dim))
        # A layer's [kv_heads, capacity, head_dim]; keys are normed and rotated.
        self._keys = [empty] * config.layers
        self._values = [empty] * config.layers
        self._length = 0

    @classmethod
    def open(
        cls,
        folder: Path,
        target: TargetDims,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        attention_factor: float | None = None,
        causal_windows: bool = False,
    ) -> Self:
        """The drafter in a Hugging Face folder; the last two options are DrafterConfig's.

        Raises CheckpointError if the folder is damaged, UnsupportedError if the drafter is of
        another kind or for another target.
        """
        config = DrafterConfig.read(folder, attention_factor, causal_windows)
        return cls(config, read_weights(folder, config, target, dtype, device))

    @property
    def length(self) -> int:
        """The number of committed tokens in the context: they are at positions 0…length − 1."""
        return self._length

    def reset(self) -> None:
        """Forget the context; its memory is kept."""
        self._length = 0

    def cached(self, layer: int) -> tuple[Tensor, Tensor]:
        """The context's keys and values in `layer`, each [kv_heads, length, head_dim]."""
        return self._keys[layer][:, : self._length], self._values[layer][:, : self._length]

    @torch.no_grad()
    def context(self, features: Tensor) -> Tensor:
        """[T, features] outputs of the chosen target layers → [T, hidden], for all layers."""
        if features.ndim != 2 or features.shape[1] != self.config.features:
            raise ValueError(
                f"context features {list(features.shape)}: expected [T, {self.config.features}]"
            )
        fc = self._weights["fc.weight"]
        return self._norm(functional.linear(features.to(fc), fc), "hidden_norm")

    @torch.no_grad()
    def extend(self, context_features: Tensor) -> None:
        """Add T newly committed tokens at positions length…; `context_features` [T, features]."""
        context = self.context(context_features)
        rope = self._reserve(len(context))
        for layer in range(self.config.layers):
            self._store(layer, context, rope)
        self._length += len(context)

    @torch.no_grad()
    def draft(
        self, anchor_token: int, position: int, embed: TableOrCall, lm_head: TableOrCall
    ) -> Tensor:
        """float32 logits [block − 1, vocab]; row j is for the token at `position` + 1 + j.

        `anchor_token` is the newest token, at `position`: the first whose features are not yet in
        the context, so `position` is `length`. `embed` and `lm_head` are the target's: tables
        [vocab, hidden], or functions int64 [block] → [block, hidden] and [block − 1, hidden] →
        logits. Raises ValueError if the anchor is not there.
        """
        config = self.config
        if position != self._length:
            raise ValueError(
                f"an anchor at position {position}, but {self._length} tokens are committed"
            )
        if not 0 <= anchor_token < config.vocabulary:
            raise ValueError(f"anchor token {anchor_token} is not below {config.vocabulary}")
        fc = self._weights["fc.weight"]
        ids = torch.full((config.block,), config.mask_token, device=fc.device)
        ids[0] = anchor_token
        rows = embed[ids] if isinstance(embed, Tensor) else embed(ids)
        hidden = rows.to(fc)
        rope = self._reserve(config.block)
        for layer in range(config.layers):
            name = f"layers.{layer}"
            normed = self._norm(hidden, f"{name}.input_layernorm")
            # After the context, where the next `extend` writes: nothing of a block stays.
            self._store(layer, normed, rope)
            hidden = hidden + self._attend(layer, normed, rope)
            normed = self._norm(hidden, f"{name}.post_attention_layernorm")
            gate = functional.silu(self._project(normed, f"{name}.mlp.gate_proj"))
            up = self._project(normed, f"{name}.mlp.up_proj")
            hidden = hidden + self._project(gate * up, f"{name}.mlp.down_proj")
        drafts = self._norm(hidden, "norm")[1:]
        if isinstance(lm_head, Tensor):
            return functional.linear(drafts.to(lm_head), lm_head).float()
        return lm_head(drafts).float()

    def _attend(self, layer: int, normed: Tensor, rope: Rope) -> Tensor:
        """Attention of the block's rows to context and block, through o_proj: [block, hidden]."""
        config = self.config
        name = f"layers.{layer}.self_attn"
        queries = self._heads(normed, f"{name}.q_proj", f"{name}.q_norm")
        queries = rotate(queries, *rope)
        window, causal = config.windows[layer], config.causal[layer]
        end = self._length + config.block
        first = 0 if window is None else max(0, self._length - window + 1)
        seen = None
        if window is not None or causal:
            positions = torch.arange(first, end, device=normed.device)
            distance = positions - positions[-config.block :, None]
            seen = distance <= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
            if window is not None:
                seen &= distance.abs() < window
        attended = functional.scaled_dot_product_attention(
            queries[None],
            self._keys[layer][None, :, first:end],
            self._values[layer][None, :, first:end],
            attn_mask=seen,
            enable_gqa=True,
        )[0]
        return self._project(attended.transpose(0, 1).flatten(1), f"{name}.o_proj")

    def _store(self, layer: int, rows: Tensor, rope: Rope) -> None:
        """Write keys and values of `rows` [T, hidden] after the context."""
        name, end = f"layers.{layer}.self_attn", self._length + len(rows)
        keys = self._heads(rows, f"{name}.k_proj", f"{name}.k_norm")
        self._keys[layer][:, self._length : end] = rotate(keys, *rope)
        self._values[layer][:, self._length : end] = self._heads(rows, f"{name}.v_proj")

    def _heads(self, rows: Tensor, projection: str, norm: str = "") -> Tensor:
        """[T, hidden] → [heads, T, head_dim], each head normed if there is a norm."""
        heads = self._project(rows, projection).unflatten(1, (-1, self.config.head_dim))
        return (self._norm(heads, norm) if norm else heads).transpose(0, 1)

    def _project(self, rows: Tensor, name: str) -> Tensor:
        return functional.linear(rows, self._weights[f"{name}.weight"])

    def _norm(self, rows: Tensor, name: str) -> Tensor:
        """RMSNorm over the last dimension; the mean square in float32, as in the reference."""
        wide = rows.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.eps)
        return self._weights[f"{name}.weight"] * wide.to(rows.dtype)

    def _reserve(self, rows: int) -> Rope:
        """Make room for `rows` after the context. → The tables that rotate them."""
        end, capacity = self._length + rows, self._keys[0].shape[1]
        if end > capacity:
            more = (0, 0, 0, max(end, 2 * capacity) - capacity)
            self._keys = [functional.pad(keys, more) for keys in self._keys]
            self._values = [functional.pad(values, more) for values in self._values]
        positions = torch.arange(self._length, end, device=self._frequencies.device)
        factor = self.config.yarn.amplitude if self.config.yarn else 1.0
        return rope_tables(self._frequencies, positions, factor)


def read_weights(
    folder: Path,
    config: DrafterConfig,
    target: TargetDims,
    dtype: torch.dtype,
    device: str | torch.device,
    cut: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor,
) -> dict[str, Tensor]:
    """Every tensor of `config.shapes()`, or the part of it that `cut` keeps; only one at a time is
    whole in host memory. Raises what `Drafter.open` does."""
    config.check_target(target)
    checkpoint = read_checkpoint(folder)
    _check_tensors(folder, checkpoint, config.shapes())
    weights: dict[str, Tensor] = {}
    for shard in checkpoint.shards:
        with safe_open(folder / shard, "pt") as file:
            for name, tensor in checkpoint.tensors.items():
                if tensor.shard == shard:
                    weights[name] = cut(name, file.get_tensor(name)).to(device, dtype)
    return weights


def rope_frequencies(config: DrafterConfig) -> Tensor:
    """float32 [head_dim/2]: radians a position, from fast to slow, with YaRN if it is set."""
    radians = frequencies(config.head_dim, config.rope_theta, config.yarn)
    return torch.from_numpy(radians).float()


def rope_tables(frequencies: Tensor, positions: Tensor, factor: float) -> Rope:
    """Cosines and sines, float32 [T, head_dim], halves duplicated, times the attention factor."""
    angles = positions.float()[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=1)
    return angles.cos() * factor, angles.sin() * factor


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate-half RoPE of [heads, T, head_dim] by tables [T, head_dim]."""
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return heads * cosines.to(heads.dtype) + turned * sines.to(heads.dtype)


def _check_tensors(
    folder: Path, checkpoint: Checkpoint, shapes: dict[str, tuple[int, ...]]
) -> None:
    for name, shape in shapes.items():
        if name in checkpoint.absent:
            raise CheckpointError(
                f"{folder / checkpoint.absent[name]}, which has tensor {name}, is missing: download"
                " it."
            )
        tensor = checkpoint.tensors.get(name)
        if tensor is None:
            raise CheckpointError(
                f"the drafter in {folder} has no tensor {name}: download the drafter again."
            )
        if tensor.shape != shape or tensor.dtype not in WEIGHT_DTYPES:
            raise CheckpointError(
                f"{folder / tensor.shard}, tensor {name} is {tensor.dtype} {list(tensor.shape)},"
                f" expected {' or '.join(WEIGHT_DTYPES)} {list(shape)} from its {CONFIG_NAME}."
            )
    surplus = sorted((checkpoint.tensors.keys() | checkpoint.absent.keys()) - shapes.keys())
    if surplus:
        raise UnsupportedError(
            f"the drafter in {folder} has {len(surplus)} tensor(s) that a DFlash drafter does not,"
            f" {surplus[0]} among them."
        )
