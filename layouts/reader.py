"""Reading tensors of shards and blobs: with pread into reused buffers, each byte once, counted."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.checkpoint import SourceTensor
from kconvert.layouts.errors import TruncatedFileError

_ALIGNMENT = 4096
CHUNK_BYTES = 8 << 20
# What a stored dtype is read as: integers, and floats as their bits.
NUMPY_BITS = {
    "U8": np.uint8, "I8": np.uint8, "F8_E8M0": np.uint8, "BF16": np.uint16, "F16": np.uint16,
    "I32": np.int32, "F32": np.uint32, "I64": np.int64,
}  # fmt: skip


class Scratch(threading.local):
    """A thread's buffers, by role; kept between tensors, as fresh memory costs page faults."""

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[np.uint8]] = {}

    def take(self, role: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """An uninitialized C-contiguous array on a page; valid until `role` is taken again."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        buffer = self._buffers.get(role)
        if buffer is None or buffer.size < size:
            raw = np.empty(size + _ALIGNMENT, np.uint8)
            start = -raw.ctypes.data % _ALIGNMENT
            buffer = self._buffers[role] = raw[start : start + size]
        array: NDArray[Any] = buffer[:size].view(dtype).reshape(shape)
        return array


def _position(part: tuple[SourceTensor, NDArray[Any]]) -> tuple[str, int, int]:
    tensor = part[0]
    return tensor.shard, tensor.start, tensor.nbytes


class Reader:
    """Reads tensors of the files that `path_of` finds. Safe for several threads."""

    def __init__(
        self, path_of: Callable[[str], Path], progress: Callable[[int], None] = lambda _: None
    ) -> None:
        self.path_of, self._progress = path_of, progress
        self._fds: dict[str, int] = {}
        self._lock = threading.Lock()
        self.bytes_read = 0

    def read_into(self, tensor: SourceTensor, out: NDArray[Any]) -> None:
        """Fill the contiguous array `out` with the tensor's bytes."""
        self._fill(tensor, 0, [out.data.cast("B")])

    def read_together(self, parts: Iterable[tuple[SourceTensor, NDArray[Any]]]) -> int:
        """Fill each contiguous array with its tensor's bytes; tensors that lie side by side in a
        file are read in one call. → Bytes read."""
        total = 0
        run: list[memoryview] = []
        first, end = None, 0
        for tensor, out in sorted(parts, key=_position):
            if first is None or tensor.shard != first.shard or tensor.start != end:
                total += self._fill(first, 0, run) if first is not None else 0
                first, run = tensor, []
            run.append(out.data.cast("B"))
            end = tensor.start + tensor.nbytes
        return total + (self._fill(first, 0, run) if first is not None else 0)

    def chunks(self, tensor: SourceTensor, buffer: NDArray[np.uint8]) -> Iterator[memoryview]:
        """The tensor's bytes in order, in pieces that lie in `buffer` until the next is asked."""
        view = buffer.data
        for at in range(0, tensor.nbytes, len(view)):
            piece = view[: min(len(view), tensor.nbytes - at)]
            self._fill(tensor, at, [piece])
            yield piece

    def expect(self, tensor: SourceTensor) -> None:
        """Let the system begin to read it; a read that follows later finds it in memory."""
        fd = self._open(tensor.shard)
        os.posix_fadvise(fd, tensor.start, tensor.nbytes, os.POSIX_FADV_WILLNEED)

    def forget(self, shard: str) -> None:
        """Close a file: nothing more is read from it, and it may be deleted."""
        with self._lock:
            fd = self._fds.pop(shard, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        """Close all files."""
        for shard in list(self._fds):
            self.forget(shard)

    def _fill(self, tensor: SourceTensor, at: int, views: list[memoryview]) -> int:
        """Read what lies from byte `at` of a tensor on, one view after the other. → Bytes."""
        fd, total = self._open(tensor.shard), sum(map(len, views))
        left = total
        while left:
            try:
                count = os.preadv(fd, views, tensor.start + at)
            except OSError as error:  # on an open file it does not say which
                path = str(self.path_of(tensor.shard))
                raise OSError(error.errno, error.strerror, path) from None
            if count == 0:
                raise TruncatedFileError(
                    f"{self.path_of(tensor.shard)}, tensor {tensor.name}: the file ended"
                    f" {left:,} bytes early; it was cut while it was being read."
                )
            at, left = at + count, left - count
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if count:
                views[0] = views[0][count:]
        with self._lock:
            self.bytes_read += total
        self._progress(total)
        return total

    def _open(self, shard: str) -> int:
        with self._lock:
            if shard not in self._fds:
                self._fds[shard] = os.open(self.path_of(shard), os.O_RDONLY)
            return self._fds[shard]
