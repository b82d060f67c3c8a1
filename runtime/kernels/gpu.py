"""The GPU: what it is, kernels loaded on it, and their launches.

Every launch goes to torch's current stream, allocates nothing, and can be captured in a CUDA graph.
Kernels start while the one before is finishing (programmatic dependent launch).
"""

from collections.abc import Mapping
from ctypes import c_float, c_int
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kconvert.runtime.kernels.nvrtc import cached_cubin, entry_of


@dataclass(frozen=True)
class Gpu:
    """What a schedule needs to know of a GPU."""

    arch: str  # what NVRTC compiles for, "sm_90a"
    shared_per_sm: int  # bytes
    sms: int


@cache
def gpu(index: int) -> Gpu:
    """GPU ``index`` as a schedule sees it."""
    properties = torch.cuda.get_device_properties(index)
    arch = f"sm_{properties.major}{properties.minor}a"
    return Gpu(arch, properties.shared_memory_per_multiprocessor, properties.multi_processor_count)


@cache
def _device(index: int) -> Any:
    from cuda.core import Device

    device = Device(index)
    device.set_current()
    return device


@cache
def _kernel(name: str, defines: tuple[tuple[str, int], ...], shared: int, index: int) -> Any:
    """The kernel loaded on GPU ``index``, allowed ``shared`` bytes of dynamic shared memory."""
    from cuda.bindings import driver
    from cuda.core import ObjectCode

    device = _device(index)
    cubin = cached_cubin(name, gpu(index).arch, dict(defines))
    kernel = ObjectCode.from_cubin(cubin).get_kernel(entry_of(name))
    attribute = driver.CUfunction_attribute
    for key, value in (
        (attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared),
        (attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100 if shared else -1),
    ):
        (error,) = driver.cuKernelSetAttribute(key, value, kernel.handle, device.device_id)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name}: {shared} bytes of shared memory refused: {error.name}")
    return kernel


class _Stream:
    """torch's current stream in the form cuda.core takes."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._handle = stream.cuda_stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def _converted(argument: Any) -> Any:
    if argument is None:
        return 0
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return c_float(argument) if isinstance(argument, float) else c_int(argument)


def launch(
    name: str,
    defines: Mapping[str, int],
    grid: tuple[int, ...],
    block: int,
    args: tuple[Any, ...],
    shared: int = 0,
    cluster: int = 1,
    overlap: bool = True,
) -> None:
    """Launch the kernel ``name`` ("moe/w13"): ``grid`` clusters of ``cluster`` blocks. Tensor
    arguments go as pointers, None as a null one, ints as 32-bit ints, floats as 32-bit floats."""
    from cuda import core

    device_index = next(a.device.index for a in args if isinstance(a, Tensor) and a.is_cuda)
    kernel = _kernel(name, tuple(sorted(defines.items())), shared, device_index)
    config = core.LaunchConfig(
        grid=grid,
        cluster=cluster if cluster > 1 else None,
        block=block,
        shmem_size=shared,
        programmatic_stream_serialization=overlap,
    )
    converted = [_converted(a) for a in args]
    stream = _device(device_index).create_stream(_Stream(torch.cuda.current_stream(device_index)))
    core.launch(stream, config, kernel, *converted)
