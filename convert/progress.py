"""Where a conversion's time goes: bytes and busy seconds of each stage, and how long is left."""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

SHOWN = ("download", "check", "read", "convert", "write")
SEPARATOR = " · "
STAGES = (*SHOWN, "work")  # work: not waiting for a shard


@dataclass(frozen=True)
class Work:
    """Bytes that a run has to download, and to write."""

    download: int
    write: int


@dataclass(frozen=True)
class Stage:
    """What one stage has done. `busy`: seconds in which at least one thread was at it;
    `thread_seconds`: of all threads together."""

    nbytes: int = 0
    busy: float = 0.0
    thread_seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Bytes a second while it was busy."""
        return self.nbytes / self.busy if self.busy > 0 else 0.0


class Interval(NamedTuple):
    """A stretch of time that some thread of some process spent on a stage."""

    stage: str
    begin: float  # of the monotonic clock, which all processes share
    end: float
    nbytes: int


class Recorder:
    """Records what a worker process does, for the run's meter. For one thread."""

    def __init__(self) -> None:
        self._intervals: list[Interval] = []

    @contextmanager
    def busy(self, stage: str, nbytes: int = 0) -> Iterator[None]:
        """See `Meter.busy`."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self._intervals.append(Interval(stage, begin, time.monotonic(), nbytes))

    def take(self) -> list[Interval]:
        """What was recorded since the last call."""
        intervals, self._intervals = self._intervals, []
        return intervals


class Meter:
    """Counts what the stages of a run do. Safe for several threads."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self._lock = threading.Lock()
        self._bytes = dict.fromkeys(STAGES, 0)
        self._busy = dict.fromkeys(STAGES, 0.0)
        self._active = dict.fromkeys(STAGES, 0)
        self._since = dict.fromkeys(STAGES, 0.0)
        self._thread_seconds = dict.fromkeys(STAGES, 0.0)
        self._counted_to = dict.fromkeys(STAGES, 0.0)  # so that each moment counts once

    def add(self, stage: str, nbytes: int) -> None:
        """Count bytes that passed a stage."""
        with self._lock:
            self._bytes[stage] += nbytes

    @contextmanager
    def busy(self, stage: str, nbytes: int = 0) -> Iterator[None]:
        """Around a thread's work at a stage, after which `nbytes` have passed it."""
        begin = time.monotonic()
        with self._lock:
            if self._active[stage] == 0:
                self._since[stage] = begin
            self._active[stage] += 1
        try:
            yield
        finally:
            end = time.monotonic()
            with self._lock:
                self._bytes[stage] += nbytes
                self._active[stage] -= 1
                self._thread_seconds[stage] += end - begin
                if self._active[stage] == 0:
                    self._count(stage, self._since[stage], end)

    def record(self, intervals: Iterable[Interval]) -> None:
        """Count what a worker process has done."""
        with self._lock:
            for stage, begin, end, nbytes in intervals:
                self._bytes[stage] += nbytes
                self._thread_seconds[stage] += end - begin
                self._count(stage, begin, end)

    def _count(self, stage: str, begin: float, end: float) -> None:
        self._busy[stage] += max(0.0, end - max(begin, self._counted_to[stage]))
        self._counted_to[stage] = max(end, self._counted_to[stage])

    @property
    def seconds(self) -> float:
        """Since the meter was made."""
        return time.monotonic() - self.started

    def stages(self) -> dict[str, Stage]:
        """What every stage has done so far."""
        with self._lock:
            now = time.monotonic()
            return {
                name: Stage(
                    self._bytes[name],
                    self._busy[name]
                    + (
                        max(0.0, now - max(self._since[name], self._counted_to[name]))
                        if self._active[name]
                        else 0.0
                    ),
                    self._thread_seconds[name],
                )
                for name in STAGES
            }


def seconds_left(stages: dict[str, Stage], work: Work) -> float | None:
    """How many seconds a run will still take, or None while nothing is known.

    Downloading and converting overlap, so that the slower of them decides, at the rates they had
    while they were busy.
    """
    lefts = []
    for stage, busy, total in (
        ("download", "download", work.download),
        ("write", "work", work.write),
    ):
        done, seconds = stages[stage].nbytes, stages[busy].busy
        if done > 0 and seconds > 0:
            lefts.append(max(total - done, 0) * seconds / done)
    return max(lefts) if lefts else None


def status_line(
    stages: dict[str, Stage], work: Work, seconds: float, width: int | None = None
) -> str:
    """A run in a line: how far, how long still, and each stage's rate and share of the time.

    If that is wider than `width` columns, first the rates are left out, then the stages that limit
    the run least.
    """
    left = seconds_left(stages, work)
    unit, scale = ("GB", 1e9) if work.write >= 1e9 else ("MB", 1e6)
    parts = [
        f"{stages['write'].nbytes / scale:.1f} of {work.write / scale:.1f} {unit}",
        "no estimate yet" if left is None else f"{hours(left)} left",
    ]
    shares = {
        name: stages[name].busy / seconds if seconds > 0 else 0.0
        for name in SHOWN
        if stages[name].nbytes
    }
    rates = [f"{name} {rate(stages[name].rate)} ({share:.0%})" for name, share in shares.items()]
    lines = [[*parts, *rates]]
    while shares:
        lines.append([*parts, *(f"{name} {share:.0%}" for name, share in shares.items())])
        shares.pop(min(shares, key=lambda name: shares[name]))
    texts = [SEPARATOR.join(line) for line in [*lines, parts]]
    return next((text for text in texts if width is None or len(text) <= width), texts[-1][:width])


def rate(bytes_per_second: float) -> str:
    """0.20 GB/s, or 5.0 MB/s if that would be 0.00."""
    if bytes_per_second >= 1e8:
        return f"{bytes_per_second / 1e9:.2f} GB/s"
    return f"{bytes_per_second / 1e6:.1f} MB/s"


def hours(seconds: float) -> str:
    """2.5 h, 14 min or 40 s."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
