"""`kconvert bench linear`: every bf16 product of a K2.6 TP8 rank, against only reading its weight.

Weights rotate past the L2 cache, everything in one CUDA graph, the median of its replays.
"""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor

from kconvert.layouts.errors import UnavailableError
from kconvert.runtime.bench.moe import graph_us
from kconvert.runtime.kernels.floor.launch import read_matrix
from kconvert.runtime.kernels.linear.launch import linear_into

# name -> (N, K, whether its sums stay float32)
PRODUCTS = {
    "q_a, kv_a": (2112, 7168, False),
    "q_b": (1536, 1536, False),
    "o_proj": (7168, 1024, True),
    "dense gate, up": (4608, 7168, False),
    "dense down": (7168, 2304, True),
    "router": (384, 7168, True),
    "shared gate, up": (512, 7168, False),
    "shared down": (7168, 256, True),
    "head": (20480, 7168, True),
}
ROWS = (1, 8, 16, 33, 65)
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
    for name, (n, k, wide) in PRODUCTS.items():
        copies = ceil(_ROTATED / (2 * n * k))
        weights = [
            (torch.randn(n, k, device=device, generator=generator) / k**0.5).bfloat16()
            for _ in range(copies)
        ]
        floor = graph_us([partial(read_matrix, weight) for weight in weights])
        for m in rows:
            us = graph_us(_steps(weights, m, wide, generator))
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
    weights: list[Tensor], m: int, wide: bool, generator: torch.Generator
) -> list[Callable[[], None]]:
    n, k = weights[0].shape
    device = weights[0].device
    x = torch.randn(m, k, device=device, generator=generator).bfloat16()
    out = torch.empty(m, n, dtype=torch.float32 if wide else torch.bfloat16, device=device)
    return [partial(linear_into, x, weight, out) for weight in weights]
