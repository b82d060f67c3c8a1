"""Who does the tasks: threads of this process, or processes of their own.

Python lets one thread at a time hold the interpreter, and an expert's task lets go of it and takes
it back some 150 times: reads, packs, digests, writes. Threads that do that wait for one another: on
16 cores sixteen were no quicker than one. So a large conversion is done by forked processes. They
share the plan's memory, open the files by their names, and send back digests; they publish nothing.
"""

import gc
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from kconvert.convert.output.writer import StagedFile, Turn
from kconvert.convert.pack import Done, Packer, Task, warm_up
from kconvert.convert.plan import Plan
from kconvert.convert.progress import Meter, Recorder
from kconvert.layouts.errors import KconvertError, LostProcessError
from kconvert.layouts.reader import Reader

WORTH_PROCESSES = 1 << 30  # bytes to be written: forking takes a tenth of a second
_FAREWELL = 5.0  # seconds


_Turns = tuple[list[Turn], list[Turn]]  # for the files of every other job: two are under way


class JobFiles(NamedTuple):
    """Where a job's files lie: by its path in the plan, each blob's temporary and final name; and
    its shards."""

    blobs: dict[str, tuple[Path, Path]]
    shards: dict[str, Path]


class Crew(Protocol):
    """Does tasks. Several threads may ask at once, each waits for its own."""

    def do(self, job: int, number: int, files: JobFiles, active: tuple[int, ...]) -> Done:
        """Do task `number` of a job; `active` are the jobs whose tasks are not all done."""

    def forget(self, shard: str) -> None:
        """Nothing more is read from a shard."""


class Worker:
    """Does the tasks of a plan's jobs, with files of its own."""

    def __init__(self, plan: Plan, meter: Meter | Recorder, turns: _Turns) -> None:
        self._plan, self._turns = plan, turns
        self._shards: dict[str, Path] = {}
        self._reader = Reader(lambda shard: self._shards[shard])
        self._packer = Packer(plan, self._reader, meter)
        self._jobs: dict[int, tuple[list[Task], list[StagedFile]]] = {}
        self._lock = threading.Lock()

    def do(self, job: int, number: int, files: JobFiles, active: tuple[int, ...]) -> Done:
        """See `Crew.do`."""
        with self._lock:
            for ended in self._jobs.keys() - set(active):
                self._end(ended)
            if job not in self._jobs:
                self._shards.update(files.shards)
                planned = self._plan.jobs[job]
                turns = self._turns[job % len(self._turns)]
                staged = [
                    StagedFile(*files.blobs[file.path], file, turn)
                    for file, turn in zip(planned.files, turns, strict=False)
                ]
                self._jobs[job] = list(self._packer.tasks(planned, staged)), staged
            tasks, _ = self._jobs[job]
        return tasks[number]()

    def forget(self, shard: str) -> None:
        """See `Crew.forget`."""
        self._reader.forget(shard)

    def close(self) -> None:
        """Close all files."""
        for job in list(self._jobs):
            self._end(job)
        self._reader.close()

    def _end(self, job: int) -> None:
        for file in self._jobs.pop(job)[1]:
            file.close()
        needed = {shard for other in self._jobs for shard in self._plan.jobs[other].shards}
        for shard in self._plan.jobs[job].shards - needed:
            self._reader.forget(shard)


@contextmanager
def crew(plan: Plan, workers: int, meter: Meter) -> Iterator[Crew]:
    """So many workers: processes if there is much to do, else threads.

    Processes are forked here and now: the caller has no thread yet whose locks they would inherit
    (one that shows progress holds none that they take).
    """
    if workers > 1 and sum(file.nbytes for file in plan.files) >= WORTH_PROCESSES:
        processes = _Processes(plan, workers, meter)
        try:
            yield processes
        finally:
            processes.close()
    else:
        worker = Worker(plan, meter, _turns(plan, threading.Lock))
        try:
            yield worker
        finally:
            worker.close()


class _Processes:
    """Forked workers; whoever asks is given an idle one."""

    def __init__(self, plan: Plan, workers: int, meter: Meter) -> None:
        self._meter = meter
        self._idle: SimpleQueue[Connection] = SimpleQueue()
        self._ours: list[Connection] = []
        self._processes: list[Any] = []
        warm_up(plan.target.layout)  # compiled once, before the fork, for all
        fork = multiprocessing.get_context("fork")
        turns = _turns(plan, partial(_shared_lock, fork))
        gc.freeze()  # or the collector, looking at the plan's objects, would copy their pages
        try:
            for _ in range(workers):
                ours, theirs = fork.Pipe()
                others = [*self._ours, ours]  # while a worker has one open, none sees it closed
                given = (plan, turns, theirs, others)
                process = fork.Process(target=_serve, args=given, daemon=True)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # see `crew`
                    process.start()
                theirs.close()
                self._ours.append(ours)
                self._processes.append(process)
                self._idle.put(ours)
        except BaseException:
            self.close()
            raise
        finally:
            gc.unfreeze()

    def do(self, job: int, number: int, files: JobFiles, active: tuple[int, ...]) -> Done:
        """See `Crew.do`."""
        worker = self._idle.get()
        try:
            worker.send((job, number, files, active))
            done, intervals = worker.recv()
        except (EOFError, OSError):
            for process in self._processes:  # so that whoever waits for another is told too
                process.kill()
            raise LostProcessError(
                "a worker process ended before its work was done (was it killed for lack of"
                " memory?): free some, or give fewer --workers, and run the same command again."
            ) from None
        finally:
            self._idle.put(worker)
        self._meter.record(intervals)
        if isinstance(done, BaseException):
            raise done
        assert isinstance(done, Done)
        return done

    def forget(self, shard: str) -> None:
        """Workers close a job's shards when they begin another."""

    def close(self) -> None:
        """End all workers. What they write at this moment has no final name yet."""
        for connection in self._ours:
            connection.close()
        for process in self._processes:
            process.join(_FAREWELL)
            if process.is_alive():
                process.kill()
                process.join()


def _turns(plan: Plan, lock: Callable[[], Turn]) -> _Turns:
    most = max((len(job.files) for job in plan.jobs), default=0)
    return [lock() for _ in range(most)], [lock() for _ in range(most)]


def _shared_lock(context: Any) -> Turn:
    try:
        lock: Turn = context.Lock()
        return lock
    except OSError:  # no semaphores here: the kernel's own lock keeps writers apart too
        return threading.Lock()


def _serve(plan: Plan, turns: _Turns, connection: Connection, others: list[Connection]) -> None:
    """A worker process: does what it is told until the connection is closed."""
    for sign in (signal.SIGINT, signal.SIGTERM):
        # A terminal interrupts all; the one who asks decides, and then ends this connection.
        signal.signal(sign, signal.SIG_IGN)
    for other in others:
        other.close()
    gc.disable()
    recorder = Recorder()
    worker = Worker(plan, recorder, turns)
    while True:
        try:
            request = connection.recv()
            answer: Done | BaseException
            try:
                answer = worker.do(*request)
            except (KconvertError, OSError, MemoryError) as error:
                answer = error
            except Exception as error:  # a bug: the traceback is for whoever mends it
                answer = RuntimeError(f"{type(error).__name__}: {error}")
            connection.send((answer, recorder.take()))
        except (EOFError, OSError):
            os._exit(0)
