"""What ``kconvert bench moe`` times beside kconvert if it can be imported: vLLM and Humming.

Written from the sources of vllm 0.33.0 (commit 4ba787ec9) and humming-kernels 0.1.19, the wheels on
PyPI; both have run like this on an H200. Each fact below names its file there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from kconvert.runtime.bench import humming as bench_humming
from kconvert.runtime.bench.humming import check
from kconvert.runtime.kernels.moe.launch import MoeWeights
from kconvert.runtime.kernels.moe.shape import MoeShape

Step = Callable[[], Tensor]
StepOf = Callable[[Tensor, Tensor, Tensor], Step]  # of x, ids, weights, as kconvert gets them


@dataclass(frozen=True)
class Peer:
    """Another library's MoE: ``load`` prepares a layer; what it returns prepares a timed step."""

    backend: str
    package: str
    whole: bool  # a step is the whole layer; if not, the two GEMMs
    inside: str  # what a step does
    copies: int  # layers it keeps beside the three of the bench, and works on while it loads one
    load: Callable[[MoeWeights, MoeShape], StepOf]


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

    inside = "the whole layer: alignment, both GEMMs, SiLU·up, router weight, sum over slots"
    return Peer("vllm", "vllm", True, inside, 0, load)


def _humming(form: str, inside: str) -> Peer:
    name = f"humming {form.partition('_')[0]}"
    return Peer(name, "humming-kernels", False, inside, 6, bench_humming.loader(form))


MAKERS = (
    ("vllm", _vllm),
    ("humming", partial(_humming, "indexed", "both GEMMs; rows are gathered inside")),
    (
        "humming",
        partial(_humming, "grouped_contiguous", "both GEMMs, of rows that are sorted already"),
    ),
)


def find(report: Callable[[str], None]) -> list[Peer]:
    """The peers that can be imported; one that is there but not as expected is reported."""
    peers, said = [], []
    for package, make in MAKERS:
        try:
            peers.append(make())
        except Exception as error:  # an import may fail in any way
            absent = isinstance(error, ModuleNotFoundError) and error.name == package
            sentence = f"{package} is left out, it is not as expected: {line(error)}"
            if not absent and sentence not in said:
                said.append(sentence)
    for sentence in said:
        report(sentence)
    return peers


def memory_needed(peers: Sequence[Peer], shape: MoeShape, tokens: int) -> int:
    """Bytes of GPU memory that the hungriest peer takes at most, beside the layers and inputs."""
    rows = tokens * shape.top_k * 2 * (2 * shape.hidden + 24 * shape.intermediate)
    return max((p.copies * shape.experts * shape.expert_bytes + rows for p in peers), default=0)


def line(error: BaseException) -> str:
    """An error in a line: its class, and the first line of its text."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
