"""Carrying a plan out: every source tensor is read once, packed for all ranks, written once.

Memory: a worker holds one expert (its matrices, in the plain order too if they are stored in
another) and one rank's piece of it, or one chunk of a whole tensor, and a chunk that is moved onto
a page to be written; so at most

    workers × (expert bytes + rank piece bytes + 2 × CHUNK_BYTES)

beside the plan and the interpreter, whatever the number of layers (`memory_bound`). K2.6 at tp 8:
45 MB a worker.

Two jobs are under way at a time: the next begins while the last experts of one are packed, and its
files are synced and published.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import NamedTuple

from kconvert.convert.crew import JobFiles, crew
from kconvert.convert.expert import expert_bytes
from kconvert.convert.oddities import Oddity, sentences
from kconvert.convert.output.publish import OwnedWorkspace
from kconvert.convert.output.writer import BlobWriter
from kconvert.convert.pack import Done, task_count
from kconvert.convert.plan import Job, Plan
from kconvert.convert.progress import Meter
from kconvert.convert.source import Source
from kconvert.layouts.errors import KconvertError
from kconvert.layouts.reader import CHUNK_BYTES

_UNDER_WAY = 2  # jobs


def memory_bound(plan: Plan, workers: int) -> int:
    """Upper bound in bytes of the buffers that `execute` holds."""
    expert = piece = 0
    for job in plan.jobs:
        if job.experts:
            expert = max(expert, expert_bytes(plan, job.group))
        for file in job.files:
            piece = max(piece, sum(t.blob.nbytes // t.blob.experts for t in file.stacked))
    return workers * (expert + piece + 2 * CHUNK_BYTES)  # one to read, one to write


class Executed(NamedTuple):
    """What was read, and what looked odd on the way: sentences."""

    bytes_read: int
    warnings: tuple[str, ...]


class Landed(NamedTuple):
    """What is kept of a job when its files are published."""

    bytes_read: int
    oddities: list[Oddity]


def execute(
    plan: Plan, source: Source, workspace: OwnedWorkspace, workers: int, meter: Meter
) -> Executed:
    """Write and publish every file of `plan`.

    Raises CheckpointError for a fault in the source's data, UnavailableError if a shard cannot be
    fetched, OSError as the system gives it; then unpublished files are gone, published ones stay.
    """
    order = [job.shards for job in plan.jobs]
    under_way: deque[Future[Landed]] = deque()
    writers: list[BlobWriter] = []
    landed: list[Landed] = []
    with (
        crew(plan, workers, meter) as hands,
        source.deliveries(order, workspace.work, meter) as shards,
    ):
        pool = ThreadPoolExecutor(workers, thread_name_prefix="convert")
        publisher = ThreadPoolExecutor(1, thread_name_prefix="publish")

        def work(index: int, number: int, files: JobFiles) -> Done:
            with meter.busy("work"):
                return hands.do(index, number, files, (index - 1, index, index + 1))

        def land(index: int, tasks: list[Future[Done]], blobs: list[BlobWriter]) -> Landed:
            """Wait for a job's tasks, and publish its files."""
            done = _results(tasks)
            _check_bytes(plan.jobs[index], done)
            by_path = {blob.planned.path: blob for blob in blobs}
            for path, piece in (piece for result in done for piece in result.pieces):
                by_path[path].take(piece)
            shards.check(index)
            with meter.busy("write"):
                for blob in blobs:
                    blob.publish()
            shards.release(index, hands.forget)
            odd = [oddity for result in done for oddity in result.oddities]
            return Landed(plan.jobs[index].source_bytes, odd)

        try:
            for i, job in enumerate(plan.jobs):
                # If a shard is still to come, a fault must not wait for it.
                most = _UNDER_WAY if shards.ready(i) else 1
                while len(under_way) >= most:
                    landed.append(under_way.popleft().result())
                shards.take(i)
                blobs = [BlobWriter(workspace, file) for file in job.files]
                writers = [writer for writer in writers if not writer.closed] + blobs
                files = JobFiles(
                    {blob.planned.path: (blob.staged, blob.final) for blob in blobs},
                    {shard: shards.path(shard) for shard in job.shards},
                )
                tasks = [pool.submit(work, i, n, files) for n in range(task_count(job))]
                under_way.append(publisher.submit(land, i, tasks, blobs))
            while under_way:
                landed.append(under_way.popleft().result())
        finally:
            # On a failure or an interrupt: no new work, what is whole is still published, and the
            # rest is cleaned up.
            pool.shutdown(wait=True, cancel_futures=True)
            publisher.shutdown(wait=True)
            for writer in writers:
                writer.close()
    return Executed(
        bytes_read=sum(job.bytes_read for job in landed),
        warnings=tuple(sentences(oddity for job in landed for oddity in job.oddities)),
    )


def _check_bytes(job: Job, done: list[Done]) -> None:
    read = sum(result.bytes_read for result in done)
    if read != job.source_bytes:
        raise KconvertError(
            f"{job.group.name}: {read:,} bytes were read, {job.source_bytes:,} planned; this is a"
            " bug."
        )


def _results(futures: list[Future[Done]]) -> list[Done]:
    """What the tasks did. Raises the first fault without waiting for the others, and CancelledError
    if they were cancelled."""
    finished: SimpleQueue[Future[Done]] = SimpleQueue()
    for future in futures:  # concurrent.futures.wait does not notice that futures are cancelled
        future.add_done_callback(finished.put)
    return [finished.get().result() for _ in futures]
