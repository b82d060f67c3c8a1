"""Fills an engine's tensors from blobs: each byte is read once and compared with its digest.

Bytes go from the page cache to host memory (a pread, many at a time), and from there to the
tensor; into a tensor in host memory that is cut as the blob is, the pread itself is the only copy.
Experts are the unit of digests and of work: a thread takes as many at a time as fit its buffer.
The limit is the slowest of pread, xxh3 and the copy to the device, each spread over the threads.
"""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.blob import digest
from kconvert.layouts.checkpoint import SourceTensor
from kconvert.layouts.errors import CheckpointError
from kconvert.layouts.header import TensorEntry
from kconvert.layouts.reader import NUMPY_BITS, Reader, Scratch
from kconvert.layouts.stored.slicing import Span

CHUNK_BYTES = 16 << 20
MOST_THREADS = 16


class Memory(Protocol):
    """Where an engine keeps its tensors. Safe for several threads."""

    def host(self, target: Any) -> NDArray[Any] | None:
        """The target's own memory, where it is contiguous and the host's: to be read into."""

    def take(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """A buffer of this thread's, to be read into and `put`; valid until it takes another."""

    def put(self, source: NDArray[Any], target: Any) -> None:
        """Copy what was taken, or a part of it, into a target of the same shape."""

    def finish(self) -> None:
        """Return when all copies are done."""


class HostMemory:
    """Targets that are numpy arrays, be they views of an engine's tensors."""

    def __init__(self) -> None:
        self._scratch = Scratch()

    def host(self, target: NDArray[Any]) -> NDArray[Any] | None:
        return target if target.flags.c_contiguous else None

    def take(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        return self._scratch.take("experts", shape, dtype)

    def put(self, source: NDArray[Any], target: NDArray[Any]) -> None:
        np.copyto(target, source)

    def finish(self) -> None:
        pass


@dataclass(frozen=True)
class Transfer:
    """Experts of a stored tensor on their way into `target` [experts, …], from `expert_at` on;
    of each, `spans` along `axis`."""

    path: Path
    entry: TensorEntry
    digests: list[str]  # of each expert of the stored tensor
    experts: range
    target: Any
    expert_at: int
    axis: int
    spans: tuple[Span, ...]

    @property
    def is_plain(self) -> bool:
        """Whether the target's experts are the blob's, byte for byte."""
        length = self.entry.shape[self.axis]
        covered = sum(s.stored.stop - s.stored.start for s in self.spans if s.stored == s.target)
        return covered == length == self.target.shape[self.axis]


class Filler:
    """Carries out transfers on threads of its own; a context manager that ends them.

    `check`: whether to compare digests.
    """

    def __init__(self, memory: Memory, check: bool = True) -> None:
        self._memory, self._check = memory, check
        self._reader = Reader(Path)
        threads = min(len(os.sched_getaffinity(0)), MOST_THREADS)
        self._pool = ThreadPoolExecutor(threads, "kconvert")
        self._work: list[Future[None]] = []

    def __enter__(self) -> "Filler":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._reader.close()

    @property
    def bytes_read(self) -> int:
        """Bytes read from blobs so far."""
        return self._reader.bytes_read

    def add(self, transfer: Transfer) -> None:
        """Begin it; what goes wrong is raised by `wait`."""
        step = max(1, CHUNK_BYTES * transfer.entry.shape[0] // transfer.entry.nbytes)
        for first in transfer.experts[::step]:
            experts = range(first, min(first + step, transfer.experts.stop))
            self._work.append(self._pool.submit(self._move, transfer, experts))

    def wait(self) -> None:
        """Return when all that was added is in its place.

        Raises CheckpointError where an expert's bytes are not those that were written, OSError as
        the system gives it.
        """
        for work in self._work:
            work.result()
        self._work.clear()
        self._memory.finish()

    def _move(self, transfer: Transfer, experts: range) -> None:
        entry, axis = transfer.entry, transfer.axis
        at = transfer.expert_at + experts.start - transfer.experts.start
        target = transfer.target[at : at + len(experts)]
        direct = self._memory.host(target) if transfer.is_plain else None
        shape, dtype = (len(experts), *entry.shape[1:]), NUMPY_BITS[entry.dtype]
        data = self._memory.take(shape, dtype) if direct is None else direct
        self._read(transfer, experts, data)
        if direct is not None:
            return
        for span in transfer.spans:
            before = (slice(None),) * axis
            self._memory.put(data[(*before, span.stored)], target[(*before, span.target)])

    def _read(self, transfer: Transfer, experts: range, data: NDArray[Any]) -> None:
        entry = transfer.entry
        size = entry.nbytes // entry.shape[0]
        part = SourceTensor(
            name=entry.name,
            dtype=entry.dtype,
            shape=data.shape,
            shard=str(transfer.path),
            start=entry.start + experts.start * size,
            nbytes=size * len(experts),
        )
        self._reader.read_into(part, data)
        if not self._check:
            return
        for expert, matrix in zip(experts, data, strict=True):
            found = digest(memoryview(matrix).cast("B"))
            if found != transfer.digests[expert]:
                raise CheckpointError(
                    f"{transfer.path}, tensor {entry.name}, expert {expert} of the file: its bytes"
                    f" were changed (digest {transfer.digests[expert]} expected, {found} found):"
                    " copy the file anew, or convert it again."
                )
