"""torch tensors as targets: the host's as numpy views, CUDA's through pinned buffers. Importing
this imports torch."""

import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kconvert.runtime.filling.filler import HostMemory, Memory

# Bits are moved, never values: numpy has no bfloat16.
_BITS = {torch.int32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16,
         torch.float32: torch.int32}  # fmt: skip


def memory_on(device: torch.device) -> Memory:
    """The memory of this device, the host or a CUDA device, for a `Filler`."""
    return HostMemory() if device.type == "cpu" else DeviceMemory(device)


def bits_of(tensor: torch.Tensor) -> Any:
    """A tensor as a transfer's target: a view of its bits."""
    bits = tensor.detach().view(_BITS[tensor.dtype])
    return bits.numpy() if tensor.device.type == "cpu" else bits


class _Buffer:
    """Pinned memory that files are read into, and more for parts that are cut out of it."""

    def __init__(self) -> None:
        self._read = self._cut = torch.empty(0, dtype=torch.uint8)
        self._cut_bytes = 0
        self._copied: torch.cuda.Event | None = None

    @property
    def nbytes(self) -> int:
        return self._read.numel() + self._cut.numel()

    def take(self, size: int) -> NDArray[np.uint8]:
        """`size` bytes of it, once what was in it has been copied."""
        if self._copied is not None:
            self._copied.synchronize()
        self._cut_bytes = 0
        if self._read.numel() < size:
            whole = 1 << (size - 1).bit_length()  # as torch would round it
            self._read = torch.empty(whole, dtype=torch.uint8, pin_memory=True)
        return self._read.numpy()[:size]

    def compact(self, cut: NDArray[Any]) -> NDArray[Any]:
        """A contiguous copy of a part of what was read: a strided part would go to the device by
        way of memory that is not pinned."""
        if self._cut.numel() < self._read.numel():  # cuts of one read do not overlap
            self._cut = torch.empty(self._read.numel(), dtype=torch.uint8, pin_memory=True)
        start, self._cut_bytes = self._cut_bytes, self._cut_bytes + cut.nbytes
        packed = self._cut.numpy()[start : self._cut_bytes].view(cut.dtype).reshape(cut.shape)
        np.copyto(packed, cut)
        return packed

    def copied_at(self, stream: torch.cuda.Stream) -> None:
        if self._copied is None:
            self._copied = torch.cuda.Event(blocking=True)  # a spinning thread takes a core
        self._copied.record(stream)


class _Thread(threading.local):
    """A thread's stream, and two buffers: one is filled while the other is copied."""

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None
        self.buffers: tuple[_Buffer, ...] = ()
        self.turn = 0


class DeviceMemory:
    """Targets that are tensors of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread = _Thread()
        self._lock = threading.Lock()
        self._streams: list[torch.cuda.Stream] = []
        self._buffers: list[_Buffer] = []
        self._ready = torch.cuda.Event()  # the targets' memory may still be in use by the engine
        self._ready.record(torch.cuda.current_stream(device))

    @property
    def buffer_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def host(self, target: torch.Tensor) -> None:
        return None

    def take(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        mine, size = self._thread, int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._prepare(mine)
        mine.turn ^= 1
        with torch.cuda.device(self._device):  # or a new thread would make a context on GPU 0
            taken: NDArray[Any] = mine.buffers[mine.turn].take(size).view(dtype).reshape(shape)
            return taken

    def put(self, source: NDArray[Any], target: torch.Tensor) -> None:
        mine = self._thread
        assert mine.stream is not None  # `take` came before
        buffer = mine.buffers[mine.turn]
        signed = source.view(np.dtype(f"i{source.dtype.itemsize}"))
        with torch.cuda.stream(mine.stream):
            if not signed.flags.c_contiguous:
                signed = buffer.compact(signed)
            target.copy_(torch.from_numpy(signed), non_blocking=True)
            buffer.copied_at(mine.stream)

    def _prepare(self, mine: _Thread) -> None:
        """A new thread's stream and buffers."""
        if mine.stream is None:
            mine.stream = torch.cuda.Stream(self._device)
            mine.stream.wait_event(self._ready)
            mine.buffers = (_Buffer(), _Buffer())
            with self._lock:
                self._streams.append(mine.stream)
                self._buffers += mine.buffers

    def finish(self) -> None:
        for stream in self._streams:
            stream.synchronize()
