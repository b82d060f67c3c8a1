"""Fills tensors from blobs: each byte is read once and compared with its digest on the way.

Bytes go from the page cache to host memory (by pread, many at a time), and from there to the
tensor; if the tensor is in host memory and cut as the blob is, the pread is the only copy. What has
a digest of its own (an expert, or a tensor that is not stacked) is one thread's work: as many at a
time as fit its buffer, or one in blocks of rows. The limit is the slowest of pread, xxh3 and the
copy to the device, each spread over the threads.
"""

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.blob import new_digest
from kconvert.layouts.checkpoint import SourceTensor
from kconvert.layouts.errors import CheckpointError
from kconvert.layouts.header import TensorEntry
from kconvert.layouts.reader import NUMPY_BITS, Reader, Scratch
from kconvert.layouts.stored.slicing import Span

CHUNK_BYTES = 16 << 20  # in smaller pieces, threads would wait for Python's interpreter
MOST_THREADS = 12  # more only get in each other's way


class Memory(Protocol):
    """Where tensors are kept. Safe for several threads."""

    @property
    def buffer_bytes(self) -> int:
        """Host memory that was taken for buffers."""

    def host(self, target: Any) -> NDArray[Any] | None:
        """The target's own memory, to be read into, if it is contiguous and in the host's."""

    def take(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """A buffer for this thread to read into and `put`; valid until it takes another."""

    def put(self, source: NDArray[Any], target: Any) -> None:
        """Copy what was taken, or a part of it, into a target of the same shape."""

    def finish(self) -> None:
        """Return when all copies are done."""


class HostMemory:
    """Targets that are numpy arrays, maybe views of an engine's tensors."""

    def __init__(self) -> None:
        self._scratch = Scratch()
        self.buffer_bytes = 0  # threads' scratch, for matrices that are cut, is not counted

    def host(self, target: NDArray[Any]) -> NDArray[Any] | None:
        return target if target.flags.c_contiguous else None

    def take(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        return self._scratch.take("matrices", shape, dtype)

    def put(self, source: NDArray[Any], target: NDArray[Any]) -> None:
        np.copyto(target, source)

    def finish(self) -> None:
        pass


@dataclass(frozen=True)
class Transfer:
    """Experts of a stored tensor [experts, …, …] on their way into `target`, which has as many axes
    and integers of the same width, from its expert `expert_at` on; `spans` along `axis` (1 or 2) of
    each. A tensor that is not stacked is one expert."""

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
        whole = slice(0, self.entry.shape[self.axis])
        return self.spans == (Span(whole, whole),) and self.target.shape[self.axis] == whole.stop

    @property
    def expert_bytes(self) -> int:
        return self.entry.nbytes // self.entry.shape[0]


class Filler:
    """Carries out transfers on threads of its own; a context manager that ends them.

    `check`: whether to compare digests.
    """

    def __init__(self, memory: Memory, check: bool = True) -> None:
        self.threads = min(len(os.sched_getaffinity(0)), MOST_THREADS)
        self._memory, self._check = memory, check
        self._reader = Reader(Path)
        self._pool = ThreadPoolExecutor(self.threads, "kconvert")
        self._work: list[Future[None]] = []

    def __enter__(self) -> "Filler":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._memory.finish()  # before its buffers are freed
        self._reader.close()

    @property
    def bytes_read(self) -> int:
        """Bytes read from blobs so far."""
        return self._reader.bytes_read

    def add(self, transfer: Transfer) -> None:
        """Begin a transfer; `wait` raises what goes wrong."""
        step = max(1, CHUNK_BYTES // transfer.expert_bytes)
        for first in transfer.experts[::step]:
            experts = range(first, min(first + step, transfer.experts.stop))
            self._work.append(self._pool.submit(self._move, transfer, experts))

    def wait(self) -> None:
        """Return when everything that was added is in its place.

        Raises CheckpointError if an expert's bytes are not those that were written, OSError as the
        system gives it.
        """
        for work in self._work:
            work.result()
        self._work.clear()
        self._memory.finish()

    def _move(self, transfer: Transfer, experts: range) -> None:
        """Move all rows of some experts at once, or block by block if one expert is too large."""
        entry, axis, memory = transfer.entry, transfer.axis, self._memory
        at = transfer.expert_at + experts.start - transfer.experts.start
        target = transfer.target[at : at + len(experts)]
        hashers = [new_digest() for _ in experts] if self._check else []
        for rows in self._blocks(transfer):
            shape = (len(experts), len(rows), entry.shape[2])
            part = target[:, rows.start : rows.stop]
            data = direct = memory.host(part) if transfer.is_plain else None
            if data is None:
                data = memory.take(shape, NUMPY_BITS[entry.dtype])
            self._read(transfer, experts.start, rows.start, data, hashers)
            for span in transfer.spans if direct is None else ():
                if axis == 1:
                    stored, where = _within(span, rows)
                    memory.put(data[:, stored], target[:, where])
                else:
                    memory.put(data[:, :, span.stored], part[:, :, span.target])
        for expert, hasher in zip(experts, hashers, strict=False):
            if hasher.hexdigest() != transfer.digests[expert]:
                which = f", expert {expert} of the file" if len(transfer.digests) > 1 else ""
                raise CheckpointError(
                    f"{transfer.path}, tensor {entry.name}{which}: its bytes were changed (digest"
                    f" {transfer.digests[expert]} expected, {hasher.hexdigest()} found): copy the"
                    " file again, or convert it again."
                )

    def _blocks(self, transfer: Transfer) -> Iterator[range]:
        """The blocks of rows that have to be read: all rows if the digest is compared, as it is of
        the whole expert."""
        rows = range(transfer.entry.shape[1])
        if transfer.axis == 1 and not self._check:
            stored = [span.stored for span in transfer.spans]
            rows = range(min(s.start for s in stored), max(s.stop for s in stored))
        most = max(1, CHUNK_BYTES * transfer.entry.shape[1] // transfer.expert_bytes)
        for first in rows[::most]:
            yield range(first, min(first + most, rows.stop))

    def _read(
        self, transfer: Transfer, expert: int, row: int, data: NDArray[Any], hashers: list[Any]
    ) -> None:
        """Fill `data` [experts, rows, …] with the bytes from this row of this expert on."""
        entry = transfer.entry
        start = entry.start + expert * transfer.expert_bytes
        start += row * (transfer.expert_bytes // entry.shape[1])
        stored = SourceTensor(
            name=entry.name, dtype=entry.dtype, shape=data.shape, shard=str(transfer.path),
            start=start, nbytes=data.nbytes,
        )  # fmt: skip
        self._reader.read_into(stored, data)
        for hasher, matrix in zip(hashers, data, strict=False):
            hasher.update(memoryview(matrix).cast("B"))


def _within(span: Span, rows: range) -> tuple[slice, slice]:
    """The part of `span` that lies in `rows` of the stored tensor: counted from their start, and in
    the target."""
    start, stop = max(span.stored.start, rows.start), min(span.stored.stop, rows.stop)
    stop = max(start, stop)
    at = span.target.start - span.stored.start
    return slice(start - rows.start, stop - rows.start), slice(start + at, stop + at)
