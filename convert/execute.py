"""Carrying a plan out: every source tensor is read once, packed for all ranks, written once.

Memory: a worker holds one expert (three matrices with scales) and one rank's piece of it, or one
chunk of a whole tensor; so at most

    workers × (expert bytes + rank piece bytes + CHUNK_BYTES)

beside the plan and the interpreter, whatever the number of layers (`memory_bound`). K2.6 at tp 8:
36 MB a worker. Threads, not processes: reading, packing, digesting and writing all let go of the
interpreter.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kconvert.convert.output.publish import OwnedWorkspace
from kconvert.convert.output.writer import BlobWriter
from kconvert.convert.plan import Job, Plan, PlannedTensor
from kconvert.convert.progress import Meter
from kconvert.convert.source import Source
from kconvert.layouts.checkpoint import SourceTensor
from kconvert.layouts.errors import KconvertError
from kconvert.layouts.experts import Cut
from kconvert.layouts.formats.compressed_tensors import QuantizedMatrix, check_weight_shape
from kconvert.layouts.model import Expert
from kconvert.layouts.reader import CHUNK_BYTES, NUMPY_BITS, Reader, Scratch


def memory_bound(plan: Plan, workers: int) -> int:
    """Upper bound in bytes of the buffers that `execute` holds."""
    expert = piece = 0
    for job in plan.jobs:
        if job.experts:
            matrices = job.group.experts[0]
            expert = max(expert, sum(t.nbytes for matrix in matrices for t in matrix.tensors))
        for file in job.files:
            if file.rank_slice is not None:
                piece = max(piece, sum(t.nbytes // t.experts for t in file.blob_tensors))
    return workers * (expert + piece + CHUNK_BYTES)


def execute(
    plan: Plan, source: Source, workspace: OwnedWorkspace, workers: int, meter: Meter
) -> int:
    """Write and publish every file of `plan`; returns the bytes read.

    Raises CheckpointError for a fault in the source's data, UnavailableError where a shard cannot
    be got, OSError as the system gives it; unpublished files are gone then, published ones stay.
    """
    order = [job.shards for job in plan.jobs]
    pool = ThreadPoolExecutor(workers, thread_name_prefix="convert")
    publisher = ThreadPoolExecutor(1, thread_name_prefix="publish")
    syncing: Future[None] | None = None
    writers: list[BlobWriter] = []
    with (
        source.deliveries(order, workspace.work, meter) as shards,
        closing(Reader(shards.path)) as reader,
    ):
        packer = _Packer(plan, reader, meter)

        def publish(job: int, done: list[BlobWriter]) -> None:
            with meter.busy("write"):
                for writer in done:
                    writer.publish()
            shards.release(job, reader.forget)

        try:
            for i, job in enumerate(plan.jobs):
                shards.take(i)
                before = reader.bytes_read
                current = [BlobWriter(workspace, file) for file in job.files]
                writers = [writer for writer in writers if not writer.closed] + current
                with meter.busy("work"):
                    _finish([pool.submit(task) for task in packer.tasks(job, current)])
                if reader.bytes_read - before != job.source_bytes:
                    raise KconvertError(
                        f"{job.group.name}: {reader.bytes_read - before:,} bytes were read,"
                        f" {job.source_bytes:,} planned; this is a bug."
                    )
                shards.check(i)
                # Syncing a layer overlaps with converting the next, never with more than one.
                if syncing is not None:
                    syncing.result()
                syncing = publisher.submit(publish, i, current)
            if syncing is not None:
                syncing.result()
        finally:
            # On a failure or an interrupt: no new work, what is whole is still published, and the
            # rest is cleaned up.
            pool.shutdown(wait=True, cancel_futures=True)
            publisher.shutdown(wait=True)
            for writer in writers:
                writer.close()
    return reader.bytes_read


def _finish(futures: list[Future[None]]) -> None:
    done, pending = wait(futures, return_when=FIRST_EXCEPTION)
    for future in pending:
        future.cancel()
    for future in done:
        future.result()


class _Packer:
    """Turns the pieces of a job that can run at once into tasks, and does them."""

    def __init__(self, plan: Plan, reader: Reader, meter: Meter) -> None:
        self._layout = plan.target.layout
        self._reader = reader
        self._meter = meter
        self._scratch = Scratch()

    def tasks(self, job: Job, writers: list[BlobWriter]) -> Iterator[Callable[[], None]]:
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
            yield partial(self._convert, job.group.experts[index], owners)

    def _copy(self, writer: BlobWriter, tensor: PlannedTensor) -> None:
        assert isinstance(tensor.source, SourceTensor)
        buffer = self._scratch.take("chunk", (CHUNK_BYTES,), np.uint8)
        with self._meter.busy("write", tensor.blob.nbytes):
            writer.write_whole(tensor.blob, self._reader.chunks(tensor.source, buffer))

    def _convert(self, expert: Expert, owners: list[tuple[BlobWriter, int]]) -> None:
        """Pack an expert for every writer; the numbers are its index among theirs."""
        with self._meter.busy("convert", sum(t.nbytes for m in expert for t in m.tensors)):
            loaded = {
                (projection, role): array
                for projection, matrix in expert._asdict().items()
                for role, array in self._load(projection, matrix).items()
            }
        for writer, local in owners:
            packed = []
            with self._meter.busy("convert"):
                for tensor in writer.planned.tensors:
                    assert isinstance(tensor.source, Cut)
                    role, name = tensor.source.tensor.role, tensor.source.tensor.name
                    dtype = NUMPY_BITS[tensor.blob.dtype]
                    out = self._scratch.take(name, tensor.blob.shape[1:], dtype)
                    for projection, rows, columns, at in tensor.source.parts:
                        source = loaded[projection, role]
                        self._layout.pack_into(role, source, rows, columns, out, at)
                    packed.append(memoryview(out).cast("B"))
            with self._meter.busy("write", sum(map(len, packed))):
                for tensor, data in zip(writer.planned.tensors, packed, strict=True):
                    writer.write_expert(tensor.blob, local, data)

    def _load(self, projection: str, matrix: QuantizedMatrix) -> dict[str, NDArray[Any]]:
        """A matrix's codes int32 [N, K/8] and scale bits [N, G]; what is dropped is checked."""
        loaded = {}
        for role in ("code", "scale"):
            tensor = getattr(matrix, role)
            out = self._scratch.take(f"{projection} {role}", tensor.shape, NUMPY_BITS[tensor.dtype])
            self._reader.read_into(tensor, out)
            loaded[role] = out
        rows, words = loaded["code"].shape
        for tensor in matrix.dropped:
            raw = self._scratch.take("dropped", (tensor.nbytes,), np.uint8)
            self._reader.read_into(tensor, raw)
            check_weight_shape(tensor, memoryview(raw), rows, 8 * words)
        return loaded
