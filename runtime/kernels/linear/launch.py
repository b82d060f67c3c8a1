"""The launch of the product."""

import torch
from torch import Tensor

from kconvert.runtime.kernels.gpu import Gpu, gpu, launch
from kconvert.runtime.kernels.linear.shape import CHUNKS, STEP, Tiles, split, tiles


def defines(n: int, k: int, plan: Tiles) -> dict[str, int]:
    """The kernel's macros for a weight [n, k]."""
    return {
        "SPLIT": split(n, k), "WARPS_N": plan.warps_n, "TILES": plan.columns, "ROWS": plan.rows,
        "STAGES": plan.stages,
    }  # fmt: skip


def can_gate(sums: int, gated: int) -> bool:
    """Whether SiLU(gate) · up can be made of `gated` columns each, behind `sums` others: a tile of
    16 columns is 8 of gate and 8 of up."""
    return sums % 32 == 0 and gated % 8 == 0


def linear_into(
    x: Tensor, weight: Tensor, out: Tensor, rest: Tensor | None = None, gated: bool = False
) -> None:
    """x bf16 [M, K] times the transpose of weight bf16 [N, K], into out [M, N]: float32 sums, or
    rounded to bf16. With `rest` out has the first columns, float32, and rest bf16 the others. If
    `gated` what is bf16 is SiLU(gate) · up, half as many columns, of the weight's rows of gate and
    then of up, both rounded before. Raises ValueError if an argument is not what the kernel
    takes."""
    (m, k), n = x.shape, weight.shape[0]
    wide, rounded = (out, rest) if out.dtype == torch.float32 else (None, out)
    sums, last = (0 if a is None else a.shape[1] for a in (wide, rounded))
    outs = [a for a in (wide, rounded) if a is not None]
    sizes = weight.shape == (n, k) and sums + last * (1 + gated) == n
    sizes = sizes and all(len(a) == m and a.is_contiguous() for a in (x, *outs))
    odd = k % STEP or (gated and not can_gate(sums, last))
    if not sizes or odd or not weight.is_contiguous():
        into = " and ".join(str(list(a.shape)) for a in outs)
        raise ValueError(f"{list(x.shape)} times {list(weight.shape)} into {into}")
    into_these = (wide, rounded, sums, last if gated else 0)
    _launch(x, weight, into_these, (m, n, k), (k, 0, 0, 0))


def linear_heads(x: Tensor, weight: Tensor, first: int, out: Tensor) -> None:
    """A product a head: x bf16 [M, H, K] times the transposes of N rows of each head's in weight
    bf16 [H, rows, K], from `first` on, into out bf16 [M, H, N]. Raises ValueError as
    `linear_into`."""
    (m, heads, k), n = x.shape, out.shape[2]
    sizes = weight.shape[::2] == (heads, k) and out.shape[:2] == (m, heads)
    sizes = sizes and first + n <= weight.shape[1]
    if not sizes or k % STEP or not all(a.is_contiguous() for a in (x, weight, out)):
        raise ValueError(f"{list(x.shape)} times {list(weight.shape)} into {list(out.shape)}")
    begin = weight.view(-1)[first * k :]
    _launch(x, begin, (None, out, 0, 0), (m, n, k), (heads * k, k, weight.stride(0), n), heads)


def _launch(
    x: Tensor,
    weight: Tensor,
    outs: tuple[Tensor | None, Tensor | None, int, int],
    sizes: tuple[int, int, int],
    strides: tuple[int, int, int, int],
    heads: int = 1,
) -> None:
    m, n, k = sizes
    plan = tiles(n, k, m, gpu(x.device.index))
    macros = defines(n, k, plan)
    launch(
        "linear/linear", macros, (*plan.grid(n, m), heads), CHUNKS * plan.warps_n * 32,
        (x, weight, *outs, *sizes, *strides), shared=plan.shared, cluster=macros["SPLIT"],
    )  # fmt: skip


def kernel(n: int, k: int, m: int, gpu: Gpu) -> tuple[dict[str, int], int]:
    """Macros and dynamic shared memory of a call: what the build's table lists."""
    plan = tiles(n, k, m, gpu)
    return defines(n, k, plan), plan.shared
