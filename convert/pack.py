"""Packing: what one task does with one expert, or with one whole tensor."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kconvert.convert.output.writer import BlobWriter
from kconvert.convert.plan import Job, Plan, PlannedTensor
from kconvert.convert.progress import Meter
from kconvert.layouts.checkpoint import SourceTensor
from kconvert.layouts.errors import CheckpointError
from kconvert.layouts.experts import Cut
from kconvert.layouts.formats.compressed_tensors import QuantizedMatrix, check_weight_shape
from kconvert.layouts.model import Expert
from kconvert.layouts.reader import CHUNK_BYTES, NUMPY_BITS, Reader, Scratch
from kconvert.layouts.scan import all_one_code, scan_scales

Task = Callable[[], int]  # gives the bytes it has read


class Packer:
    """Turns a job into tasks that can run at once, each with buffers of its thread alone."""

    def __init__(self, plan: Plan, reader: Reader, meter: Meter) -> None:
        self._layout = plan.target.layout
        self._reader = reader
        self._meter = meter
        self._scratch = Scratch()
        self.oddities = Oddities()

    def tasks(self, job: Job, writers: list[BlobWriter]) -> Iterator[Task]:
        """One task a whole tensor, and one an expert for all the ranks that hold it."""
        for writer in writers:
            if writer.planned.rank_slice is None:
                for tensor in writer.planned.tensors:
                    yield partial(self._copy, writer, tensor)
        for index in job.experts:
            owners = [
                (writer, part.experts.index(index))
                for writer in writers
                if (part := writer.planned.rank_slice) is not None and index in part.experts
            ]
            # A file system writes a file for one thread at a time: neighbours begin elsewhere.
            turn = index % max(1, len(owners))
            yield partial(self._convert, job.group.experts[index], owners[turn:] + owners[:turn])

    def _copy(self, writer: BlobWriter, tensor: PlannedTensor) -> int:
        assert isinstance(tensor.source, SourceTensor)
        buffer = self._scratch.take("chunk", (CHUNK_BYTES,), np.uint8)
        with self._meter.busy("write", tensor.blob.nbytes):
            return writer.write_whole(tensor.blob, self._reader.chunks(tensor.source, buffer))

    def _convert(self, expert: Expert, owners: list[tuple[BlobWriter, int]]) -> int:
        """Pack an expert for every writer; the numbers are its index among theirs."""
        size = sum(tensor.nbytes for matrix in expert for tensor in matrix.tensors)
        count, loaded = self._load(expert)
        self._meter.add("convert", size)
        for writer, local in owners:
            with self._meter.busy("convert"):
                packed = [self._pack(tensor, loaded) for tensor in writer.planned.tensors]
            with self._meter.busy("write", sum(map(len, packed))):
                for tensor, data in zip(writer.planned.tensors, packed, strict=True):
                    writer.write_expert(tensor.blob, local, data)
        return count

    def _pack(self, tensor: PlannedTensor, loaded: dict[Any, NDArray[Any]]) -> memoryview:
        """One expert's part of a stacked tensor, until the next of its name is packed."""
        assert isinstance(tensor.source, Cut)
        role, name = tensor.source.tensor.role, tensor.source.tensor.name
        out = self._scratch.take(name, tensor.blob.shape[1:], NUMPY_BITS[tensor.blob.dtype])
        for projection, rows, columns, at in tensor.source.parts:
            self._layout.pack_into(role, loaded[projection, role], rows, columns, out, at)
        return memoryview(out).cast("B")

    def _load(self, expert: Expert) -> tuple[int, dict[Any, NDArray[Any]]]:
        """Bytes read, and by projection and role codes int32 [N, K/8] and scale bits [N, G]; what
        is dropped is checked."""
        parts, loaded = [], {}
        dropped: list[tuple[SourceTensor, NDArray[Any], tuple[int, ...]]] = []
        for projection, matrix in expert._asdict().items():
            for role in ("code", "scale"):
                tensor = getattr(matrix, role)
                purpose, dtype = f"{projection} {role}", NUMPY_BITS[tensor.dtype]
                loaded[projection, role] = self._scratch.take(purpose, tensor.shape, dtype)
                parts.append((tensor, loaded[projection, role]))
            for i, tensor in enumerate(matrix.dropped):
                raw = self._scratch.take(f"{projection} {i}", (tensor.nbytes,), np.uint8)
                parts.append((tensor, raw))
                dropped.append((tensor, raw, matrix.code.shape))
        with self._meter.busy("read"):
            count = self._reader.read_together(parts)
        self._meter.add("read", count)
        with self._meter.busy("convert"):
            for projection, matrix in expert._asdict().items():
                self.oddities.look(matrix, loaded[projection, "code"], loaded[projection, "scale"])
            for tensor, raw, (rows, words) in dropped:
                check_weight_shape(tensor, memoryview(raw), rows, 8 * words)
        return count, loaded


class Oddities:
    """Scales that are zero and matrices of one code: sound files may have them, damaged ones do."""

    def __init__(self) -> None:
        self._zeros: list[tuple[str, int]] = []  # tensor → zero scales; appending is atomic
        self._uniform: list[str] = []

    def look(self, matrix: QuantizedMatrix, codes: NDArray[np.int32], scales: NDArray[Any]) -> None:
        """Raises CheckpointError for a scale that is NaN or infinite."""
        scanned = scan_scales(scales, matrix.scale.dtype)
        if scanned.not_finite is not None:
            row, group = scanned.not_finite
            raise CheckpointError(
                f"{matrix.scale.shard}, tensor {matrix.scale.name}: the scale of row {row}, group"
                f" {group} is not finite: the shard is damaged; download it again."
            )
        if scanned.zeros:
            self._zeros.append((matrix.scale.name, scanned.zeros))
        if all_one_code(codes):
            self._uniform.append(matrix.code.name)

    def sentences(self) -> Iterator[str]:
        """A line for each kind, with the first tensor by name."""
        if self._zeros:
            total = sum(count for _, count in self._zeros)
            first = min(self._zeros)[0]
            yield f"{total:,} scales of {len(self._zeros):,} tensors are zero, the first in {first}"
        if self._uniform:
            first = min(self._uniform)
            yield f"{len(self._uniform):,} expert matrices are all one code, the first {first}"
