"""`kconvert bench exchange`: float32 sums [M, 7168] of all ranks, added in rank order, in a graph.

Ours includes the next operation, residual and norm; the others end with the sum, or are an
all-gather of the parts, alone or followed by the same operation.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from kconvert.layouts.errors import UnavailableError
from kconvert.runtime.backends.cuda import PEER_ROWS, make_peers
from kconvert.runtime.distributed import Ranks, all_ranks_from_environment
from kconvert.runtime.kernels.rows.launch import Peers, add_norm

ROWS = (1, 8, 16, 33, 65)
HIDDEN = 7168
_TIMES = 50  # exchanges in a graph


def bench_exchange(
    rows: Sequence[int] = ROWS, report: Callable[[str], object] = print
) -> dict[str, Any]:
    """Microseconds of an exchange: the slowest rank's median. Raises UnavailableError if there is
    no GPU or only one rank."""
    ranks = all_ranks_from_environment()
    if ranks.size == 1 or not torch.cuda.is_available():
        raise UnavailableError(
            "bench exchange needs several ranks with a GPU each: start it with torchrun."
        )
    ranks = ranks.on_gpus()
    device = torch.device("cuda", torch.cuda.current_device())
    peers = make_peers(ranks, PEER_ROWS, HIDDEN, device)
    table = []
    for m in rows:
        generator = torch.Generator(device).manual_seed(ranks.rank)
        sums = torch.randn(m, HIDDEN, device=device, generator=generator)
        x = torch.zeros(m, HIDDEN, dtype=torch.bfloat16, device=device)
        weight = torch.ones(HIDDEN, dtype=torch.bfloat16, device=device)
        ways, same = _ways(ranks, peers, x, sums, weight)
        ways |= _symmetric(ranks, m, device)
        for name, run in ways.items():
            us = _slowest(_graph_us(run, device), ranks, device)
            table.append({"M": m, "way": name, "us": round(us, 2), "same_bits": same})
            report(f"M={m:<4} {name:<36} {us:7.2f} us")
    return {
        "bench": "exchange",
        "rank": ranks.rank,
        "ranks": ranks.size,
        "card": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "hidden": HIDDEN,
        "rows": table,
    }


def _ways(
    ranks: Ranks, peers: Peers | None, x: Tensor, sums: Tensor, weight: Tensor
) -> tuple[dict[str, Callable[[], object]], bool]:
    """What is timed; and whether ours has the bits of NCCL's all-gather with the operation after
    it."""

    def ours() -> tuple[Tensor, Tensor]:
        return add_norm(x, sums, weight, 1e-5, peers)

    def gathered() -> tuple[Tensor, Tensor]:
        return add_norm(x, ranks.all_gather_tensor(sums), weight, 1e-5)

    same = all(torch.equal(a, b) for a, b in zip(ours(), gathered(), strict=True))
    total = sums.clone()
    return {
        "ours, with residual and norm": ours,
        "NCCL all-gather, residual and norm": gathered,
        "NCCL all-gather, sum": lambda: _ordered_sum(ranks.all_gather_tensor(sums)),
        "NCCL all-reduce": lambda: distributed.all_reduce(total, group=ranks.gpus),
    }, same


def _ordered_sum(parts: Tensor) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _symmetric(ranks: Ranks, m: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """torch's own all-reduces over symmetric memory, if this torch has them."""
    from torch.distributed import _symmetric_memory as symmetric

    group = ranks.gpus.group_name
    memory = symmetric.empty(m * HIDDEN, dtype=torch.float32, device=device).zero_()
    symmetric.rendezvous(memory, ranks.gpus)
    ops = torch.ops.symm_mem
    return {
        "torch symmetric memory, one shot": lambda: ops.one_shot_all_reduce(memory, "sum", group),
        "torch symmetric memory, two shots": lambda: ops.two_shot_all_reduce_(memory, "sum", group),
    }


def _graph_us(run: Callable[[], object], device: torch.device) -> float:
    for _ in range(3):
        run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_TIMES):
            run()
    times = []
    for _ in range(25):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize(device)
        times.append(begin.elapsed_time(end) * 1e3 / _TIMES)
    return float(statistics.median(times))


def _slowest(us: float, ranks: Ranks, device: torch.device) -> float:
    return float(ranks.all_gather_tensor(torch.tensor([us], device=device)).max())
