"""Packing: what one task does with one expert, or with one whole tensor."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from kconvert.convert.expert import LoadedExpert, load
from kconvert.convert.oddities import Oddity
from kconvert.convert.output.writer import Piece, StagedFile
from kconvert.convert.plan import Job, Plan
from kconvert.convert.planned import PlannedTensor
from kconvert.convert.progress import Meter, Recorder
from kconvert.layouts.checkpoint import SourceTensor
from kconvert.layouts.experts import Cut
from kconvert.layouts.layout import Layout
from kconvert.layouts.model import Group
from kconvert.layouts.quantization import Quantization, Role
from kconvert.layouts.reader import CHUNK_BYTES, NUMPY_BITS, Reader, Scratch
from kconvert.layouts.scan import all_one_code, scan_scales
from kconvert.layouts.stored.expert import refuse_changed


class Done(NamedTuple):
    """What a task did: bytes read, what it wrote by the files' paths, and what looked odd."""

    bytes_read: int
    pieces: list[tuple[str, Piece]]
    oddities: list[Oddity]


Task = Callable[[], Done]


class Packer:
    """Turns a job into tasks that can run at once, each with buffers of its thread alone."""

    def __init__(self, plan: Plan, reader: Reader, meter: Meter | Recorder) -> None:
        self._plan, self._layout = plan, plan.target.layout
        self._reader = reader
        self._meter = meter
        self._scratch = Scratch()

    def tasks(self, job: Job, files: list[StagedFile]) -> Iterator[Task]:
        """`task_count(job)` tasks, always in the same order: one for each whole tensor, and one for
        each expert, for all the ranks that hold it."""
        for file in files:
            for tensor in file.planned.copied:
                yield partial(self._copy, job.group, file, tensor)
        for index in job.experts:
            owners = [
                (file, part.experts.index(index))
                for file in files
                if (part := file.planned.rank_slice) is not None and index in part.experts
            ]
            # Neighbors begin with different files, as one worker at a time can write to a file.
            turn = index % max(1, len(owners))
            yield partial(self._convert, job.group, index, owners[turn:] + owners[:turn])

    def _copy(self, group: Group, file: StagedFile, tensor: PlannedTensor) -> Done:
        assert isinstance(tensor.source, SourceTensor)
        buffer = self._scratch.take("chunk", (CHUNK_BYTES,), np.uint8)
        with self._meter.busy("write", tensor.blob.nbytes):
            piece = file.write_whole(tensor.blob, self._reader.chunks(tensor.source, buffer))
        wanted = group.digest_of(tensor.source)
        refuse_changed(self._reader, tensor.source, piece.digest, wanted)
        return Done(piece.nbytes, [(file.planned.path, piece)], [])

    def _convert(self, group: Group, index: int, owners: list[tuple[StagedFile, int]]) -> Done:
        """Pack an expert for every file of `owners`, each with the expert's index in it."""
        count = sum(tensor.nbytes for tensor in group.read_for(index))
        with self._meter.busy("read", count):
            expert = load(self._plan, group, index, self._reader, self._scratch)
        with self._meter.busy("convert"):
            odd = expert.check()
        pieces = []
        remaining = list(owners)
        while remaining:
            free = next((i for i, (file, _) in enumerate(remaining) if file.is_free()), 0)
            file, local = remaining.pop(free)
            with self._meter.busy("convert", count // len(owners)):
                packed = [self._pack(tensor, expert) for tensor in file.planned.stacked]
            with self._meter.busy("write", sum(map(len, packed))):
                written = file.write_expert(local, packed)
            pieces += [(file.planned.path, piece) for piece in written]
        return Done(expert.bytes_read, pieces, odd)

    def _pack(self, tensor: PlannedTensor, expert: LoadedExpert) -> memoryview:
        """One expert's part of a stacked tensor, until the next of its name is packed."""
        assert isinstance(tensor.source, Cut)
        name, shape = tensor.source.tensor.name, tensor.blob.shape[1:]
        out = self._scratch.take(name, shape, NUMPY_BITS[tensor.blob.dtype])
        expert.fill(tensor.source, self._layout, out)
        return out.data.cast("B")


def task_count(job: Job) -> int:
    """How many tasks a job has."""
    return len(job.copied) + len(job.experts)


def warm_up(layout: Layout) -> None:
    """Compile what packing needs, or load it: once, before several workers would."""
    n, quantization = 64, layout.quantization
    # Few groups and many have kernels of their own.
    for role, k in itertools.product(quantization.roles, (128, 1024)):
        for dtype in _dtypes_of(role, quantization):
            source = np.zeros(quantization.plain_shape(role, n, k), NUMPY_BITS[dtype])
            out = np.zeros(layout.shape(role, n, k), NUMPY_BITS[dtype])
            layout.pack_into(role, source, range(n), range(k), out, 0)
            if role == "code":
                all_one_code(source, quantization.bits)
            elif role == "scale":
                scan_scales(source, dtype)


def _dtypes_of(role: Role, quantization: Quantization) -> tuple[str, ...]:
    if role == "scale":
        return ("U8",) if quantization.scheme == "mxfp4" else ("BF16", "F32")
    return ("BF16",) if role == "bias" else ("I32",)
