"""The blobs as tensors that are not read yet: a filler brings each once it is told where to."""

from typing import Any

import numpy as np

from kconvert.layouts.stored.slicing import Span
from kconvert.runtime.filling.filler import Filler, Transfer
from kconvert.runtime.weights import NUMPY, Blobs, StoredTensor


class Unread:
    """A tensor of a blob, or some of its rows or columns: shape and dtype like an array's, and a
    way to have it brought into memory."""

    def __init__(
        self, tensor: StoredTensor, filler: Filler, rows: range, columns: range | None = None
    ) -> None:
        """`rows` along the first axis; `columns`, of a matrix, along the second."""
        self._tensor, self._filler = tensor, filler
        self._rows, self._columns = rows, columns
        second = tensor.entry.shape[1:] if columns is None else (len(columns),)
        self.shape = (len(rows), *second)
        self.dtype = np.dtype(NUMPY[tensor.entry.dtype])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: slice) -> "Unread":
        return Unread(self._tensor, self._filler, self._rows[rows], self._columns)

    @property
    def nbytes(self) -> int:
        """Bytes it takes in memory."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def into(self, target: Any) -> None:
        """Begin to fill `target`, which has this shape and holds integers
        (`filling.device.bits_of`). It is full after the filler's `wait`."""
        path, _, entry, digests = self._tensor
        rows, axis = self._rows, 1
        if len(entry.shape) < 3:  # a matrix is a stack of one, a vector a matrix of one column
            sizes = (*entry.shape, 1)[:2]
            entry, target = entry._replace(shape=(1, *sizes)), target.reshape(1, len(rows), -1)
            if self._columns is not None:
                rows, axis = self._columns, 2
            experts = range(1)
        else:
            experts, rows = rows, range(entry.shape[1])
        span = Span(slice(rows.start, rows.stop), slice(0, len(rows)))
        self._filler.add(Transfer(path, entry, digests, experts, target, 0, axis, (span,)))


class UnreadBlobs(Blobs):
    """Blobs whose tensors are `Unread`, not arrays."""

    def __init__(self, blobs: Blobs, filler: Filler) -> None:
        vars(self).update(vars(blobs))
        self._filler = filler

    def get(self, name: str, shape: tuple[int, ...]) -> Any:
        return self._unread(self.find(name, shape))

    def columns(self, name: str, shape: tuple[int, int], part: range) -> Any:
        tensor = self.find(name, shape)
        return Unread(tensor, self._filler, range(shape[0]), part)

    def stack(self, name: str) -> Any:
        return self._unread(self.find(name))

    def _unread(self, tensor: StoredTensor) -> Unread:
        return Unread(tensor, self._filler, range(tensor.entry.shape[0]))
