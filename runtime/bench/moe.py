"""Times one MoE layer's kernels: ``kconvert bench moe``. results/METHOD.md says how, and why.

Random weights, a seeded random top-8 of 384, three layers of weights and several routings in turn
so that nothing is found in the L2 cache, everything in one CUDA graph, the median of its replays.
Each peer is timed in a process of its own, on weights and routings drawn alike.
"""

import multiprocessing
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
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
    "tp4": MoeShape(7168, 512, 384, 8),
    "tp2": MoeShape(7168, 1024, 384, 8),
    "tp1": MoeShape(7168, 2048, 384, 8),
    "ep8": MoeShape(7168, 2048, 48, 8, total_experts=384, first_expert=96),
}
TOKENS = (1, 2, 4, 8, 9, 16, 33, 64, 90, 128, 330, 512, 1024, 2048, 4096, 8192, 16384)
LAYERS = 3
ROUTINGS = 4
TARGET_MS = 4.0  # length of one graph: long enough that its own launch does not count
SILENCE_S = 600.0  # after which a peer's process is given up: it may compile for a minute
INSIDE = {
    "us": "both GEMMs with SiLU·up and router weight, and the sum over slots",
    "gemms_us": "both GEMMs with SiLU·up and router weight",
    "layer_us": "the whole layer: alignment, both GEMMs, SiLU·up, router weight, sum over slots",
}


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


Call = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # x, ids, weights


def _device() -> str:
    return f"cuda:{torch.cuda.current_device()}"


def draw_layers(shape: MoeShape, seed: int, device: str) -> list[launch.MoeWeights]:
    """The layers that are timed in turn: the same ones for the same seed, in any process."""
    generator = torch.Generator(device).manual_seed(seed)
    return [random_layer(shape, device, generator) for _ in range(LAYERS)]


def draw_calls(shape: MoeShape, tokens: int, seed: int, device: str) -> list[Call]:
    """Rows with their routings, the same ones for the same seed, in any process."""
    generator = torch.Generator(device).manual_seed(seed * (1 << 20) + tokens)
    return [
        (
            torch.randn(tokens, shape.hidden, device=device, generator=generator).bfloat16(),
            *random_routing(shape, tokens, device, generator),
        )
        for _ in range(ROUTINGS)
    ]


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
    return float(statistics.median(times) * 1000 / (rounds * len(steps)))


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
) -> Iterator[dict[str, Any]]:
    """Rows of one shape, kconvert's first. Raises UnavailableError with the sizes when too little
    memory is free."""
    shape, device = SHAPES[name], _device()
    needed, free = memory_needed(shape, max(tokens)), torch.cuda.mem_get_info()[0]
    needed += bench_peers.memory_needed(peers, shape, max(tokens))
    report(f"{name}: needs {needed / 1e9:.1f} GB of GPU memory, {free / 1e9:.1f} GB are free")
    if needed > free:
        raise UnavailableError(
            f"shape {name} needs {needed:,} bytes of GPU memory, {free:,} are free: end what else"
            " runs there."
        )
    report(f"{name}: drawing {LAYERS} layers; kernels not cached yet are compiled on the way")
    layers = draw_layers(shape, seed, device)
    work = launch.MoeWorkspace(shape, max(tokens), device)
    ours = {}
    for m in tokens:
        row = ours[m] = {"shape": name, **_bench_tokens(shape, m, layers, work, device, seed)}
        report(
            f"{name} M={m:<5} experts {row['experts']:>3}  GEMMs {row['gemms_us']:8.1f} us  "
            f"layer {row['layer_us']:8.1f} us  floor {row['floor_us']:7.1f} us"
        )
        yield row
    del layers, work
    torch.cuda.empty_cache()
    for peer in peers:
        total = "layer_us" if peer.whole else "gemms_us"
        for m, us in peer_times(peer.backend, name, tokens, seed, report):
            ratio = round(ours[m][total] / us, 3)
            report(f"{name} M={m:<5} {peer.backend} {us:.1f} us, of which kconvert's is {ratio}")
            yield {
                "shape": name,
                "backend": peer.backend,
                "M": m,
                "us": round(us, 2),
                "against": total,
                "ratio": ratio,
            }


def _bench_tokens(
    shape: MoeShape,
    m: int,
    layers: Sequence[launch.MoeWeights],
    work: launch.MoeWorkspace,
    device: str,
    seed: int,
) -> dict[str, Any]:
    """kconvert's row."""
    calls = draw_calls(shape, m, seed, device)
    out = torch.empty(m, shape.hidden, dtype=torch.float32, device=device)
    mine = torch.arange(shape.first_expert, shape.first_expert + shape.experts, device=device)
    chosen = [(mine[torch.isin(mine, ids)] - shape.first_expert).int() for _, ids, _ in calls]
    touched = sum(len(experts) for experts in chosen) / ROUTINGS

    works = [work.share() for _ in calls]  # lists of their own, the large buffers shared
    for (_, ids, _), lists in zip(calls, works, strict=True):
        launch.align(ids, shape, lists)
    plan = launch.moe_schedule(shape, m, torch.device(device))

    def gemms(call: Call, layer: launch.MoeWeights, lists: launch.MoeWorkspace) -> None:
        launch.w13(call[0], layer, shape, plan, lists)
        launch.w2(call[2], layer, shape, plan, lists)

    def experts(call: Call, layer: launch.MoeWeights, lists: launch.MoeWorkspace) -> None:
        launch.experts(*call, layer, shape, lists, out)

    def whole(call: Call, layer: launch.MoeWeights, lists: launch.MoeWorkspace) -> None:
        launch.align(call[1], shape, lists)
        experts(call, layer, lists)

    def timed(step: Callable[..., None]) -> float:
        pairs = zip(calls, works, strict=True)
        return graph_us([partial(step, c, layer, w) for c, w in pairs for layer in layers])

    us = timed(experts)
    logits = torch.randn(m, shape.total_experts, device=device)
    bias = torch.zeros(shape.total_experts, device=device)
    ids, weights = (torch.empty_like(t) for t in calls[0][1:])
    aligning = partial(launch.align, calls[0][1], shape, work)
    routing = partial(launch.router_into, logits, bias, 2.827, ids, weights)
    floor = graph_us(read_steps(layers, chosen)) if touched else 0.0
    return {
        "backend": "kconvert",
        "M": m,
        "experts": round(touched, 1),
        "us": round(us, 2),
        "gemms_us": round(timed(gemms), 2),
        "layer_us": round(timed(whole), 2),
        "tbps": round(touched * shape.expert_bytes / us / 1e6, 3),
        "tokens_per_s": round(m / us * 1e6),
        "floor_us": round(floor, 2),
        "align_us": round(graph_us([aligning] * 8), 2),
        "router_us": round(graph_us([routing] * 8), 2),
    }


def peer_times(
    backend: str, name: str, tokens: Sequence[int], seed: int, report: Callable[[str], None]
) -> Iterator[tuple[int, float]]:
    """(tokens, microseconds) of a peer, measured in a process of its own: whatever it does there,
    an exception, a crash, no end, costs its own times alone, and is said."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(
        target=time_peer, args=(there, backend, name, tokens, seed), daemon=True
    )
    process.start()
    there.close()
    report(f"{name}: {backend} prepares its layers, in a process of its own")
    try:
        while here.poll(SILENCE_S):
            kind, *rest = here.recv()
            if kind == "time":
                yield rest[0], rest[1]
            elif kind == "say":
                report(rest[0])
            else:
                break
        else:
            report(f"{backend} is left out from here on: nothing from it for {SILENCE_S:.0f} s")
            process.kill()
    except EOFError:
        process.join()
        report(f"{backend} is left out from here on: its process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()


def time_peer(to: Any, backend: str, name: str, tokens: Sequence[int], seed: int) -> None:
    """What peer_times' process does: sends ("time", tokens, microseconds), ("say", sentence) and,
    at last, ("end",)."""
    shape, device = SHAPES[name], _device()
    try:
        peer = next(p for p in bench_peers.find(lambda _: None) if p.backend == backend)
        steps = [peer.load(layer, shape) for layer in draw_layers(shape, seed, device)]
        to.send(("say", f"{name}: {backend} may compile on its first step, for a minute or two"))
        for m in tokens:
            calls = draw_calls(shape, m, seed, device)
            to.send(("time", m, graph_us([step(*call) for call in calls for step in steps])))
    except Exception as error:
        to.send(
            ("say", f"{backend} is left out from here on, it failed: {bench_peers.line(error)}")
        )
    to.send(("end",))


def bench_moe(
    shapes: Sequence[str] = ("tp8", "tp2", "ep8"),
    tokens: Sequence[int] = TOKENS,
    seed: int = 0,
    report: Callable[[str], None] = print,
    keep: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Everything ``kconvert bench moe`` measures, as one JSON object; ``keep`` gets it after every
    shape, as far as it has come.

    Raises KeyError for an unknown shape, UnavailableError without a CUDA GPU or (with the bytes
    needed and free) when it has too little memory.
    """
    if not torch.cuda.is_available():
        raise UnavailableError("bench moe needs an NVIDIA GPU, and torch finds none here.")
    peers = bench_peers.find(report)
    result: dict[str, Any] = {
        "bench": "moe",
        "card": torch.cuda.get_device_name(),
        "driver": _driver(),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions_of([peer.package for peer in peers]),
        "commit": commit_here(),
        "kernels": sources_digest()[:16],
        "method": f"CUDA graph of {LAYERS} layers x {ROUTINGS} routings, median of 25 replays",
        "seed": seed,
        "inside": INSIDE | {peer.backend: peer.inside for peer in peers},
        "rows": [],
    }
    for name in shapes:
        result["rows"] += bench_shape(name, tokens, seed, report, peers)
        torch.cuda.empty_cache()
        keep(result)
    return result


def versions_of(peers: Sequence[str]) -> dict[str, str]:
    versions = {"torch": str(torch.__version__)}
    for package in ("cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", *peers):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed as a package"
    return versions


def _driver() -> str:
    if not shutil.which("nvidia-smi"):
        return "unknown"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return _said(command).partition("\n")[0] or "unknown"


def commit_here() -> str:
    """The project's commit; not that of another repository which it happens to lie in."""
    here = Path(__file__)
    if not _said(["git", "-C", str(here.parent), "ls-files", here.name]):
        return "unknown"
    return _said(["git", "-C", str(here.parent), "rev-parse", "HEAD"]) or "unknown"


def _said(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
