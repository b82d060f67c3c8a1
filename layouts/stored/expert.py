"""An expert read from blobs: checked, and cut, joined or unpacked as it is wanted."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.blob import digest
from kconvert.layouts.checkpoint import SourceTensor
from kconvert.layouts.errors import ChangedFileError
from kconvert.layouts.experts import Cut, Projection, StackedTensor
from kconvert.layouts.layout import Layout
from kconvert.layouts.quantization import Role
from kconvert.layouts.reader import NUMPY_BITS, Reader, Scratch
from kconvert.layouts.sharding import RankSlice
from kconvert.layouts.stored.checkpoint import Part, StoredGroup
from kconvert.layouts.stored.slicing import cut_axis, meeting, reordered, spans
from kconvert.layouts.w4a16 import W4A16


class StoredExpert:
    """An expert's parts as they lie in blobs, in a thread's buffers until the thread loads the next
    expert. They are cut and joined as they are if that gives the order that is wanted; if not, they
    are unpacked first."""

    def __init__(self, group: StoredGroup, index: int, reader: Reader, scratch: Scratch) -> None:
        self._group, self._index, self._scratch = group, index, scratch
        self._reader = reader
        self._parts: dict[StackedTensor, list[tuple[Part, NDArray[Any]]]] = {}
        self._whole: dict[StackedTensor, NDArray[Any]] = {}
        places = []
        for part in group.parts(index):
            place = part.place
            purpose, dtype = f"{part.rank} {part.stacked.name}", NUMPY_BITS[place.dtype]
            array = scratch.take(purpose, place.shape, dtype)
            self._parts.setdefault(part.stacked, []).append((part, array))
            places.append((place, array))
        self.bytes_read = reader.read_together(places)

    def check(self) -> None:
        """Raise CheckpointError if a part was changed."""
        for part, array in (pair for pairs in self._parts.values() for pair in pairs):
            found = digest(array.data.cast("B"))
            which = f", expert {self._index}"
            refuse_changed(self._reader, part.place, found, part.digest, which)

    def lies_as(self, other: "StoredExpert") -> bool:
        """Whether both are the same, byte for byte and rank for rank."""
        return self._group.layout.name == other._group.layout.name and all(
            len(mine) == len(theirs := other._parts.get(tensor, []))
            and all(np.array_equal(a, b) for (_, a), (_, b) in zip(mine, theirs, strict=True))
            for tensor, mine in self._parts.items()
        )

    def plain(self) -> dict[tuple[Projection, Role], NDArray[Any]]:
        """The matrices' plain arrays."""
        arrays: dict[tuple[Projection, Role], NDArray[Any]] = {}
        for tensor in self._parts:
            whole = self._unpacked(tensor)
            matrices = whole.reshape(len(tensor.projections), -1, *whole.shape[1:])
            for projection, matrix in zip(tensor.projections, matrices, strict=True):
                arrays[projection, tensor.role] = matrix
        return arrays

    def fill(self, cut: Cut, layout: Layout, out: NDArray[Any]) -> None:
        """Write what `cut` takes of it into `out`, in the order of `layout`."""
        tensor, rows = cut.tensor, cut.intermediate
        parts = self._parts[tensor]
        if _as_they_lie(self._group, layout, tensor, len(parts[0][0].rows), len(rows)):
            self._join(parts, layout, tensor, rows, out)
            return
        whole = self._unpacked(tensor)
        matrices = whole.reshape(len(cut.parts), -1, *whole.shape[1:])
        for matrix, (_, source_rows, columns, at) in zip(matrices, cut.parts, strict=True):
            layout.pack_into(tensor.role, matrix, source_rows, columns, out, at)

    def _unpacked(self, tensor: StackedTensor) -> NDArray[Any]:
        """All of a stacked tensor in plain order, which is w4a16's."""
        if tensor not in self._whole:
            stored, dims = self._group.layout, self._group.dims
            order, rows = W4A16(dims.quantization), range(dims.intermediate)
            parts = [
                (part, stored.restore(tensor.role, array)) for part, array in self._parts[tensor]
            ]
            cut = tensor.cut(rows, dims.hidden)
            shape = order.shape(tensor.role, cut.n, cut.k)
            whole = self._scratch.take(f"whole {tensor.name}", shape, parts[0][1].dtype)
            self._join(parts, order, tensor, rows, whole)
            self._whole[tensor] = whole
        return self._whole[tensor]

    def _join(
        self,
        parts: list[tuple[Part, NDArray[Any]]],
        layout: Layout,
        tensor: StackedTensor,
        rows: range,
        out: NDArray[Any],
    ) -> None:
        """Copy what each part, in the order of `layout`, has of the intermediate `rows`."""
        quantization = self._group.dims.quantization
        if tensor.copies(quantization, 2) == 2:  # every rank has all of it
            out[...] = parts[0][1]
            return
        by_rows = cut_axis(layout.name, tensor) == 1  # behind the experts'
        for part, array in parts:
            piece = meeting(part.rank, RankSlice(range(1), part.rows), RankSlice(range(1), rows))
            if piece is None:
                continue
            length = array.shape[0 if by_rows else 1]
            for stored, target in spans(tensor, quantization, piece, length, len(rows)):
                if by_rows:
                    out[target] = array[stored]
                else:
                    out[:, target] = array[:, stored]


def _as_they_lie(
    group: StoredGroup, layout: Layout, tensor: StackedTensor, have: int, want: int
) -> bool:
    """Whether parts with `have` intermediate rows can be cut and joined into one with `want`."""
    return layout.name == group.layout.name and not reordered(
        layout.name, tensor, group.dims.quantization, have, want
    )


def refuse_changed(
    reader: Reader, tensor: SourceTensor, found: str, wanted: str | None, which: str = ""
) -> None:
    """Raise ChangedFileError unless the digest `found` of what `reader` read is `wanted` (None: not
    known). `which` names the part of a stacked tensor, for the sentence."""
    if wanted not in (None, found):
        raise ChangedFileError(
            f"{reader.path_of(tensor.shard)}, tensor {tensor.name}{which}: its bytes were changed:"
            " the digest disagrees; copy the file again, or convert it again."
        )
