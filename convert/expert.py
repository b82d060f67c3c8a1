"""An expert in memory: read from a checkpoint or from blobs, and what it gives to a rank."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kconvert.convert.oddities import Oddity, look_at
from kconvert.layouts.blob import digest
from kconvert.layouts.checkpoint import SourceTensor
from kconvert.layouts.errors import CheckpointError
from kconvert.layouts.experts import Cut, StackedTensor
from kconvert.layouts.formats.compressed_tensors import check_weight_shape
from kconvert.layouts.layout import Layout
from kconvert.layouts.model import Expert, Group
from kconvert.layouts.reader import NUMPY_BITS, Reader, Scratch
from kconvert.layouts.sharding import RankSlice
from kconvert.layouts.stored.checkpoint import Part, StoredGroup
from kconvert.layouts.stored.slicing import cut_axis, meeting, reordered, spans
from kconvert.layouts.w4a16 import W4A16


class LoadedExpert(Protocol):
    """One expert, in a thread's buffers until the thread loads the next."""

    bytes_read: int

    def check(self) -> list[Oddity]:
        """What is odd about it. Raises CheckpointError where it is damaged."""

    def fill(self, cut: Cut, layout: Layout, out: NDArray[Any]) -> None:
        """Write what `cut` takes of it into `out`, in the order of `layout`."""


def load(group: Group, index: int, reader: Reader, scratch: Scratch) -> LoadedExpert:
    """Read an expert of a group, with whatever belongs to it."""
    if isinstance(group, StoredGroup):
        return _FromBlobs(group, index, reader, scratch)
    return _FromCheckpoint(group.experts[index], reader, scratch)


class _FromCheckpoint:
    """By projection and role codes int32 [N, K/8] and scale bits [N, G]."""

    def __init__(self, expert: Expert, reader: Reader, scratch: Scratch) -> None:
        self._expert = expert
        self._loaded: dict[tuple[str, str], NDArray[Any]] = {}
        self._dropped: list[tuple[SourceTensor, NDArray[Any], tuple[int, ...]]] = []
        parts = []
        for projection, matrix in expert._asdict().items():
            for role in ("code", "scale"):
                tensor = getattr(matrix, role)
                purpose, dtype = f"{projection} {role}", NUMPY_BITS[tensor.dtype]
                self._loaded[projection, role] = scratch.take(purpose, tensor.shape, dtype)
                parts.append((tensor, self._loaded[projection, role]))
            for i, tensor in enumerate(matrix.dropped):
                raw = scratch.take(f"{projection} {i}", (tensor.nbytes,), np.uint8)
                parts.append((tensor, raw))
                self._dropped.append((tensor, raw, matrix.code.shape))
        self.bytes_read = reader.read_together(parts)

    def check(self) -> list[Oddity]:
        odd: list[Oddity] = []
        for projection, matrix in self._expert._asdict().items():
            codes, scales = (self._loaded[projection, role] for role in ("code", "scale"))
            odd += look_at(matrix, codes, scales)
        for tensor, raw, (rows, words) in self._dropped:
            check_weight_shape(tensor, memoryview(raw), rows, 8 * words)
        return odd

    def fill(self, cut: Cut, layout: Layout, out: NDArray[Any]) -> None:
        role = cut.tensor.role
        for projection, rows, columns, at in cut.parts:
            layout.pack_into(role, self._loaded[projection, role], rows, columns, out, at)


class _FromBlobs:
    """Parts as they lie in blobs. They are cut and joined as they are where that gives the order
    that is wanted, else unpacked first."""

    def __init__(self, group: StoredGroup, index: int, reader: Reader, scratch: Scratch) -> None:
        self._group, self._index, self._scratch = group, index, scratch
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

    def check(self) -> list[Oddity]:
        for part, array in (pair for pairs in self._parts.values() for pair in pairs):
            found = digest(memoryview(array).cast("B"))
            refuse_changed(part.place, found, part.digest, f", expert {self._index}")
        return []

    def fill(self, cut: Cut, layout: Layout, out: NDArray[Any]) -> None:
        tensor, rows = cut.tensor, cut.intermediate
        parts = self._parts[tensor]
        if _as_they_lie(self._group, layout, tensor, len(parts[0][0].rows), len(rows)):
            self._join(parts, layout, tensor, rows, out)
            return
        whole = self._unpacked(tensor)
        matrices = whole.reshape(len(cut.parts), -1, whole.shape[1])
        for matrix, (_, source_rows, columns, at) in zip(matrices, cut.parts, strict=True):
            layout.pack_into(tensor.role, matrix, source_rows, columns, out, at)

    def _unpacked(self, tensor: StackedTensor) -> NDArray[Any]:
        """All of a stacked tensor as the checkpoint orders a matrix, which w4a16 does too."""
        if tensor not in self._whole:
            stored, dims = self._group.layout, self._group.dims
            order, rows = W4A16(dims.quantization), range(dims.intermediate)
            parts = [
                (part, stored.unpack(tensor.role, array)) for part, array in self._parts[tensor]
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
        by_rows = cut_axis(layout.name, tensor) == 1  # behind the experts'
        for part, array in parts:
            piece = meeting(part.rank, RankSlice(range(1), part.rows), RankSlice(range(1), rows))
            if piece is None:
                continue
            length = array.shape[0 if by_rows else 1]
            quantization = self._group.dims.quantization
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


def refuse_changed(tensor: SourceTensor, found: str, wanted: str | None, which: str = "") -> None:
    """Raise CheckpointError where what was read has another digest than it must have; `which` of
    a stacked tensor."""
    if wanted not in (None, found):
        raise CheckpointError(
            f"{tensor.shard}, tensor {tensor.name}{which}: its bytes were changed, the digest is"
            " another: copy the file anew, or convert it again."
        )


def memory_bound(group: Group, layout: Layout) -> int:
    """Upper bound in bytes of what a loaded expert holds while it is packed for `layout`."""
    read = sum(tensor.nbytes for tensor in group.read_for(0))
    if isinstance(group, StoredGroup) and layout.name != group.layout.name:
        return 3 * read  # as it was read, unpacked part by part, and as a whole
    return read
