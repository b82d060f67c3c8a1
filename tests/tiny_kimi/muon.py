"""Muon, the optimizer that Kimi K2 was trained with, for matrices and stacks of matrices."""

from collections.abc import Iterable

import torch
from torch import Tensor


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal, at AdamW's usual update size (0.2 · √max(rows, columns))."""

    def __init__(
        self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, decay: float = 0.1
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonal(p.grad.lerp(momentum, group["momentum"]))
                size = 0.2 * max(p.shape[-2:]) ** 0.5
                p.mul_(1 - group["lr"] * group["decay"]).add_(update, alpha=-group["lr"] * size)


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest orthogonal matrix, roughly: five Newton-Schulz steps (Keller Jordan's)."""
    wide = matrix.shape[-1] > matrix.shape[-2]
    x = (matrix if wide else matrix.mT).bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return (x if wide else x.mT).to(matrix.dtype)
