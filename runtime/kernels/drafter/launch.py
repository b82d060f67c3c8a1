"""The launches of the drafter's attention."""

from typing import NamedTuple

import torch
from torch import Tensor

from kconvert.runtime.kernels.gpu import launch

_LINES, _SPLITS = 64, 8  # rows of heads a block of attend has, and blocks that share the keys


class HeadShape(NamedTuple):
    """Heads of queries, of keys and values, and their size."""

    queries: int
    keys: int
    dim: int

    @property
    def shared(self) -> int:
        """Dynamic shared memory of a block of attend, in bytes."""
        return (_LINES + 4 * 64) * (self.dim * 2 + 16) + _LINES * 16


def heads(
    x: Tensor,
    base: Tensor,
    count: Tensor | None,
    norms: tuple[Tensor, Tensor],
    epsilon: float,
    tables: tuple[Tensor, Tensor],
    cache: Tensor,
    shape: HeadShape,
    only_keys: bool = False,
) -> Tensor:
    """x bf16 [T, heads of queries (unless `only_keys`), keys and values] → queries bf16 [T, H,
    dim]; keys and values into cache bf16 [capacity, 2 kv heads, dim], from position `base` on."""
    own = 0 if only_keys else shape.queries
    q = torch.empty(len(x), own, shape.dim, dtype=torch.bfloat16, device=x.device)
    macros = {"Q_HEADS": own, "KV_HEADS": shape.keys, "DIM": shape.dim}
    grid = len(x), -(-(own + 2 * shape.keys) // 4)
    launch("drafter/heads", macros, grid, 128, (x, base, count, *norms, epsilon, *tables, q, cache))
    return q


def attend(
    q: Tensor, cache: Tensor, length: Tensor, window: int | None, causal: bool, shape: HeadShape
) -> Tensor:
    """q bf16 [block, H, dim] over `length` context rows and the block → bf16 [block, H · dim]."""
    block = len(q)
    out = torch.empty(block, shape.queries * shape.dim, dtype=torch.bfloat16, device=q.device)
    macros = {
        "Q_HEADS": shape.queries, "KV_HEADS": shape.keys, "DIM": shape.dim, "BLOCK": block,
        "WINDOW": window or 0, "CAUSAL": int(causal),
    }  # fmt: skip
    args = (q, cache, length, shape.dim**-0.5, out)
    grid = shape.keys, -(-block * shape.queries // shape.keys // _LINES)
    launch("drafter/attend", macros, grid, 128, args, shared=shape.shared, cluster=_SPLITS)
    return out
