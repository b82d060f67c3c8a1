"""An engine's torch tensors as targets: CPU tensors as numpy views, CUDA tensors through pinned
buffers. Imported by the engines' loaders alone: they have torch."""

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kconvert.layouts.errors import UnsupportedError
from kconvert.layouts.sharding import ModelDims
from kconvert.runtime.plugins.filling import HostMemory, Memory
from kconvert.runtime.plugins.loading import ExpertLayer

# Bits are moved, never values: numpy has no bfloat16.
_BITS = {torch.int32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16,
         torch.float32: torch.int32}  # fmt: skip


def memory_of(layers: Iterable[ExpertLayer]) -> Memory:
    """The way into the parameters of these layers; UnsupportedError where they are not all on one
    device, or on one of another kind."""
    devices = {p.device for layer in layers for p in layer.parameters.values()}
    if len(devices) > 1:
        raise UnsupportedError(
            "the engine keeps some experts in host memory and some on the GPU: start it without"
            " options that offload weights."
        )
    device = devices.pop() if devices else torch.device("cpu")
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"experts on device {device} are not supported, only cpu and cuda.")
    return HostMemory() if device.type == "cpu" else DeviceMemory(device)


def place(layout: str, layer: ExpertLayer, name: str, shape: tuple[int, ...]) -> Any:
    """A layer's parameter as a target in the blob's layout and shape, for `loading.fill`.

    `marlin` has as many bytes as the checkpoint's order: the parameter gets its final shape here.
    """
    parameter = layer.parameters[name]
    if layout == "marlin":
        parameter.data = parameter.data.view(shape)
    tensor = parameter.detach()
    if layout != "marlin" and layer.transposed:
        tensor = tensor.transpose(1, 2)
    bits = tensor.view(_BITS[tensor.dtype])
    return bits.numpy() if tensor.device.type == "cpu" else bits


class _Pinned:
    """Two pinned buffers: one is filled while the other is copied to the device."""

    def __init__(self) -> None:
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def take(self, shape: tuple[int, ...], dtype: Any, device: torch.device) -> NDArray[Any]:
        """The other one, once it is copied."""
        self._turn ^= 1
        event, size = self._copied[self._turn], int(np.prod(shape)) * np.dtype(dtype).itemsize
        if event is not None:
            event.synchronize()
        if self._buffers[self._turn].numel() < size:
            with torch.cuda.device(device):  # a new thread would wake GPU 0
                self._buffers[self._turn] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return self._buffers[self._turn].numpy()[:size].view(dtype).reshape(shape)

    def copied(self, event: torch.cuda.Event) -> None:
        """What was taken last is free when `event` has happened."""
        self._copied[self._turn] = event


class _Thread(threading.local):
    """A thread's stream, and its buffers: what it reads, and what it cuts out of that."""

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None
        self.read, self.cut = _Pinned(), _Pinned()


class DeviceMemory:
    """Targets that are tensors of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread = _Thread()
        self._lock = threading.Lock()
        self._streams: list[torch.cuda.Stream] = []
        self._ready = torch.cuda.Event()  # the targets' memory may still be in use by the engine
        self._ready.record(torch.cuda.current_stream(device))

    def host(self, target: torch.Tensor) -> None:
        return None

    def take(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        return self._thread.read.take(shape, dtype, self._device)

    def put(self, source: NDArray[Any], target: torch.Tensor) -> None:
        mine = self._thread
        if mine.stream is None:
            mine.stream = torch.cuda.Stream(self._device)
            mine.stream.wait_event(self._ready)
            with self._lock:
                self._streams.append(mine.stream)
        buffer = mine.read
        if not source.flags.c_contiguous:  # copied from pageable memory it would be slow
            buffer = mine.cut
            np.copyto(cut := buffer.take(source.shape, source.dtype, self._device), source)
            source = cut
        signed = source.view(np.dtype(f"i{source.dtype.itemsize}"))
        with torch.cuda.stream(mine.stream):
            target.copy_(torch.from_numpy(signed), non_blocking=True)
            event = torch.cuda.Event()
            event.record(mine.stream)
        buffer.copied(event)

    def finish(self) -> None:
        for stream in self._streams:
            stream.synchronize()


def data_of(tensor: torch.Tensor) -> memoryview:
    """A CPU tensor's bytes."""
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def fill_shapes(module: torch.nn.Module, dims: ModelDims) -> None:
    """Give a layer the `weight_shape` companions, which blobs drop: [n, k] of each source matrix.
    Nobody reads them, but they are to be what the engine's own loader would have left."""
    n, k = dims.intermediate, dims.hidden
    for name, shape in (("w13_weight_shape", (n, k)), ("w2_weight_shape", (k, n))):
        module.get_parameter(name).data.copy_(torch.tensor(shape))
