"""What ``kconvert bench moe`` times beside kconvert where it can be imported: vLLM and Humming.

Written from the sources of vllm 0.33.0 (commit 4ba787ec9) and humming-kernels 0.1.19, the wheels on
PyPI, and never run against them. Each fact below names its file there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kconvert.layouts.errors import UnavailableError
from kconvert.runtime.bench import humming as bench_humming
from kconvert.runtime.bench.humming import check
from kconvert.runtime.kernels.moe.launch import MoeWeights
from kconvert.runtime.kernels.moe.shape import MoeShape

Step = Callable[[], Tensor]
StepOf = Callable[[Tensor, Tensor, Tensor], Step]  # of x, ids, weights, as kconvert gets them


@dataclass(frozen=True)
class Peer:
    """Another library's MoE: ``load`` prepares a layer, what it returns prepares one timed step."""

    backend: str
    package: str
    inside: str  # what a step does
    copies: int  # layers it keeps beside the three of the bench, and works on while it loads one
    load: Callable[[MoeWeights, MoeShape], StepOf]


Report = Callable[[str], None]
Loaded = list[tuple[Peer, list[StepOf]]]

# model_executor/layers/fused_moe/experts/marlin_moe.py: fused_marlin_moe aligns, multiplies w13,
# applies SiLU·up (gate half first), multiplies w2 with the router weight and sums. It wants x bf16,
# weights float32, Marlin's words and scales as our blobs hold them, ids of all ranks' experts and
# an int32 map from these to local ones (-1: elsewhere; expert_map_manager.py). MarlinExperts, its
# caller in vLLM, passes all experts' number and moe_sum of _custom_ops, with ids and map where
# there is a map; get_marlin_workspace (utils/marlin_utils.py) makes room for four blocks an SM.
FUSED = (
    *("hidden_states", "w1", "w2", "bias1", "bias2", "w1_scale", "w2_scale", "topk_weights"),
    *("topk_ids", "quant_type_id", "global_num_experts", "moe_sum", "expert_map", "workspace"),
    "output",
)


def _vllm() -> Peer:
    layers = "vllm.model_executor.layers"
    fused = import_module(f"{layers}.fused_moe.experts.marlin_moe").fused_marlin_moe
    utils = import_module(f"{layers}.quantization.utils.marlin_utils")
    moe_sum = import_module("vllm._custom_ops").moe_sum
    kind = import_module("vllm.scalar_type").scalar_types.uint4b8.id
    check(fused, FUSED)
    check(utils.marlin_make_workspace_new, ("device", "max_blocks_per_sm"))
    check(moe_sum, ("input", "output", "topk_ids", "expert_map"))

    def total(y: Tensor, out: Tensor, ids: Tensor, local: Tensor | None) -> None:
        moe_sum(y, out) if local is None else moe_sum(y, out, ids, local)

    def load(layer: MoeWeights, shape: MoeShape) -> StepOf:
        device, local = layer.w13.device, None
        workspace = utils.marlin_make_workspace_new(device, 4)
        if shape.experts < shape.total_experts:
            local = torch.full((shape.total_experts,), -1, dtype=torch.int32, device=device)
            local[shape.first_expert :][: shape.experts] = torch.arange(shape.experts)
        blobs = (layer.w13, layer.w2, None, None, layer.w13_scale, layer.w2_scale)

        def step_of(x: Tensor, ids: Tensor, weights: Tensor) -> Step:
            def step() -> Tensor:
                out = torch.empty_like(x)
                rest = (kind, shape.total_experts, total, local, workspace, out)
                fused(**dict(zip(FUSED, (x, *blobs, weights, ids, *rest), strict=True)))
                return out

            return step

        return step_of

    return Peer("vllm", "vllm", "alignment, both GEMMs, SiLU·up, router weight, sum", 0, load)


def _humming() -> Peer:
    return Peer("humming", "humming-kernels", "both GEMMs only", 6, bench_humming.loader())


def find(report: Callable[[str], None]) -> list[Peer]:
    """The peers that can be imported; of one that is there but different, a sentence."""
    peers = []
    for package, make in (("vllm", _vllm), ("humming", _humming)):
        try:
            peers.append(make())
        except Exception as error:  # an import may fail in any way
            if not (isinstance(error, ModuleNotFoundError) and error.name == package):
                report(f"{package} is left out, it is not as expected: {_line(error)}")
    return peers


def memory_needed(peers: Sequence[Peer], shape: MoeShape, tokens: int) -> int:
    """Bytes of GPU memory the peers take at most beside the bench itself."""
    rows = tokens * shape.top_k * 2 * (2 * shape.hidden + 24 * shape.intermediate)
    return sum(peer.copies * shape.experts * shape.expert_bytes + rows for peer in peers)


def load(
    peers: Sequence[Peer], layers: Sequence[MoeWeights], shape: MoeShape, report: Report
) -> Loaded:
    """Peers with their form of the layers; one that fails is left out."""
    tried = [(peer, _try(peer, partial(_load_all, peer, layers, shape), report)) for peer in peers]
    return [(peer, steps) for peer, steps in tried if steps is not None]


def _load_all(peer: Peer, layers: Sequence[MoeWeights], shape: MoeShape) -> list[StepOf]:
    return [peer.load(layer, shape) for layer in layers]


def times(
    loaded: Loaded,
    calls: Sequence[tuple[Tensor, ...]],
    graph_us: Callable[[list[Step]], float],
    report: Report,
) -> list[tuple[Peer, float]]:
    """Microseconds of a step for each (x, ids, weights); ``loaded`` loses what fails."""

    def timed(steps: list[StepOf]) -> float:
        return graph_us([step(*call) for call in calls for step in steps])

    tried = [(entry, _try(entry[0], partial(timed, entry[1]), report)) for entry in loaded]
    loaded[:] = [entry for entry, us in tried if us is not None]
    return [(peer, us) for (peer, _), us in tried if us is not None]


def _try(peer: Peer, work: Callable[[], Any], report: Report) -> Any:
    """What work returns; None and a sentence where it fails."""
    try:
        return work()
    except Exception as error:
        report(f"{peer.backend} is left out, it failed: {_line(error)}")
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError as error:
        raise UnavailableError(
            f"{peer.backend} left the GPU unusable: run bench moe where it is not installed."
        ) from error
    return None


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
