"""Packing: what one task does with one expert, or with one whole tensor."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kconvert.convert.oddities import Oddity, look_at
from kconvert.convert.output.writer import Piece, StagedFile
from kconvert.convert.plan import Job, Plan, PlannedTensor
from kconvert.convert.progress import Meter, Recorder
from kconvert.layouts.checkpoint import SourceTensor
from kconvert.layouts.errors import CheckpointError
from kconvert.layouts.experts import PROJECTIONS, Cut, Projection
from kconvert.layouts.formats.format import Expert
from kconvert.layouts.layout import Layout
from kconvert.layouts.quantization import Quantization, Role
from kconvert.layouts.reader import CHUNK_BYTES, NUMPY_BITS, Reader, Scratch
from kconvert.layouts.scan import all_one_code, cast_to_bf16, scan_scales


class Done(NamedTuple):
    """What a task did: bytes read, what it wrote by the files' paths, and what looked odd."""

    bytes_read: int
    pieces: list[tuple[str, Piece]]
    oddities: list[Oddity]


Task = Callable[[], Done]
_Plain = dict[tuple[Projection, Role], NDArray[Any]]


class Packer:
    """Turns a job into tasks that can run at once, each with buffers of its thread alone."""

    def __init__(self, plan: Plan, reader: Reader, meter: Meter | Recorder) -> None:
        self._layout, self._scale_dtype = plan.target.layout, plan.target.scale_dtype
        self._format, self._dims = plan.format, plan.dims
        self._reader = reader
        self._meter = meter
        self._scratch = Scratch()

    def tasks(self, job: Job, files: list[StagedFile]) -> Iterator[Task]:
        """`task_count(job)` tasks, always in the same order: one a whole tensor, and one an expert
        for all the ranks that hold it."""
        for file in files:
            if file.planned.rank_slice is None:
                for tensor in file.planned.tensors:
                    yield partial(self._copy, file, tensor)
        for index in job.experts:
            owners = [
                (file, part.experts.index(index))
                for file in files
                if (part := file.planned.rank_slice) is not None and index in part.experts
            ]
            # A file system writes a file for one thread at a time: neighbours begin elsewhere.
            turn = index % max(1, len(owners))
            yield partial(self._convert, job.group.experts[index], owners[turn:] + owners[:turn])

    def _copy(self, file: StagedFile, tensor: PlannedTensor) -> Done:
        assert isinstance(tensor.source, SourceTensor)
        buffer = self._scratch.take("chunk", (CHUNK_BYTES,), np.uint8)
        with self._meter.busy("write", tensor.blob.nbytes):
            piece = file.write_whole(tensor.blob, self._reader.chunks(tensor.source, buffer))
        return Done(piece.nbytes, [(file.planned.path, piece)], [])

    def _convert(self, expert: Expert, owners: list[tuple[StagedFile, int]]) -> Done:
        """Pack an expert for every file; the numbers are its index among theirs."""
        count, loaded, odd = self._load(expert)
        pieces = []
        for file, local in owners:
            with self._meter.busy("convert", count // len(owners)):
                packed = [self._pack(tensor, loaded) for tensor in file.planned.tensors]
            with self._meter.busy("write", sum(map(len, packed))):
                written = file.write_expert(file.planned.blob_tensors, local, packed)
            pieces += [(file.planned.path, piece) for piece in written]
        return Done(count, pieces, odd)

    def _pack(self, tensor: PlannedTensor, loaded: _Plain) -> memoryview:
        """One expert's part of a stacked tensor, until the next of its name is packed."""
        assert isinstance(tensor.source, Cut)
        role, name = tensor.source.tensor.role, tensor.source.tensor.name
        out = self._scratch.take(name, tensor.blob.shape[1:], NUMPY_BITS[tensor.blob.dtype])
        for projection, rows, columns, at in tensor.source.parts:
            self._layout.pack_into(role, loaded[projection, role], rows, columns, out, at)
        return memoryview(out).cast("B")

    def _load(self, expert: Expert) -> tuple[int, _Plain, list[Oddity]]:
        """Bytes read; the plain arrays by projection and role; and what is odd about them. What is
        dropped is checked."""
        parts: list[tuple[SourceTensor, NDArray[Any]]] = []
        stored: dict[SourceTensor, NDArray[Any]] = {}
        for i, tensor in enumerate(expert.tensors):
            array = self._scratch.take(f"source {i}", tensor.shape, NUMPY_BITS[tensor.dtype])
            parts.append((tensor, array))
            stored[tensor] = array
        with self._meter.busy("read", sum(tensor.nbytes for tensor, _ in parts)):
            count = self._reader.read_together(parts)
        with self._meter.busy("convert"):
            return count, *self._understood(expert, stored)

    def _understood(
        self, expert: Expert, stored: dict[SourceTensor, NDArray[Any]]
    ) -> tuple[_Plain, list[Oddity]]:
        plain: _Plain = {}
        odd: list[Oddity] = []
        n, k = self._dims.intermediate, self._dims.hidden
        for projection, matrix in zip(PROJECTIONS, expert, strict=True):
            for role, tensor in matrix.by_role.items():
                plain[projection, role] = self._format.plain(
                    projection, role, tensor, stored[tensor], self._scratch.take
                )
            for tensor in matrix.dropped:
                shape = (k, n) if projection == "down" else (n, k)
                self._format.check_dropped(tensor, stored[tensor], *shape)
            codes, scales = plain[projection, "code"], plain[projection, "scale"]
            odd += look_at(matrix, self._dims.quantization, codes, scales)
            if self._scale_dtype not in (None, matrix.scale.dtype):
                cast, oddity = self._cast(projection, matrix.scale, scales)
                plain[projection, "scale"] = cast
                odd += oddity
        return plain, odd

    def _cast(
        self, projection: Projection, tensor: SourceTensor, scales: NDArray[Any]
    ) -> tuple[NDArray[np.uint16], list[Oddity]]:
        """Scales as bf16's bits, and how many are not what they were."""
        out = self._scratch.take(f"cast {projection}", scales.shape, np.uint16)
        lost = cast_to_bf16(scales, tensor.dtype, out)
        if scan_scales(out, "BF16").not_finite is not None:
            raise CheckpointError(
                f"{tensor.shard}, tensor {tensor.name}: a scale is too large for bfloat16: convert"
                " without --scale-dtype."
            )
        return out, [Oddity("rounded", tensor.name, lost)] if lost else []


def task_count(job: Job) -> int:
    """How many tasks a job has."""
    return len(job.copied) + len(job.experts)


def warm_up(layout: Layout) -> None:
    """Compile what packing needs, or load it: once, before there are several who would."""
    n, k, quantization = 64, 128, layout.quantization
    for role in quantization.roles:
        for dtype in _dtypes_of(role, quantization):
            source = np.zeros(quantization.plain_shape(role, n, k), dtype)
            out = np.zeros(layout.shape(role, n, k), dtype)
            layout.pack_into(role, source, range(n), range(k), out, 0)
            if role == "code":
                all_one_code(source, quantization.bits)
            elif role == "scale":
                scan_scales(source, next(d for d in NUMPY_BITS if NUMPY_BITS[d] == dtype))


def _dtypes_of(role: Role, quantization: Quantization) -> tuple[Any, ...]:
    if role == "scale":
        return (np.uint8,) if quantization.scheme == "mxfp4" else (np.uint16, np.uint32)
    return (np.uint16,) if role == "bias" else (np.int32,)
