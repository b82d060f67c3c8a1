"""An expert in memory: read from a checkpoint or from blobs, and what it gives to a rank."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kconvert.convert.oddities import Oddity, look_at
from kconvert.convert.plan import Plan
from kconvert.layouts.blob import digest
from kconvert.layouts.checkpoint import SourceTensor
from kconvert.layouts.errors import CheckpointError
from kconvert.layouts.experts import PROJECTIONS, Cut, Projection, StackedTensor
from kconvert.layouts.formats.format import Expert
from kconvert.layouts.layout import Layout
from kconvert.layouts.model import Group
from kconvert.layouts.quantization import Role
from kconvert.layouts.reader import NUMPY_BITS, Reader, Scratch
from kconvert.layouts.scan import cast_to_bf16, scan_scales
from kconvert.layouts.sharding import RankSlice
from kconvert.layouts.stored.checkpoint import Part, StoredGroup
from kconvert.layouts.stored.slicing import cut_axis, meeting, reordered, spans
from kconvert.layouts.w4a16 import W4A16

_LOOKED_AT: tuple[Role, Role] = ("code", "scale")


class LoadedExpert(Protocol):
    """One expert, in a thread's buffers until the thread loads the next."""

    bytes_read: int

    def check(self) -> list[Oddity]:
        """What is odd about it. Raises CheckpointError where it is damaged."""

    def fill(self, cut: Cut, layout: Layout, out: NDArray[Any]) -> None:
        """Once it is checked, write what `cut` takes of it into `out`, in the order of `layout`."""


def load(plan: Plan, group: Group, index: int, reader: Reader, scratch: Scratch) -> LoadedExpert:
    """Read an expert of a group, with whatever belongs to it."""
    if isinstance(group, StoredGroup):
        return _FromBlobs(group, index, reader, scratch)
    return _FromCheckpoint(plan, group.experts[index], reader, scratch)


class _FromCheckpoint:
    """Its tensors as they are stored; plain, and scales cast where that is asked for, once they are
    checked."""

    def __init__(self, plan: Plan, expert: Expert, reader: Reader, scratch: Scratch) -> None:
        self._plan, self._expert, self._scratch = plan, expert, scratch
        self._stored: dict[SourceTensor, NDArray[Any]] = {}
        self._plain: dict[tuple[Projection, Role], NDArray[Any]] = {}
        for i, tensor in enumerate(expert.tensors):
            array = scratch.take(f"source {i}", tensor.shape, NUMPY_BITS[tensor.dtype])
            self._stored[tensor] = array
        self.bytes_read = reader.read_together(self._stored.items())

    def check(self) -> list[Oddity]:
        odd: list[Oddity] = []
        format, dims, cast = self._plan.format, self._plan.dims, self._plan.target.scale_dtype
        n, k = dims.intermediate, dims.hidden
        for projection, matrix in zip(PROJECTIONS, self._expert, strict=True):
            for role, tensor in matrix.by_role.items():
                self._plain[projection, role] = format.plain(
                    projection, role, tensor, self._stored[tensor], self._scratch.take
                )
            for tensor in matrix.dropped:
                shape = (k, n) if projection == "down" else (n, k)
                format.check_dropped(tensor, self._stored[tensor], *shape)
            codes, scales = (self._plain[projection, role] for role in _LOOKED_AT)
            odd += look_at(matrix, dims.quantization, codes, scales)
            if cast not in (None, matrix.scale.dtype):
                odd += self._cast(projection, matrix.scale)
        return odd

    def _cast(self, projection: Projection, tensor: SourceTensor) -> list[Oddity]:
        """Make scales bf16, and say how many are not what they were."""
        scales = self._plain[projection, "scale"]
        out = self._scratch.take(f"cast {projection}", scales.shape, np.uint16)
        lost = cast_to_bf16(scales, tensor.dtype, out)
        if scan_scales(out, "BF16").not_finite is not None:
            raise CheckpointError(
                f"{tensor.shard}, tensor {tensor.name}: a scale is too large for bfloat16: convert"
                " without --scale-dtype."
            )
        self._plain[projection, "scale"] = out
        return [Oddity("rounded", tensor.name, lost)] if lost else []

    def fill(self, cut: Cut, layout: Layout, out: NDArray[Any]) -> None:
        role = cut.tensor.role
        for projection, rows, columns, at in cut.parts:
            layout.pack_into(role, self._plain[projection, role], rows, columns, out, at)


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
        matrices = whole.reshape(len(cut.parts), -1, *whole.shape[1:])
        for matrix, (_, source_rows, columns, at) in zip(matrices, cut.parts, strict=True):
            layout.pack_into(tensor.role, matrix, source_rows, columns, out, at)

    def _unpacked(self, tensor: StackedTensor) -> NDArray[Any]:
        """All of a stacked tensor in plain order, which is w4a16's."""
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


def refuse_changed(tensor: SourceTensor, found: str, wanted: str | None, which: str = "") -> None:
    """Raise CheckpointError where what was read has another digest than it must have; `which` of
    a stacked tensor."""
    if wanted not in (None, found):
        raise CheckpointError(
            f"{tensor.shard}, tensor {tensor.name}{which}: its bytes were changed, the digest is"
            " another: copy the file anew, or convert it again."
        )


def memory_bound(plan: Plan, group: Group) -> int:
    """Upper bound in bytes of what a loaded expert holds while it is packed."""
    layout, copies = plan.target.layout, plan.format.copies
    read = sum(tensor.nbytes for tensor in group.read_for(0))
    if not isinstance(group, StoredGroup):
        return copies * read
    # As it was read, unpacked part by part, and as a whole.
    return 3 * read if layout.name != group.layout.name else read
