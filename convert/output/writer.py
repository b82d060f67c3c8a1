"""One blob being written: every tensor once, digested as it passes, published only when whole."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from kconvert.convert.output.disk import UNSUPPORTED, naming
from kconvert.convert.output.publish import OwnedWorkspace, publish, staging_path
from kconvert.convert.planned import PlannedFile
from kconvert.layouts.blob import (
    NO_DIGEST,
    PAGE,
    BlobTensor,
    blank_digests,
    digest,
    digest_of_experts,
    new_digest,
)
from kconvert.layouts.errors import KconvertError
from kconvert.layouts.reader import CHUNK_BYTES, Scratch

_WORTH_DIRECT = 1 << 16  # bytes: below, copying them into place costs more than the page cache
_SCRATCH = Scratch()
_NOT_ASKED = "not asked"  # in place of a digest, for a file that keeps none: written, not NO_DIGEST


class Piece(NamedTuple):
    """A piece of a blob that was written: one expert of a stacked tensor, or a whole tensor."""

    tensor: str
    expert: int | None  # the local one
    digest: str
    nbytes: int


class Turn(Protocol):
    """A lock, of threads or of processes."""

    def acquire(self, blocking: bool = True, /) -> bool:
        """Take it; False if it is taken and the caller does not wait."""

    def release(self) -> None:
        """Give it back."""


class StagedFile:
    """A file that is being written, opened by its temporary name; errors name its final one.

    Several workers may write at once. The kernel lets one at a time into a file while the others
    spin; with `turn`, a lock that all of them share, they sleep.
    """

    def __init__(self, staged: Path, final: Path, planned: PlannedFile, turn: Turn) -> None:
        self.planned, self._final, self._turn = planned, final, turn
        with naming(final):
            self._fd = os.open(staged, os.O_WRONLY)
            self._direct = _open_direct(staged)

    def write_expert(self, index: int, packed: Sequence[memoryview]) -> list[Piece]:
        """Write local expert `index`; `packed` is its part of each stacked tensor."""
        pieces = []
        for place, view in self.planned.places(index, packed):
            self._write(place.at, view)
            known = digest(view) if self.planned.digested else _NOT_ASKED
            pieces.append(Piece(place.tensor, place.expert, known, len(view)))
        return pieces

    def write_whole(self, tensor: BlobTensor, chunks: Iterable[memoryview]) -> Piece:
        """Write a tensor that is not stacked, its bytes in order."""
        state, at = new_digest(), 0
        for chunk in chunks:
            self._write(tensor.offset + at, chunk)
            state.update(chunk)
            at += len(chunk)
        return Piece(tensor.name, None, state.hexdigest(), at)

    def is_free(self) -> bool:
        """Whether nobody is writing to it at this moment."""
        if free := self._turn.acquire(False):
            self._turn.release()
        return free

    def close(self) -> None:
        """Close it; what was written stays."""
        os.close(self._fd)
        if self._direct is not None:
            os.close(self._direct)

    def _write(self, at: int, data: memoryview) -> None:
        """Whole pages past the page cache, if the file system can; their edges through it."""
        start = self.planned.header_bytes + at
        head = min(-start % PAGE, len(data))
        pages = (len(data) - head) // PAGE * PAGE
        with naming(self._final):
            if self._direct is None or pages < (PAGE if head == 0 else _WORTH_DIRECT):
                self._put(self._fd, data, start)
                return
            try:
                self._put_pages(self._direct, data[head : head + pages], start + head)
            except OSError as error:
                if error.errno not in UNSUPPORTED:  # it may want another alignment
                    raise
                self._put(self._fd, data, start)
                return
            self._put(self._fd, data[:head], start)
            self._put(self._fd, data[head + pages :], start + head + pages)

    def _put_pages(self, fd: int, data: memoryview, start: int) -> None:
        """Write straight from `data` if it lies on a page, as it mostly does; if not, by way of a
        buffer that does."""
        if np.frombuffer(data, np.uint8).ctypes.data % PAGE == 0:
            self._put(fd, data, start)
            return
        for at in range(0, len(data), CHUNK_BYTES):
            piece = data[at : at + CHUNK_BYTES]
            buffer = _SCRATCH.take("bounce", (len(piece),), np.uint8).data
            buffer[:] = piece
            self._put(fd, buffer, start + at)

    def _put(self, fd: int, data: memoryview, at: int) -> None:
        if not data:
            return
        self._turn.acquire()
        try:
            _pwrite(fd, data, at)
        finally:
            self._turn.release()


class BlobWriter:
    """A blob being made: creates its file, takes the pieces that were written, and publishes it
    when it is whole."""

    def __init__(self, workspace: OwnedWorkspace, planned: PlannedFile) -> None:
        self.planned = planned
        self._workspace = workspace
        self.final = workspace.output / planned.path
        self.staged = staging_path(workspace, planned.path)
        self._digests, self._expert_digests = blank_digests(planned.blob_tensors)
        self._written = 0
        self._fd = os.open(self.staged, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        with naming(self.final):
            os.ftruncate(self._fd, planned.nbytes)

    def take(self, piece: Piece) -> None:
        """Note that a piece was written; KconvertError if it was before. For one thread."""
        whole = piece.expert is None
        table: Any = self._digests if whole else self._expert_digests[piece.tensor]
        key = piece.tensor if whole else piece.expert
        if table[key] != NO_DIGEST:
            raise KconvertError(f"{self.planned.path}: {key} was written twice; this is a bug.")
        table[key] = piece.digest
        self._written += piece.nbytes

    def publish(self) -> None:
        """Write the header, sync, and give the file its final name.

        Raises KconvertError if a tensor or an expert was not written, or bytes are missing.
        """
        for name, digests in self._expert_digests.items():
            if NO_DIGEST not in digests:
                self._digests[name] = digest_of_experts(digests)
        lacking = [name for name, value in self._digests.items() if value == NO_DIGEST]
        expected = self.planned.nbytes - self.planned.header_bytes
        if lacking or self._written != expected:
            raise KconvertError(
                f"{self.planned.path}: {self._written:,} of {expected:,} bytes were written and"
                f" {len(lacking)} tensors are not whole; this is a bug."
            )
        header = self.planned.header(self._digests, self._expert_digests)
        with naming(self.final):
            _pwrite(self._fd, memoryview(header), 0)
            os.fsync(self._fd)
        publish(self._workspace, self.staged, self.final)
        self.close()

    @property
    def closed(self) -> bool:
        """Whether the file was published or given up."""
        return self._fd < 0

    def close(self) -> None:
        """Close the file if it is open; if it was not published, it is deleted."""
        if not self.closed:
            os.close(self._fd)
            self._fd = -1
            self.staged.unlink(missing_ok=True)


def _open_direct(path: Path) -> int | None:
    """Open for writing past the page cache, or None if the file system cannot.

    Whole pages go straight from our buffers to the device: a tenth of the processor time of
    writing through the cache, and the cache is left to the source.
    """
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return None


def _pwrite(fd: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(fd, data, at)
        data, at = data[written:], at + written
