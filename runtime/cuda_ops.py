"""The MoE operations on the GPU: launches of the kernels in ``kernels/``.

Every launch goes to torch's current stream, allocates nothing, and can be captured in a CUDA graph.
Kernels start while the one before is finishing (programmatic dependent launch).
"""

from collections.abc import Mapping
from copy import copy
from ctypes import c_float, c_int
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kconvert.runtime.moe_shape import W13_CHUNKS, Gpu, MoeShape, Schedule, schedule
from kconvert.runtime.nvrtc import cached_cubin


@cache
def _device(index: int) -> Any:
    from cuda.core import Device

    device = Device(index)
    device.set_current()
    return device


@cache
def _kernel(
    file: str, entry: str, defines: tuple[tuple[str, int], ...], shared: int, index: int
) -> Any:
    """The kernel loaded on GPU ``index``, allowed ``shared`` bytes of dynamic shared memory."""
    from cuda.bindings import driver
    from cuda.core import ObjectCode

    device = _device(index)
    cubin = cached_cubin(file, gpu(index).arch, dict(defines))
    kernel = ObjectCode.from_cubin(cubin).get_kernel(entry)
    attribute = driver.CUfunction_attribute
    for name, value in (
        (attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared),
        (attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100 if shared else -1),
    ):
        (error,) = driver.cuKernelSetAttribute(name, value, kernel.handle, device.device_id)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{entry}: {shared} bytes of shared memory refused: {error.name}")
    return kernel


class _Stream:
    """torch's current stream in the form cuda.core takes."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._handle = stream.cuda_stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def _launch(
    file: str,
    defines: Mapping[str, int],
    grid: tuple[int, ...],
    block: int,
    args: tuple[Any, ...],
    entry: str | None = None,
    shared: int = 0,
    cluster: int = 1,
    overlap: bool = True,
) -> None:
    """Launch ``grid`` clusters of ``cluster`` blocks. Tensor arguments go as pointers, ints as
    32-bit ints, floats as 32-bit floats."""
    from cuda.core import LaunchConfig, launch

    device_index = next(a.device.index for a in args if isinstance(a, Tensor))
    kernel = _kernel(file, entry or file, tuple(sorted(defines.items())), shared, device_index)
    config = LaunchConfig(
        grid=grid,
        cluster=cluster if cluster > 1 else None,
        block=block,
        shmem_size=shared,
        programmatic_stream_serialization=overlap,
    )
    converted = [
        a.data_ptr() if isinstance(a, Tensor) else c_float(a) if isinstance(a, float) else c_int(a)
        for a in args
    ]
    stream = _device(device_index).create_stream(_Stream(torch.cuda.current_stream(device_index)))
    launch(stream, config, kernel, *converted)


@dataclass(frozen=True)
class MoeWeights:
    """One layer's routed experts as the Marlin blob holds them (E experts of this rank).

    w13 int32 [E, K/16, 4N], w13_scale bf16 [E, K/g, 2N], w2 int32 [E, N/16, 2K],
    w2_scale bf16 [E, N/g, K]. Scales are below 2^15 (kernels/marlin_stream.cuh says why).
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


@cache
def gpu(index: int) -> Gpu:
    """GPU ``index`` as the schedule sees it."""
    properties = torch.cuda.get_device_properties(index)
    arch = f"sm_{properties.major}{properties.minor}a"
    return Gpu(arch, properties.shared_memory_per_multiprocessor, properties.multi_processor_count)


def moe_schedule(shape: MoeShape, tokens: int, device: torch.device) -> Schedule:
    """The schedule this GPU runs ``tokens`` tokens with."""
    return schedule(shape, tokens, gpu(device.index))


def router(logits: Tensor, bias: Tensor, top_k: int, factor: float) -> tuple[Tensor, Tensor]:
    """The twin of torch_ops.router: float32 [M, E] -> ids int32, weights float32 [M, top_k]."""
    tokens = len(logits)
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    router_into(logits, bias, factor, ids, weights)
    return ids, weights


def router_into(logits: Tensor, bias: Tensor, factor: float, ids: Tensor, weights: Tensor) -> None:
    """router, into ids and weights [M, top_k]."""
    tokens, experts = logits.shape
    defines = {"EXPERTS": experts, "TOP_K": ids.shape[1]}
    args = (logits, bias, tokens, factor, ids, weights)
    _launch("moe_router", defines, ((tokens + 3) // 4,), 128, args)


def align(ids: Tensor, shape: MoeShape, work: MoeWorkspace) -> None:
    """Group the (token, slot) pairs of ids int32 [M, top_k] by expert, into ``work``."""
    plan = moe_schedule(shape, ids.shape[0], ids.device)
    lists = (work.items, work.item_count, work.slots)
    args = (ids, ids.numel(), shape.first_expert, plan.block_rows, *lists)
    _launch("moe_align", {"EXPERTS": shape.experts}, (1,), 1024, args)


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    layer: MoeWeights,
    shape: MoeShape,
    work: MoeWorkspace,
    out: Tensor,
) -> None:
    """Both GEMMs and the sum over slots, after ``align``: x bf16 [M, K] -> out float32 [M, K].

    A row of out depends on that row of x, ids and weights alone, bit for bit.
    """
    plan = moe_schedule(shape, x.shape[0], x.device)
    w13(x, layer, shape, plan, work)
    w2(weights, layer, shape, plan, work)
    combine(ids, shape, work, out)


def gemm_kernels(shape: MoeShape, plan: Schedule) -> list[tuple[str, dict[str, int], int, int]]:
    """(file, macros, dynamic shared memory in bytes, threads a block) of w13 and of w2."""
    group = 12 * 32  # threads of both group forms
    threads_w13 = {"moe_w13": W13_CHUNKS * 32, "moe_w13_wide": 256}.get(plan.w13, group)
    threads_w2 = plan.warps_w2 * 32 if plan.w2 == "moe_w2" else group
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
        (plan.w13, common | w13, plan.shared_w13, threads_w13),
        (plan.w2, common | w2, plan.shared_w2(shape), threads_w2),
    ]


def w13(x: Tensor, layer: MoeWeights, shape: MoeShape, plan: Schedule, work: MoeWorkspace) -> None:
    """SiLU(gate) * up of the aligned rows of x bf16 [M, K] -> work.act, a row a position."""
    file, defines, shared, threads = gemm_kernels(shape, plan)[0]
    _launch(
        file,
        defines,
        (plan.blocks_w13,),
        threads,
        (x, layer.w13, layer.w13_scale, work.items, work.item_count, work.slots, work.act),
        shared=shared,
        cluster=1 if file == "moe_w13_group" else shape.split,
    )


def w2(
    weights: Tensor, layer: MoeWeights, shape: MoeShape, plan: Schedule, work: MoeWorkspace
) -> None:
    """weights float32 [M, top_k] times act times w2 -> work.y, a row a slot. Directly after w13:
    it reads the lists before it waits for the kernel ahead."""
    file, defines, shared, threads = gemm_kernels(shape, plan)[1]
    lists = (work.items, work.item_count, work.slots)
    args: tuple[Any, ...] = (work.act, layer.w2, layer.w2_scale, *lists, weights, work.y)
    if file == "moe_w2":
        args += (plan.tiles_per_warp,)
    _launch(file, defines, (plan.blocks_w2,), threads, args, shared=shared)


def combine(ids: Tensor, shape: MoeShape, work: MoeWorkspace, out: Tensor) -> None:
    """work.y -> out float32 [M, K]: the sum over each token's slots, in slot order."""
    _launch(
        "moe_combine",
        {"HIDDEN": shape.hidden, "TOP_K": shape.top_k},
        (out.shape[0], -(-shape.hidden // 1024)),
        128,
        (work.y, ids, out, shape.first_expert, shape.experts),
    )


def moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    layer: MoeWeights,
    shape: MoeShape,
    work: MoeWorkspace,
) -> Tensor:
    """The twin of torch_ops.moe: x bf16 [M, K] -> float32 [M, K]."""
    check(x, ids, weights, shape, work)
    out = torch.empty(x.shape[0], shape.hidden, dtype=torch.float32, device=x.device)
    align(ids, shape, work)
    experts(x, ids, weights, layer, shape, work, out)
    return out


def check(x: Tensor, ids: Tensor, weights: Tensor, shape: MoeShape, work: MoeWorkspace) -> None:
    """Raises ValueError where an argument is not what the kernels take."""
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


def w4a16_rows(x: Tensor, expert: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """The simple reference product: x bf16 [R, k], expert int32 [R] -> float32 [R, n].

    packed int32 [E, n, k/8], scales bf16 [E, n, k/g] in the checkpoint's order. A row whose expert
    is negative is not computed and comes back as zeros.
    """
    rows, k = x.shape
    n = packed.shape[1]
    y = torch.zeros(rows, n, dtype=torch.float32, device=x.device)
    args = (x, expert, packed, scales, y, n, k, k // scales.shape[2])
    _launch("w4a16", {}, (-(-n // 128), rows), 128, args, entry="w4a16_rows")
    return y


@cache
def _sink(index: int) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=f"cuda:{index}")


def read_experts(layer: MoeWeights, chosen: Tensor) -> None:
    """Only read the weights and scales of the experts in chosen int32 [C]: w13, then w2.

    Two launches that do not overlap, the least that two kernels over these bytes can take. Raises
    ValueError where an expert's tensor is not a multiple of 16 KiB.
    """
    sms = gpu(chosen.device.index).sms
    for blobs in ((layer.w13, layer.w13_scale), (layer.w2, layer.w2_scale)):
        sizes = [blob[0].numel() * blob.element_size() for blob in blobs]
        if any(size % 16384 for size in sizes):
            raise ValueError(f"expert tensors of {sizes} bytes are not multiples of 16384")
        pieces = [
            arg for blob, size in zip(blobs, sizes, strict=True) for arg in (blob, size // 16384)
        ]
        args = (*pieces, chosen, len(chosen), _sink(chosen.device.index))
        _launch("read_floor", {}, (sms * 4,), 512, args, overlap=False)
