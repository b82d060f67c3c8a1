"""An engine's torch tensors as targets: CPU tensors as numpy views, CUDA tensors through pinned
buffers. Imported by the engines' loaders alone: they have torch."""

import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kconvert.runtime.plugins.filling import HostMemory, Memory

# Bits are moved, never values: numpy has no bfloat16.
_BITS = {torch.int32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16,
         torch.float32: torch.int32}  # fmt: skip


def memory_of(device: torch.device) -> Memory:
    """The way into tensors of `device`."""
    return HostMemory() if device.type == "cpu" else DeviceMemory(device)


def as_target(tensor: torch.Tensor) -> Any:
    """What `memory_of` its device takes for a tensor, which must not require a gradient."""
    bits = tensor.detach().view(_BITS[tensor.dtype])
    return bits.numpy() if tensor.device.type == "cpu" else bits


class _Thread(threading.local):
    """A thread's stream, and two pinned buffers: one is filled while the other is copied."""

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None
        self.buffers: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8)] * 2
        self.copied: list[torch.cuda.Event | None] = [None, None]
        self.turn = 0


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
        mine, size = self._thread, int(np.prod(shape)) * np.dtype(dtype).itemsize
        mine.turn ^= 1
        event = mine.copied[mine.turn]
        if event is not None:
            event.synchronize()
        if mine.buffers[mine.turn].numel() < size:
            mine.buffers[mine.turn] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return mine.buffers[mine.turn].numpy()[:size].view(dtype).reshape(shape)

    def put(self, source: NDArray[Any], target: torch.Tensor) -> None:
        mine = self._thread
        if mine.stream is None:
            mine.stream = torch.cuda.Stream(self._device)
            mine.stream.wait_event(self._ready)
            with self._lock:
                self._streams.append(mine.stream)
        signed = source.view(np.dtype(f"i{source.dtype.itemsize}"))
        with torch.cuda.stream(mine.stream):
            if not signed.flags.c_contiguous:  # a cut: compact it here, at the host's rate
                signed = np.ascontiguousarray(signed)
            target.copy_(torch.from_numpy(signed), non_blocking=True)
            event = mine.copied[mine.turn] = torch.cuda.Event()
            event.record(mine.stream)

    def finish(self) -> None:
        for stream in self._streams:
            stream.synchronize()


def data_of(tensor: torch.Tensor) -> memoryview:
    """A CPU tensor's bytes."""
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
