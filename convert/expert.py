"""An expert in memory, read from a checkpoint or from blobs, and what ranks take from it."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kconvert.convert.oddities import Oddity, look_at
from kconvert.convert.plan import Plan
from kconvert.layouts.checkpoint import SourceTensor
from kconvert.layouts.errors import CheckpointError
from kconvert.layouts.experts import PROJECTIONS, Cut, Projection
from kconvert.layouts.formats.format import Expert
from kconvert.layouts.layout import Layout
from kconvert.layouts.model import Group
from kconvert.layouts.quantization import Role
from kconvert.layouts.reader import NUMPY_BITS, Reader, Scratch
from kconvert.layouts.scan import cast_to_bf16, scan_scales
from kconvert.layouts.stored.checkpoint import StoredGroup
from kconvert.layouts.stored.expert import StoredExpert

_LOOKED_AT: tuple[Role, Role] = ("code", "scale")


class LoadedExpert(Protocol):
    """One expert, in a thread's buffers until the thread loads the next."""

    bytes_read: int

    def check(self) -> list[Oddity]:
        """What is odd about it. Raises CheckpointError if it is damaged."""

    def fill(self, cut: Cut, layout: Layout, out: NDArray[Any]) -> None:
        """Write the part of it that `cut` takes into `out`, in the order of `layout`. Call `check`
        first."""


def load(plan: Plan, group: Group, index: int, reader: Reader, scratch: Scratch) -> LoadedExpert:
    """Read an expert of a group, with whatever belongs to it."""
    if isinstance(group, StoredGroup):
        return _FromBlobs(StoredExpert(group, index, reader, scratch))
    return _FromCheckpoint(plan, group.experts[index], reader, scratch)


class _FromCheckpoint:
    """An expert's tensors as they are stored. `check` makes them plain, and casts scales if that is
    asked for."""

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
        """Cast scales to bf16, and say how many were rounded."""
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
    """An expert's parts in blobs. Digests tell whether they are what was converted; oddities were
    reported then."""

    def __init__(self, stored: StoredExpert) -> None:
        self._stored, self.bytes_read = stored, stored.bytes_read

    def check(self) -> list[Oddity]:
        self._stored.check()
        return []

    def fill(self, cut: Cut, layout: Layout, out: NDArray[Any]) -> None:
        self._stored.fill(cut, layout, out)


def expert_bytes(plan: Plan, group: Group) -> int:
    """Upper bound in bytes of the buffers of a loaded expert while it is packed."""
    layout, copies = plan.target.layout, plan.format.copies
    read = sum(tensor.nbytes for tensor in group.read_for(0))
    if not isinstance(group, StoredGroup):
        return copies * read
    # As it was read, unpacked part by part, and as a whole.
    return 3 * read if layout.name != group.layout.name else read
