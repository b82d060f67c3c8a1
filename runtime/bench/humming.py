"""Humming's two MoE GEMMs for ``kconvert bench moe``, in both of its forms.

Written from the sources of humming-kernels 0.1.19, the wheel on PyPI; the indexed form has run like
this on an H200. Each fact below names its file there.
"""

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kconvert.runtime.kernels.moe.launch import MoeWeights
from kconvert.runtime.kernels.moe.reference import unpack_marlin, unpermute_scales
from kconvert.runtime.kernels.moe.shape import MoeShape

# transform.py: prepare_and_transform_humming_tensors takes int32 [E, N, K/8], low nibble first, and
# bf16 scales [E, N, K/g], both as in the checkpoint; schema/humming.py: uint4 without zero point is
# (nibble − 8)·scale. tune/__init__.py: get_heuristics_config gives (above, up to, kernel) by rows.
# forward.py: humming_forward is one GEMM; gemm_type "indexed" (include/humming/scheduler.cuh) reads
# row id // top_k and writes row id, for ids sorted by expert, whole blocks of block_shape[0] rows
# an expert; "grouped_contiguous" reads and writes rows that are sorted by expert already, of which
# expert_layout, int64 [E + 1], has the sums (testing/data.py). layer.py: 2048 int32 zeros for
# locks. vLLM's fused_humming_moe.py calls both just so, with the rows this rank expects as
# valid_shape_m.
GEMM = (
    *("config", "inputs", "outputs", "locks", "top_k", "valid_shape_m", "compute_config"),
    *("tuning_config", "sorted_ids", "expert_ids", "num_tokens_padded", "expert_layout", "weight"),
    "weight_scale",
)
FORMS = ("indexed", "grouped_contiguous")


def loader(form: str) -> Callable[[MoeWeights, MoeShape], Callable[..., Any]]:
    """The function that prepares a layer for one of Humming's FORMS. Raises what its import does,
    and TypeError if a call changed."""
    prepare = import_module("humming.transform").prepare_and_transform_humming_tensors
    forward = import_module("humming.forward").humming_forward
    tune = import_module("humming.tune").get_heuristics_config
    schema = import_module("humming.schema").HummingWeightSchema
    sizes = ("shape_n", "shape_k", "num_experts", "torch_dtype", "device")
    check(prepare, ("tensors", "weight_schema", *sizes))
    check(forward, GEMM)
    check(tune, ("layer_config", "gemm_type", "device"))
    check(schema, ("b_dtype", "weight_scale_group_size"))

    def gemm_of(
        packed: Tensor, scales: Tensor, shape: MoeShape, n: int, k: int
    ) -> Callable[..., Any]:
        config, tensors = prepare(
            tensors={
                "weight": torch.stack([_checkpoint_words(words) for words in packed]),
                "weight_scale": torch.stack([unpermute_scales(one) for one in scales]),
            },
            weight_schema=schema(b_dtype="uint4", weight_scale_group_size=shape.group),
            **dict(zip(sizes, (n, k, len(packed), scales.dtype, packed.device), strict=True)),
        )
        plans = tune(layer_config=config, gemm_type=form, device=packed.device)
        locks = torch.zeros(2048, dtype=torch.int32, device=packed.device)

        def gemm(ids: Tensor, top_k: int) -> Callable[[Tensor], Any]:
            rows = -(-ids.numel() * shape.experts // shape.total_experts)
            how = dict(valid_shape_m=rows, tuning_config=plans, locks=locks, **tensors)
            how["compute_config"] = {"gemm_type": form}
            if form == "indexed":
                block = next(plan["block_shape"][0] for low, to, plan in plans if low < rows <= to)
                how |= _blocks(ids, shape, block) | {"top_k": top_k}
            else:
                counts = sorted_pairs(ids, shape)[1]
                how["expert_layout"] = torch.nn.functional.pad(counts.cumsum(0), (1, 0))

            def run(x: Tensor) -> Any:
                return forward(config, inputs=x, outputs=x.new_empty(ids.numel(), n), **how)

            return run

        return gemm

    def load(layer: MoeWeights, shape: MoeShape) -> Callable[..., Any]:
        n, k = shape.intermediate, shape.hidden
        w13 = gemm_of(layer.w13, layer.w13_scale, shape, 2 * n, k)
        w2 = gemm_of(layer.w2, layer.w2_scale, shape, k, n)

        def step_of(x: Tensor, ids: Tensor, weights: Tensor) -> Callable[[], Tensor]:
            first, second = w13(ids, shape.top_k), w2(ids, 1)
            if form != "indexed":  # as many rows as pairs, this rank's first
                order = sorted_pairs(ids, shape)[0]
                rows = torch.nn.functional.pad(order, (0, ids.numel() - len(order)))
                x = x[rows // shape.top_k]
            gate, up = first(x).float().chunk(2, 1)
            act = (torch.nn.functional.silu(gate) * up).bfloat16()
            return lambda: (first(x), second(act))[1]

        return step_of

    return load


def check(function: Callable[..., Any], names: Sequence[str]) -> None:
    """Raise TypeError if the function cannot be called with these names."""
    inspect.signature(function).bind(**dict.fromkeys(names))


def _checkpoint_words(packed: Tensor) -> Tensor:
    nibbles = unpack_marlin(packed)
    return (nibbles[:, ::2] | nibbles[:, 1::2] << 4).view(torch.int32)


def sorted_pairs(ids: Tensor, shape: MoeShape) -> tuple[Tensor, Tensor]:
    """This rank's (token, slot) pairs by expert, and how many each expert has."""
    local = ids.flatten().long() - shape.first_expert
    local[(local < 0) | (local >= shape.experts)] = shape.experts
    counts = local.bincount(minlength=shape.experts + 1)[:-1]
    return local.argsort(stable=True)[: counts.sum()], counts


def _blocks(ids: Tensor, shape: MoeShape, block: int) -> dict[str, Tensor]:
    """Each expert's pairs, filled up to whole blocks with the number of all pairs."""
    order, counts = sorted_pairs(ids, shape)
    blocks = (counts + block - 1) // block
    skipped = (blocks.cumsum(0) - blocks) * block - (counts.cumsum(0) - counts)
    place = torch.arange(len(order), device=ids.device) + skipped.repeat_interleave(counts)
    # One block more than there are, so that no list is empty.
    lists = torch.full(((int(blocks.sum()) + 1) * block,), ids.numel(), device=ids.device)
    lists[place] = order
    experts = torch.arange(shape.experts, device=ids.device).repeat_interleave(blocks)
    return {
        "sorted_ids": lists.int(),
        "expert_ids": torch.nn.functional.pad(experts, (0, 1)).int(),
        "num_tokens_padded": (blocks.sum() * block).int().view(1),
    }
