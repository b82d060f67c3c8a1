"""The launches of the row-wise operations."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kconvert.runtime.kernels.gpu import launch


@dataclass(frozen=True)
class Peers:
    """Memory of every rank that every rank can write (exchange.cuh), for `most` rows of D."""

    memory: Tensor  # int64 [ranks], addresses
    rank: int
    most: int
    epochs: Tensor  # int32 [most], of each row's exchanges; all zero at first
    keep: object  # what owns the memory


def peer_bytes(ranks: int, most: int, size: int) -> int:
    """The size of one rank's memory."""
    return 2 * ranks * most * size * 4 + most * ranks * 4


def embed(tokens: Tensor, table: Tensor, first: int, out: Tensor) -> None:
    """Rows of table bf16 [n, D], the tokens from `first` on, into out [T, D], bf16 or float32;
    zeros for others."""
    count, size = table.shape
    wide = int(out.dtype == torch.float32)
    args = (tokens, table, first, count, size, wide, out)
    launch("rows/embed", {}, (len(tokens),), 128, args)


def add_norm(
    x: Tensor | None,
    sums: Tensor | None,
    weight: Tensor,
    epsilon: float,
    peers: Peers | None = None,
) -> tuple[Tensor, Tensor]:
    """x bf16 [T, D] + sums float32 [ranks, T, D], and that normed by weight bf16 [D]. With `peers`
    sums are this rank's [T, D], and are exchanged; all ranks call it, for like T."""
    ranks = 0 if sums is None else len(peers.memory) if peers else len(sums)
    shape = x.shape if x is not None else sums.shape[-2:]  # type: ignore[union-attr]
    normed = torch.empty(shape, dtype=torch.bfloat16, device=weight.device)
    total = None if sums is None else torch.empty_like(normed)
    groups = -(-shape[1] // 8)
    threads = -(-groups // (-(-groups // 512) * 32)) * 32
    launch(
        "rows/add_norm", {"SIZE": shape[1]}, (shape[0],), threads,
        (x, sums, ranks, weight, epsilon, total, normed,
         *((peers.memory, peers.rank, peers.most, peers.epochs) if peers else (None, 0, 0, None))),
    )  # fmt: skip
    return (x if total is None else total), normed  # type: ignore[return-value]
