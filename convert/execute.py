"""Carrying a plan out: every source tensor is read once, packed for all ranks, written once.

Memory: a worker holds one expert (three matrices with scales) and one rank's piece of it, or one
chunk of a whole tensor; so at most

    workers × (expert bytes + rank piece bytes + CHUNK_BYTES)

beside the plan and the interpreter, whatever the number of layers (`memory_bound`). K2.6 at tp 8:
36 MB a worker. Threads, not processes: reading, packing, digesting and writing all let go of the
interpreter.

Two jobs are under way at a time: the next begins while the last experts of one are packed, and its
files are synced and published.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from queue import SimpleQueue
from typing import NamedTuple

from kconvert.convert.output.publish import OwnedWorkspace
from kconvert.convert.output.writer import BlobWriter
from kconvert.convert.pack import Packer, Task
from kconvert.convert.plan import Plan
from kconvert.convert.progress import Meter
from kconvert.convert.source import Source
from kconvert.layouts.errors import KconvertError
from kconvert.layouts.reader import CHUNK_BYTES, Reader

_UNDER_WAY = 2  # jobs


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


class Executed(NamedTuple):
    """What was read, and what looked odd on the way: sentences."""

    bytes_read: int
    warnings: tuple[str, ...]


def execute(
    plan: Plan, source: Source, workspace: OwnedWorkspace, workers: int, meter: Meter
) -> Executed:
    """Write and publish every file of `plan`.

    Raises CheckpointError for a fault in the source's data, UnavailableError where a shard cannot
    be got, OSError as the system gives it; unpublished files are gone then, published ones stay.
    """
    order = [job.shards for job in plan.jobs]
    pool = ThreadPoolExecutor(workers, thread_name_prefix="convert")
    publisher = ThreadPoolExecutor(1, thread_name_prefix="publish")
    under_way: deque[Future[None]] = deque()
    writers: list[BlobWriter] = []
    with (
        source.deliveries(order, workspace.work, meter) as shards,
        closing(Reader(shards.path)) as reader,
    ):
        packer = Packer(plan, reader, meter)

        def work(task: Task) -> int:
            with meter.busy("work"):
                return task()

        def land(index: int, tasks: list[Future[int]], done: list[BlobWriter]) -> None:
            """Wait for a job's tasks, and publish its files."""
            job = plan.jobs[index]
            read = _total(tasks)
            if read != job.source_bytes:
                raise KconvertError(
                    f"{job.group.name}: {read:,} bytes were read, {job.source_bytes:,} planned;"
                    " this is a bug."
                )
            shards.check(index)
            with meter.busy("write"):
                for writer in done:
                    writer.publish()
            shards.release(index, reader.forget)

        try:
            for i, job in enumerate(plan.jobs):
                # Where a shard is still to come, a fault must not wait for it.
                most = _UNDER_WAY if shards.ready(i) else 1
                while len(under_way) >= most:
                    under_way.popleft().result()
                shards.take(i)
                current = [BlobWriter(workspace, file) for file in job.files]
                writers = [writer for writer in writers if not writer.closed] + current
                tasks = [pool.submit(work, task) for task in packer.tasks(job, current)]
                under_way.append(publisher.submit(land, i, tasks, current))
            while under_way:
                under_way.popleft().result()
        finally:
            # On a failure or an interrupt: no new work, what is whole is still published, and the
            # rest is cleaned up.
            pool.shutdown(wait=True, cancel_futures=True)
            publisher.shutdown(wait=True)
            for writer in writers:
                writer.close()
    return Executed(reader.bytes_read, tuple(packer.oddities.sentences()))


def _total(futures: list[Future[int]]) -> int:
    """The sum of what the tasks give; raises the first fault, not waiting for the others, and
    CancelledError where they were called off."""
    finished: SimpleQueue[Future[int]] = SimpleQueue()
    for future in futures:  # concurrent.futures.wait does not hear of futures that are called off
        future.add_done_callback(finished.put)
    return sum(finished.get().result() for _ in futures)
