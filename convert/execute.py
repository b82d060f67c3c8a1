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

from kconvert.convert.output.publish import Place
from kconvert.convert.output.writer import BlobWriter
from kconvert.convert.plan import Job, Plan
from kconvert.convert.progress import Meter
from kconvert.convert.source import Source
from kconvert.layouts.blob import BlobTensor
from kconvert.layouts.checkpoint import SourceTensor
from kconvert.layouts.errors import KconvertError
from kconvert.layouts.formats.compressed_tensors import QuantizedMatrix, check_weight_shape
from kconvert.layouts.model import Expert
from kconvert.layouts.reader import CHUNK_BYTES, Reader, Scratch
from kconvert.layouts.sharding import RankSlice, stacked_names

_SCALE_BITS = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}


def memory_bound(plan: Plan, workers: int) -> int:
    """Upper bound in bytes of the buffers that `execute` holds."""
    expert = piece = 0
    for job in plan.jobs:
        if job.experts:
            matrices = job.group.experts[0]
            expert = max(expert, sum(t.nbytes for matrix in matrices for t in matrix))
        for file in job.files:
            for tensor in file.tensors:
                if tensor.experts:
                    piece = max(piece, sum(t.nbytes // t.experts for t in file.tensors))
    return workers * (expert + piece + CHUNK_BYTES)


def execute(plan: Plan, source: Source, place: Place, workers: int, meter: Meter) -> int:
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
        source.deliveries(order, place.work, meter) as shards,
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
                current = [BlobWriter(place, file) for file in job.files]
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
        self._quantization = plan.dims.quantization
        self._reader = reader
        self._meter = meter
        self._scratch = Scratch()

    def tasks(self, job: Job, writers: list[BlobWriter]) -> Iterator[Callable[[], None]]:
        """One task a whole tensor, and one an expert for all the ranks that hold it."""
        sources = {tensor.name: tensor for tensor in job.copied}
        ranks = []
        for writer in writers:
            held = writer.planned.held
            if held is None:
                for tensor in writer.planned.tensors:
                    yield partial(self._copy, writer, tensor, sources[tensor.name])
            else:
                ranks.append((writer, held))
        names = stacked_names(job.group.prefix)
        for index in job.experts:
            owners = [(writer, held) for writer, held in ranks if index in held.experts]
            yield partial(self._convert, job.group.experts[index], index, owners, names)

    def _copy(self, writer: BlobWriter, tensor: BlobTensor, source: SourceTensor) -> None:
        buffer = self._scratch.take("chunk", (CHUNK_BYTES,), np.uint8)
        with self._meter.busy("write", tensor.nbytes):
            writer.write_whole(tensor, self._reader.chunks(source, buffer))

    def _convert(
        self,
        expert: Expert,
        index: int,
        owners: list[tuple[BlobWriter, RankSlice]],
        names: tuple[str, ...],
    ) -> None:
        busy, size = self._meter.busy, sum(t.nbytes for matrix in expert for t in matrix)
        with busy("convert", size):
            gate, gate_scale = self._load("gate", expert.gate)
            up, up_scale = self._load("up", expert.up)
            down, down_scale = self._load("down", expert.down)
        hidden = range(len(down))
        groups = self._quantization.groups(range(len(down)))
        layout = self._layout
        for writer, (experts, rows) in owners:
            by_name = {tensor.name: tensor for tensor in writer.planned.tensors}
            tensors = [by_name[name] for name in names]
            scale_bits = gate_scale.dtype, down_scale.dtype
            dtypes = np.int32, scale_bits[0], np.int32, scale_bits[1]
            outs = [
                self._scratch.take(f"out {i}", tensor.shape[1:], dtype)
                for i, (tensor, dtype) in enumerate(zip(tensors, dtypes, strict=True))
            ]
            w13, w13_scale, w2, w2_scale = outs
            with busy("convert"):
                layout.pack_weight_into(gate, rows, hidden, w13, 0)
                layout.pack_weight_into(up, rows, hidden, w13, len(rows))
                layout.pack_scales_into(gate_scale, rows, groups, w13_scale, 0)
                layout.pack_scales_into(up_scale, rows, groups, w13_scale, len(rows))
                layout.pack_weight_into(down, hidden, rows, w2, 0)
                layout.pack_scales_into(
                    down_scale, hidden, self._quantization.groups(rows), w2_scale, 0
                )
            with busy("write", sum(out.nbytes for out in outs)):
                for tensor, out in zip(tensors, outs, strict=True):
                    writer.write_expert(tensor, index - experts.start, memoryview(out).cast("B"))

    def _load(self, role: str, matrix: QuantizedMatrix) -> tuple[NDArray[Any], NDArray[Any]]:
        """A matrix's packed words int32 [N, K/8] and scale bits [N, G]; weight_shape is checked."""
        packed = self._scratch.take(role, matrix.packed.shape, np.int32)
        scale = self._scratch.take(
            f"{role} scale", matrix.scale.shape, _SCALE_BITS[matrix.scale.dtype]
        )
        shape = self._scratch.take("shape", (matrix.shape.nbytes,), np.uint8)
        for tensor, out in zip(matrix, (packed, scale, shape), strict=True):
            self._reader.read_into(tensor, out)
        rows, words = packed.shape
        check_weight_shape(matrix.shape, memoryview(shape), rows, 8 * words)
        return packed, scale
