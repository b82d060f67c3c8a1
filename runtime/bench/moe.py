"""Times one MoE layer's kernels: ``kconvert bench moe``.

Random weights, a seeded random top-8 of 384, three layers of weights and several routings in turn
so that nothing is found in the L2 cache, everything in one CUDA graph, the median of its replays.
"""

import statistics
import subprocess
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from kconvert.layouts.errors import UnavailableError
from kconvert.layouts.experts import STACKED
from kconvert.layouts.marlin import Marlin
from kconvert.layouts.quantization import Quantization
from kconvert.runtime.bench import peers as bench_peers
from kconvert.runtime.kernels.floor.launch import read_experts
from kconvert.runtime.kernels.moe import launch
from kconvert.runtime.kernels.moe.shape import MoeShape
from kconvert.runtime.kernels.nvrtc import sources_digest

SHAPES = {
    "tp8": MoeShape(7168, 256, 384, 8),
    "tp2": MoeShape(7168, 1024, 384, 8),
    "ep8": MoeShape(7168, 2048, 48, 8, total_experts=384, first_expert=96),
}
TOKENS = (1, 2, 4, 8, 9, 16, 33, 64, 90, 128, 330, 1024, 4096)
LAYERS = 3
ROUTINGS = 4
TARGET_MS = 4.0  # length of one graph: long enough that its own launch does not count


def memory_needed(shape: MoeShape, tokens: int) -> int:
    """Bytes of GPU memory the benchmark takes, with a tenth for the allocator and CUDA itself."""
    pairs = tokens * shape.top_k
    weights = LAYERS * shape.experts * shape.expert_bytes
    work = pairs * (shape.intermediate * 2 + shape.hidden * 2 + 24)
    inputs = tokens * shape.hidden * (2 * ROUTINGS + 4) + ROUTINGS * pairs * 8
    return (weights + work + inputs) * 11 // 10 + (1 << 29)


def random_layer(shape: MoeShape, device: str, generator: torch.Generator) -> launch.MoeWeights:
    """Random Marlin words and scales near those of a real checkpoint."""
    e, k, n, g = shape.experts, shape.hidden, shape.intermediate, shape.group

    def words(*sizes: int) -> torch.Tensor:
        out = torch.empty(sizes, dtype=torch.int32, device=device)
        return out.random_(-(2**31), 2**31 - 1, generator=generator)

    def scales(*sizes: int) -> torch.Tensor:
        out = torch.empty(sizes, dtype=torch.bfloat16, device=device)
        return out.uniform_(0.002, 0.006, generator=generator)

    layout, make = Marlin(Quantization(g)), {"code": words, "scale": scales}
    cuts = [tensor.cut(range(n), k) for tensor in STACKED]
    return launch.MoeWeights(
        *(make[c.tensor.role](e, *layout.shape(c.tensor.role, c.n, c.k)) for c in cuts)
    )


def random_routing(
    shape: MoeShape, tokens: int, device: str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """top_k different experts a token, uniform; weights that sum to K2.6's 2.827."""
    keys = torch.rand(tokens, shape.total_experts, device=device, generator=generator)
    ids = keys.topk(shape.top_k, dim=1).indices.int()
    weights = torch.rand(tokens, shape.top_k, device=device, generator=generator) + 0.1
    return ids, weights * (2.827 / weights.sum(1, keepdim=True))


def graph_us(steps: Sequence[Callable[[], object]], replays: int = 25) -> float:
    """Median microseconds of one step, all steps captured in one CUDA graph, in turn."""
    for step in steps:
        step()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for step in steps:
        step()
    end.record()
    torch.cuda.synchronize()
    rounds = min(40, max(1, round(TARGET_MS / max(begin.elapsed_time(end), 1e-3))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for step in steps:
                step()
    times = []
    for i in range(replays + 3):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end))
    return float(statistics.median(times)) * 1000 / (rounds * len(steps))


def read_steps(
    layers: Sequence[launch.MoeWeights], chosen: Sequence[torch.Tensor]
) -> list[Callable[[], None]]:
    """A step for each layer and routing: read the touched experts, w13 then w2, in two launches."""
    return [partial(read_experts, layer, experts) for experts in chosen for layer in layers]


def bench_shape(
    name: str,
    tokens: Sequence[int],
    seed: int,
    report: Callable[[str], None],
    peers: Sequence[bench_peers.Peer] = (),
) -> list[dict[str, Any]]:
    """Rows of one shape. Raises UnavailableError with the sizes when too little is free."""
    shape, device = SHAPES[name], f"cuda:{torch.cuda.current_device()}"
    needed, free = memory_needed(shape, max(tokens)), torch.cuda.mem_get_info()[0]
    needed += bench_peers.memory_needed(peers, shape, max(tokens))
    report(f"{name}: needs {needed / 1e9:.1f} GB of GPU memory, {free / 1e9:.1f} GB are free")
    if needed > free:
        raise UnavailableError(
            f"shape {name} needs {needed:,} bytes of GPU memory, {free:,} are free: end what else"
            " runs there."
        )
    generator = torch.Generator(device).manual_seed(seed)
    layers = [random_layer(shape, device, generator) for _ in range(LAYERS)]
    work = launch.MoeWorkspace(shape, max(tokens), device)
    loaded = bench_peers.load(peers, layers, shape, report)
    rows = []
    for m in tokens:
        row, *others = _bench_tokens(shape, m, layers, work, device, generator, loaded, report)
        rows += [{"shape": name, **timed} for timed in (row, *others)]
        report(
            f"{name} M={m:<5} experts {row['experts']:>3}  {row['us']:8.1f} us  "
            f"{row['tbps']:.2f} TB/s  floor {row['floor_us']:7.1f} us  "
            f"align {row['align_us']:.1f}  router {row['router_us']:.1f}"
        )
        for other in others:
            report(f"  {other['backend']} {other['us']:.1f} us  {other['inside']}")
    return rows


def _bench_tokens(
    shape: MoeShape,
    m: int,
    layers: Sequence[launch.MoeWeights],
    work: launch.MoeWorkspace,
    device: str,
    generator: torch.Generator,
    peers: bench_peers.Loaded,
    report: Callable[[str], None],
) -> list[dict[str, Any]]:
    """kconvert's row, then one a peer."""
    routings = [random_routing(shape, m, device, generator) for _ in range(ROUTINGS)]
    xs = [
        torch.randn(m, shape.hidden, device=device, generator=generator).bfloat16()
        for _ in range(ROUTINGS)
    ]
    out = torch.empty(m, shape.hidden, dtype=torch.float32, device=device)
    mine = torch.arange(shape.first_expert, shape.first_expert + shape.experts, device=device)
    chosen = [(mine[torch.isin(mine, ids)] - shape.first_expert).int() for ids, _ in routings]
    touched = sum(len(experts) for experts in chosen) / ROUTINGS

    works = [work.share() for _ in routings]  # lists of their own, the large buffers shared
    for (ids, _), lists in zip(routings, works, strict=True):
        launch.align(ids, shape, lists)

    steps = [
        partial(launch.experts, x, ids, weights, layer, shape, lists, out)
        for x, (ids, weights), lists in zip(xs, routings, works, strict=True)
        for layer in layers
    ]
    logits = torch.randn(m, shape.total_experts, device=device, generator=generator)
    bias = torch.zeros(shape.total_experts, device=device)
    ids, weights = (torch.empty_like(t) for t in routings[0])

    def speed(us: float) -> dict[str, Any]:
        return {
            "M": m,
            "experts": round(touched, 1),
            "us": round(us, 2),
            "tbps": round(touched * shape.expert_bytes / us / 1e6, 3),
            "tokens_per_s": round(m / us * 1e6),
            "floor_us": floor,
        }

    us = graph_us(steps)
    floor = round(graph_us(read_steps(layers, chosen)), 2) if touched else 0.0
    row = {
        "backend": "kconvert",
        **speed(us),
        "align_us": round(graph_us([lambda: launch.align(routings[0][0], shape, work)] * 8), 2),
        "router_us": round(
            graph_us([lambda: launch.router_into(logits, bias, 2.827, ids, weights)] * 8), 2
        ),
    }
    calls = [(x, *routing) for x, routing in zip(xs, routings, strict=True)]
    times = bench_peers.times(peers, calls, graph_us, report)
    return [row] + [
        {"backend": peer.backend, "inside": peer.inside, **speed(us)} for peer, us in times
    ]


def bench_moe(
    shapes: Sequence[str] = ("tp8", "tp2", "ep8"),
    tokens: Sequence[int] = TOKENS,
    seed: int = 0,
    commit: str | None = None,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Everything ``kconvert bench moe`` measures, as one JSON object.

    Raises KeyError for an unknown shape, UnavailableError without a CUDA GPU or (with the bytes
    needed and free) when it has too little memory.
    """
    if not torch.cuda.is_available():
        raise UnavailableError("bench moe needs an NVIDIA GPU, and torch finds none here.")
    rows, peers = [], bench_peers.find(report)
    for name in shapes:
        rows += bench_shape(name, tokens, seed, report, peers)
        torch.cuda.empty_cache()
    return {
        "bench": "moe",
        "card": torch.cuda.get_device_name(),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions_of([peer.package for peer in peers]),
        "commit": commit or commit_here(),
        "kernels": sources_digest()[:16],
        "method": f"CUDA graph of {LAYERS} layers x {ROUTINGS} routings, median of 25 replays",
        "seed": seed,
        "rows": rows,
    }


def versions_of(peers: Sequence[str]) -> dict[str, str]:
    versions = {"torch": str(torch.__version__)}
    for package in ("cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", *peers):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed as a package"
    return versions


def commit_here() -> str:
    here = Path(__file__).parent
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
