"""The MoE operations on the GPU: launches of the kernels in this folder."""

from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kconvert.runtime.kernels.gpu import gpu, launch
from kconvert.runtime.kernels.moe.shape import (
    W13_CHUNKS,
    MoeShape,
    Schedule,
    align_blocks,
    schedule,
)


@dataclass(frozen=True)
class MoeWeights:
    """One layer's routed experts as the Marlin blob holds them (E experts of this rank): the
    tensors of `layouts.experts.STACKED`, in that order.

    w13 int32 [E, K/16, 4N], w13_scale bf16 [E, K/g, 2N], w2 int32 [E, N/16, 2K],
    w2_scale bf16 [E, N/g, K]. Scales are below 2^15 (marlin_stream.cuh says why).
    """

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor


class MoeWorkspace:
    """Buffers for up to ``max_tokens`` tokens, shared by all layers of one shape.

    One call at a time may use it: calls on different streams need one each.
    """

    def __init__(self, shape: MoeShape, max_tokens: int, device: torch.device | str) -> None:
        pairs = max_tokens * shape.top_k
        self.max_tokens = max_tokens
        self._make_lists(pairs, device)
        self.act = torch.empty(pairs, shape.intermediate, dtype=torch.bfloat16, device=device)
        self.y = torch.empty(pairs, shape.hidden, dtype=torch.bfloat16, device=device)

    def _make_lists(self, pairs: int, device: torch.device | str) -> None:
        # At worst every pair is an item of its own.
        self.items = torch.empty(pairs, 4, dtype=torch.int32, device=device)
        self.item_count = torch.empty(1, dtype=torch.int32, device=device)
        self.slots = torch.empty(pairs, dtype=torch.int32, device=device)

    def share(self) -> "MoeWorkspace":
        """A workspace with lists of its own over the same large buffers."""
        other = copy(self)
        other._make_lists(len(self.slots), self.slots.device)
        return other


def moe_schedule(shape: MoeShape, tokens: int, device: torch.device) -> Schedule:
    """The schedule this GPU runs ``tokens`` tokens with."""
    return schedule(shape, tokens, gpu(device.index))


def router(logits: Tensor, bias: Tensor, top_k: int, factor: float) -> tuple[Tensor, Tensor]:
    """The twin of reference.router: float32 [M, E] -> ids int32, weights float32 [M, top_k]."""
    tokens = len(logits)
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    router_into(logits, bias, factor, ids, weights)
    return ids, weights


def router_into(
    logits: Tensor,
    bias: Tensor,
    factor: float,
    ids: Tensor,
    weights: Tensor,
    counts: Tensor | None = None,
) -> None:
    """router, into ids and weights [M, top_k]; a token whose counts int32 [M] is 0 gets −1."""
    tokens, experts = logits.shape
    defines = {"EXPERTS": experts, "TOP_K": ids.shape[1]}
    args = (logits, bias, counts, factor, ids, weights)
    launch("moe/router", defines, (tokens,), 128, args)


def align(ids: Tensor, shape: MoeShape, work: MoeWorkspace) -> None:
    """Group the (token, slot) pairs of ids int32 [M, top_k] by expert, into ``work``."""
    plan = moe_schedule(shape, ids.shape[0], ids.device)
    lists = (work.items, work.item_count, work.slots)
    args = (ids, ids.numel(), shape.first_expert, plan.block_rows, *lists)
    blocks = align_blocks(ids.numel())
    defines = {"EXPERTS": shape.experts, "BLOCKS": blocks}
    launch("moe/align", defines, (1,), 1024, args, cluster=blocks)


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    layer: MoeWeights,
    shape: MoeShape,
    work: MoeWorkspace,
    out: Tensor,
    shared: Tensor | None = None,
) -> None:
    """Both GEMMs and the sum over slots, then ``shared`` float32 [M, K], after ``align``: x bf16
    [M, K] -> out float32 [M, K].

    A row of out depends on that row of x, ids and weights alone, bit for bit.
    """
    plan = moe_schedule(shape, x.shape[0], x.device)
    w13(x, layer, shape, plan, work)
    w2(weights, layer, shape, plan, work)
    combine(ids, shape, work, out, shared)


def gemm_kernels(shape: MoeShape, plan: Schedule) -> list[tuple[str, dict[str, int], int, int]]:
    """(file, macros, dynamic shared memory in bytes, threads a block) of w13 and of w2."""
    group = 12 * 32  # threads of the group and many forms
    threads_w13 = {"moe/w13": W13_CHUNKS * 32, "moe/w13_wide": 256}.get(plan.w13, group)
    threads_w2 = plan.warps_w2 * 32 if plan.w2 == "moe/w2" else group
    common = {
        "HIDDEN": shape.hidden,
        "INTERMEDIATE": shape.intermediate,
        "GROUP": shape.group,
        "BLOCK_ROWS": plan.block_rows,
    }
    w13 = {
        "TOP_K": shape.top_k,
        "SPLIT": shape.split,
        "STAGES": plan.stages_w13,
        "MIN_BLOCKS": max(1, plan.threads_w13 // threads_w13),
    }
    w2 = {
        "CHUNKS": shape.w2_chunks,
        "WARPS": plan.warps_w2,
        "WARPS_K": plan.warps_k,
        "STAGES": plan.stages_w2,
        "MIN_BLOCKS": max(1, plan.threads_w2 // threads_w2),
    }
    return [
        (plan.w13, common | w13, plan.shared_w13(shape), threads_w13),
        (plan.w2, common | w2, plan.shared_w2(shape), threads_w2),
    ]


def w13(x: Tensor, layer: MoeWeights, shape: MoeShape, plan: Schedule, work: MoeWorkspace) -> None:
    """SiLU(gate) * up of the aligned rows of x bf16 [M, K] -> work.act, a row a position."""
    file, defines, shared, threads = gemm_kernels(shape, plan)[0]
    launch(
        file,
        defines,
        (plan.blocks_w13,),
        threads,
        (x, layer.w13, layer.w13_scale, work.items, work.item_count, work.slots, work.act),
        shared=shared,
        cluster=shape.split if file in ("moe/w13", "moe/w13_wide") else 1,
    )


def w2(
    weights: Tensor, layer: MoeWeights, shape: MoeShape, plan: Schedule, work: MoeWorkspace
) -> None:
    """weights float32 [M, top_k] times act times w2 -> work.y, a row a slot. Directly after w13:
    it reads the lists before it waits for the kernel ahead."""
    file, defines, shared, threads = gemm_kernels(shape, plan)[1]
    lists = (work.items, work.item_count, work.slots)
    args: tuple[Any, ...] = (work.act, layer.w2, layer.w2_scale, *lists, weights, work.y)
    if file == "moe/w2":
        args += (plan.tiles_per_warp,)
    launch(file, defines, (plan.blocks_w2,), threads, args, shared=shared)


def combine(
    ids: Tensor, shape: MoeShape, work: MoeWorkspace, out: Tensor, shared: Tensor | None = None
) -> None:
    """work.y -> out float32 [M, K]: the sum over each token's slots, in slot order, + shared."""
    launch(
        "moe/combine",
        {"HIDDEN": shape.hidden, "TOP_K": shape.top_k},
        (out.shape[0], -(-shape.hidden // 1024)),
        128,
        (work.y, ids, shared, out, shape.first_expert, shape.experts),
    )


def moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    layer: MoeWeights,
    shape: MoeShape,
    work: MoeWorkspace,
) -> Tensor:
    """The twin of reference.moe: x bf16 [M, K] -> float32 [M, K]."""
    check(x, ids, weights, shape, work)
    out = torch.empty(x.shape[0], shape.hidden, dtype=torch.float32, device=x.device)
    align(ids, shape, work)
    experts(x, ids, weights, layer, shape, work, out)
    return out


def check(x: Tensor, ids: Tensor, weights: Tensor, shape: MoeShape, work: MoeWorkspace) -> None:
    """Raises ValueError if an argument is not what the kernels take."""
    tokens = x.shape[0]
    wanted = {
        "x": (x, (tokens, shape.hidden), torch.bfloat16),
        "ids": (ids, (tokens, shape.top_k), torch.int32),
        "weights": (weights, (tokens, shape.top_k), torch.float32),
    }
    for name, (tensor, sizes, dtype) in wanted.items():
        if tuple(tensor.shape) != sizes or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected contiguous "
                f"{dtype} {sizes}"
            )
    if tokens * shape.hidden * 2 >= 1 << 31:
        raise ValueError(f"{tokens} tokens of {shape.hidden}: x must be smaller than 2 GiB")
    if tokens > work.max_tokens:
        raise ValueError(f"{tokens} tokens, the workspace is for {work.max_tokens}")
