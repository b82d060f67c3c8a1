"""`kconvert bench linear`: every bf16 product of a K2.6 TP8 rank, against only reading its weight.

Weights rotate past the L2 cache, everything in one CUDA graph, the median of its replays.
"""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kconvert.layouts.errors import UnavailableError
from kconvert.runtime.bench.moe import graph_us
from kconvert.runtime.kernels.floor.launch import read_matrix
from kconvert.runtime.kernels.linear.launch import linear_into


class Product(NamedTuple):
    """x [M, K] times the transpose of a weight [N, K], as the engine runs it: the first `sums`
    columns stay float32, the others are rounded, or are gate and up and become SiLU(gate) · up."""

    n: int
    k: int
    sums: int = 0
    gated: bool = False


# The drafter's MLP has the dense layer's sizes.
PRODUCTS = {
    "q_a, kv_a": Product(2112, 7168),
    "q_b": Product(1536, 1536),
    "o_proj": Product(7168, 1024, sums=7168),
    "dense gate, up": Product(4608, 7168, gated=True),
    "dense down": Product(7168, 2304, sums=7168),
    "router, shared": Product(896, 7168, sums=384, gated=True),
    "shared down": Product(7168, 256, sums=7168),
    "head": Product(20480, 7168, sums=20480),
    "drafter q, k, v": Product(1280, 7168),
    "drafter fc": Product(7168, 5376, sums=7168),
}
ROWS = (1, 8, 16, 33, 65, 90, 330)
_ROTATED = 240 << 20  # bytes of a product's weights together: four times the L2


def bench_linear(
    rows: Sequence[int] = ROWS, report: Callable[[str], object] = print
) -> dict[str, Any]:
    """Microseconds of each product at each number of rows, and of its floor. Raises
    UnavailableError without a CUDA GPU."""
    if not torch.cuda.is_available():
        raise UnavailableError("bench linear needs an NVIDIA GPU, and torch finds none here.")
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device).manual_seed(0)
    table = []
    for name, product in PRODUCTS.items():
        n, k = product[:2]
        copies = ceil(_ROTATED / (2 * n * k))
        weights = [
            (torch.randn(n, k, device=device, generator=generator) / k**0.5).bfloat16()
            for _ in range(copies)
        ]
        floor = graph_us([partial(read_matrix, weight) for weight in weights])
        for m in rows:
            us = graph_us(_steps(product, weights, m, generator))
            table.append({
                "product": name, "N": n, "K": k, "M": m, "us": round(us, 2),
                "floor_us": round(floor, 2), "over_floor": round(us / floor, 2),
            })  # fmt: skip
            report(f"{name:<16} [{n}, {k}] M={m:<3} {us:7.2f} us  floor {floor:6.2f}")
    return {
        "bench": "linear",
        "card": torch.cuda.get_device_name(),
        "date": datetime.now(UTC).date().isoformat(),
        "method": "CUDA graph over rotated weights, median of 25 replays",
        "rows": table,
    }


def _steps(
    product: Product, weights: list[Tensor], m: int, generator: torch.Generator
) -> list[Callable[[], None]]:
    device, rounded = weights[0].device, (product.n - product.sums) // (1 + product.gated)
    x = torch.randn(m, product.k, device=device, generator=generator).bfloat16()
    sums = torch.empty(m, product.sums, device=device)
    rest = torch.empty(m, rounded, device=device, dtype=torch.bfloat16)
    out, behind = (sums, rest if rounded else None) if product.sums else (rest, None)
    return [partial(linear_into, x, weight, out, behind, product.gated) for weight in weights]
