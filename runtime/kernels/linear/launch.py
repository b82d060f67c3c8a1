"""The launch of the product."""

import torch
from torch import Tensor

from kconvert.runtime.kernels.gpu import Gpu, gpu, launch
from kconvert.runtime.kernels.linear.shape import CHUNKS, STEP, Tiles, split, tiles


def defines(n: int, k: int, plan: Tiles, wide: bool) -> dict[str, int]:
    """The kernel's macros for a weight [n, k]."""
    return {
        "SPLIT": split(n, k), "WARPS_N": plan.warps_n, "TILES": plan.columns, "ROWS": plan.rows,
        "STAGES": plan.stages, "WIDE": int(wide),
    }  # fmt: skip


def linear_into(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """x bf16 [M, K] times the transpose of weight bf16 [N, K], into out [M, N]: float32 sums, or
    rounded to bf16. Raises ValueError where an argument is not what the kernel takes."""
    (m, k), n = x.shape, weight.shape[0]
    sizes = weight.shape == (n, k) and out.shape == (m, n)
    if not sizes or k % STEP or not all(a.is_contiguous() for a in (x, weight, out)):
        raise ValueError(f"{list(x.shape)} times {list(weight.shape)} into {list(out.shape)}")
    plan = tiles(n, m, gpu(x.device.index))
    macros = defines(n, k, plan, out.dtype == torch.float32)
    launch(
        "linear/linear", macros, plan.grid(n, m), CHUNKS * plan.warps_n * 32,
        (x, weight, out, m, n, k), shared=plan.shared, cluster=macros["SPLIT"],
    )  # fmt: skip


def kernel(n: int, k: int, m: int, gpu: Gpu) -> tuple[dict[str, int], int]:
    """Macros and dynamic shared memory of a call: what the build's table lists."""
    plan = tiles(n, m, gpu)
    return defines(n, k, plan, False), plan.shared
