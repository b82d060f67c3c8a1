"""Weights that nobody trained, made where they go: a rank's part of a model of any size.

Values are such that tokens stay apart through all layers, and so their experts: norms are one, the
embedding is N(0, 1), router and head N(0, 0.02), other matrices N(0, 1 / columns) by the rank's own
columns, experts random words with scales near a real checkpoint's.

Codes are −7 … 7, as often below zero as above. With −8 … 7 a matrix's mean is a little below zero,
which each layer multiplies: in 61 of K2.6's size tokens become alike and go to the same experts
(measured: 20 in place of 60 at 8 rows).
"""

import hashlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kconvert.layouts.experts import stacked_by_name
from kconvert.layouts.marlin import Marlin
from kconvert.layouts.sharding import Parallelism, rank_slice
from kconvert.runtime.config import ModelConfig
from kconvert.runtime.distributed import Ranks
from kconvert.runtime.drafting.sharding import Share
from kconvert.runtime.weights import Blobs

Fill = Callable[[Tensor, torch.Generator], object]
_KINDS = {"uint16": torch.bfloat16, "float32": torch.float32, "int32": torch.int32}
# Queries and keys of the drafter: so sharp that each row of a block looks at another token. Its
# rows are all the mask's but one, and would else draft the same.
_SHARP = 6.0


class MadeUp:
    """A tensor, or some of its rows or columns: what an array of it would say of itself, and what
    fills it. The same `name`, `seed` and `part` make the same values on a device."""

    def __init__(
        self, name: str, seed: int, shape: tuple[int, ...], dtype: Any, part: tuple[int, ...] = ()
    ) -> None:
        self._name, self._seed, self._part = name, seed, part
        self.shape, self.dtype = shape, np.dtype(dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> "MadeUp":
        begin, end, _ = rows.indices(len(self))
        shape = (end - begin, *self.shape[1:])
        return MadeUp(self._name, self._seed, shape, self.dtype, (*self._part, begin))

    @property
    def nbytes(self) -> int:
        """Bytes that it takes where it goes."""
        return int(np.prod(self.shape)) * int(self.dtype.itemsize)

    def into(self, target: Any) -> None:
        """Fill `target`, of this shape, a tensor or an array of integers."""
        tensor = target if isinstance(target, Tensor) else torch.from_numpy(target)
        fill(tensor.view(_KINDS[self.dtype.name]), self._name, self._seed, self._part)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        signed = np.empty(self.shape, f"i{self.dtype.itemsize}")
        self.into(signed)
        return signed.view(self.dtype)


def fill(tensor: Tensor, name: str, seed: int, part: tuple[int, ...] = ()) -> None:
    """Made-up values of the tensor called `name` in a checkpoint, into `tensor`."""
    if tensor.is_meta:  # only sizes are asked for
        return
    digest = hashlib.blake2b(f"{seed} {name} {part}".encode(), digest_size=7).digest()
    generator = torch.Generator(tensor.device).manual_seed(int.from_bytes(digest))
    _values(name)(tensor, generator)


def _values(name: str) -> Fill:
    owner = name.removesuffix(".weight").rpartition(".")[2]
    if name.endswith("_packed"):
        return _codes
    if name.endswith("_scale"):
        return lambda t, g: t.uniform_(0.002, 0.006, generator=g)
    if owner in ("q_norm", "k_norm"):
        return lambda t, _: t.fill_(_SHARP**0.5)
    if owner.endswith("norm"):
        return lambda t, _: t.fill_(1.0)
    if owner == "e_score_correction_bias":
        return lambda t, _: t.zero_()
    spread = {"embed_tokens": 1.0, "gate": 0.02, "lm_head": 0.02}.get(owner)
    return lambda t, g: t.normal_(0.0, spread or t.shape[1] ** -0.5, generator=g)


def _codes(tensor: Tensor, generator: torch.Generator) -> None:
    """Eight nibbles a word, 8 meaning 0: none is 0, those that were become 8."""
    for words in tensor.view(-1).split(1 << 28):  # what is taken beside the weights stays small
        words.random_(-(2**31), 2**31 - 1, generator=generator)
        zeros = words | words >> 1 | words >> 2 | words >> 3
        words |= (zeros.bitwise_not_() & 0x11111111) << 3


class MadeUpBlobs(Blobs):
    """One rank's view of a converted model that was never converted."""

    def __init__(self, config: ModelConfig, ranks: Ranks, seed: int) -> None:
        self._config, self._seed, self.rank = config, seed, ranks.rank
        self.layout = Marlin(config.quantization)
        self.manifest: Any = SimpleNamespace(tp=ranks.size, ep=1, layout=Marlin.name)

    def get(self, name: str, shape: tuple[int, ...]) -> Any:
        return MadeUp(name, self._seed, shape, np.float32 if name.endswith("bias") else np.uint16)

    def columns(self, name: str, shape: tuple[int, int], part: range) -> Any:
        return MadeUp(name, self._seed, (shape[0], len(part)), np.uint16, (part.start,))

    def stack(self, name: str) -> Any:
        assert self.layout is not None
        tensor, dims = stacked_by_name(name), self._config.dims
        mine = rank_slice(dims, Parallelism(self.manifest.tp, self.manifest.ep), self.rank)
        cut = tensor.cut(mine.rows, dims.hidden)
        shape = (len(mine.experts), *self.layout.shape(tensor.role, cut.n, cut.k))
        kind = np.int32 if tensor.role == "code" else np.uint16
        return MadeUp(name, self._seed, shape, kind, (self.rank,))

    def expert(self, name: str, local: int) -> Any:
        return np.asarray(self.stack(name))[local]


def drafter_weights(share: Share, seed: int, rank: int, device: torch.device) -> dict[str, Tensor]:
    """A rank's share of every tensor of a drafter, bf16."""
    shapes = share.config.shapes() | {"fc.weight": (share.config.hidden, len(share.features))}
    weights = {}
    for name, shape in shapes.items():
        weights[name] = torch.empty(shape, dtype=torch.bfloat16, device=device)
        whole = not share.is_part or len(shape) == 1
        fill(weights[name], name, seed, () if whole else (rank,))
    return weights
