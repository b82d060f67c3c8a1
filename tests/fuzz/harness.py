"""Run cases, judge how each ends, and report; a case is a function of the seed and its number."""

import contextlib
import faulthandler
import linecache
import resource
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from fuzz.folders import World
from fuzz.targets import TARGETS

from kconvert.layouts.errors import KconvertError
from kconvert.validate import validate

MOST_CHARACTERS = 1000
_SHOWN = 40  # different failures that are reported in full


class Hang(BaseException):
    """The case took too long; no `except Exception` of the product may catch it."""


@dataclass
class Failure:
    """What went wrong, first at case `case`; `times` counts the cases that end at that place."""

    target: str
    seed: int
    case: int
    reason: str
    where: str
    trace: str
    times: int = 1


@dataclass
class Report:
    """The outcome of a run. Bytes are of resident memory."""

    count: int
    seed: int
    first: int
    seconds: float = 0.0
    cases: Counter[str] = field(default_factory=Counter)  # by target
    accepted: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failed: int = 0
    sentences: int = 0  # different ones
    refusal_places: int = 0  # lines of the product that they come from
    slowest_seconds: float = 0.0
    slowest_case: int = -1
    peak_bytes: int = 0
    growth_bytes: int = 0  # over what lay there before the first case
    failures: list[Failure] = field(default_factory=list)

    def table(self) -> dict[str, Any]:
        return {**vars(self), "failures": [vars(failure) for failure in self.failures]}


@contextlib.contextmanager
def made_world() -> Iterator[World]:
    """The folders of a run, in memory where the system has a place for that."""
    shm = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="fuzz-", dir=shm if shm.is_dir() else None))
    try:
        world = World(root)
        warm_up(world)
        yield world
    finally:
        shutil.rmtree(root)


def run(
    world: World,
    count: int,
    seed: int = 0,
    first: int = 0,
    *,
    only: str | None = None,
    seconds: float = 20.0,
    memory: int = 1 << 30,
    progress: Callable[[int], None] = lambda _: None,
) -> Report:
    """Try the cases `first` to `first + count`, each in `seconds` and `memory` bytes more than
    before. `only`: all of them on one target."""
    runner = _Runner(world, Report(count, seed, first), Limits(seconds, memory))
    before, started = _peak(), time.monotonic()
    for case in range(first, first + count):
        runner.try_case(case, only)
        progress(case - first + 1)
    return runner.finish(before, started)


def warm_up(world: World) -> None:
    """Imports and compiled code are not a case's time or memory."""
    validate(world.output.root, world.real, sample=1, workers=1)
    rng = Random(0)
    for target, _ in TARGETS.values():
        for _ in range(3):
            with contextlib.suppress(Exception):  # the cases will tell
                target(world, rng)
            world.restore()


class Limits:
    """`with limits:` a block has so many seconds, and bytes beside what there was at the start:
    a hostile allocation is a MemoryError, not the end of the machine."""

    def __init__(self, seconds: float, memory: int) -> None:
        self.seconds = seconds
        self._soft, self._hard = resource.getrlimit(resource.RLIMIT_DATA)
        status = Path("/proc/self/status").read_text()
        self._data = memory + 1024 * int(status.partition("VmData:")[2].split()[0])

    def __enter__(self) -> None:
        def ring(_signal: int, _frame: FrameType | None) -> None:
            raise Hang(f"more than {self.seconds} s")

        # Where a call holds the interpreter for good, no signal helps: this ends the process.
        faulthandler.dump_traceback_later(20 * self.seconds + 60, exit=True)
        self._before = signal.signal(signal.SIGALRM, ring)
        resource.setrlimit(resource.RLIMIT_DATA, (self._data, self._hard))
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # no Hang from in here
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (self._soft, self._hard))
        signal.signal(signal.SIGALRM, self._before)
        faulthandler.cancel_dump_traceback_later()


class _Runner:
    def __init__(self, world: World, report: Report, limits: Limits) -> None:
        self._world, self.report, self._limits = world, report, limits
        self._sentences: set[int] = set()
        self._places: set[str] = set()
        self._failures: dict[tuple[str, str, str], Failure] = {}

    def try_case(self, case: int, only: str | None) -> None:
        """One case, put back and counted."""
        report = self.report
        rng = Random(f"{report.seed}/{case}")  # a string is hashed the same in every process
        weights = [share for _, share in TARGETS.values()]
        name = rng.choices(list(TARGETS), weights)[0]
        name = only or name
        report.cases[name] += 1
        started, hung = time.monotonic(), False
        try:
            with self._limits:
                sentences = TARGETS[name][0](self._world, rng)
            took = time.monotonic() - started
            if sentences:
                report.refused[name] += 1
                self._judge_sentences(name, case, sentences)
            else:
                report.accepted[name] += 1
        except BaseException as error:
            took, hung = time.monotonic() - started, isinstance(error, Hang)
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            self._judge(name, case, error)
        finally:
            self._world.restore()
        if took > self._limits.seconds and not hung:  # in a call that no signal interrupts
            self._fail(name, case, f"took {took:.1f} s", name, "")
        if took > report.slowest_seconds:
            report.slowest_seconds, report.slowest_case = round(took, 3), case

    def finish(self, before: int, started: float) -> Report:
        report = self.report
        report.seconds = round(time.monotonic() - started, 1)
        report.sentences, report.refusal_places = len(self._sentences), len(self._places)
        report.peak_bytes = _peak()
        report.growth_bytes = report.peak_bytes - before
        report.failures = list(self._failures.values())[:_SHOWN]
        return report

    def _judge(self, name: str, case: int, error: BaseException) -> None:
        """An exception: a refusal where it is one of those that the product promises."""
        where = _place(error)
        refused = isinstance(error, KconvertError)
        if not refused and not (isinstance(error, OSError) and error.errno):
            self._fail(name, case, _brief(error), where, _trace(error))
            return
        self.report.refused[name] += 1
        if refused:
            self._places.add(where)
            self._judge_sentences(name, case, [str(error)], where)

    def _judge_sentences(
        self, name: str, case: int, sentences: list[str], where: str = "a finding"
    ) -> None:
        root = str(self._world.root)  # another one in every run
        sentences = [sentence.replace(root, "") for sentence in sentences]
        self._sentences.update(map(hash, sentences))
        for sentence in sentences:
            fault = unreadable(sentence)
            if fault:
                self._fail(name, case, fault, where, f"{sentence[:300]!a}")
                return

    def _fail(self, name: str, case: int, reason: str, where: str, trace: str) -> None:
        self.report.failed += 1
        kind = reason.partition(":")[0] if ":" in reason else reason.rstrip("0123456789. s")
        key = name, kind, where
        if key in self._failures:
            self._failures[key].times += 1
        else:
            self._failures[key] = Failure(name, self.report.seed, case, reason, where, trace)


def unreadable(sentence: str) -> str | None:
    """Why a refusal's sentence is none that can be shown, or None."""
    if not sentence.strip():
        return "an empty sentence"
    if "Traceback" in sentence and 'File "' in sentence:
        return "a sentence with a traceback"
    if not sentence.isprintable():
        return "a sentence of several lines or with control characters"
    if len(sentence) > MOST_CHARACTERS:
        return f"a sentence too long, of characters: {len(sentence)}"
    return None


def _place(error: BaseException) -> str:
    """The innermost line of the product that the exception went through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/fuzz/" not in f.filename]
    ours = [f for f in frames if Path(f.filename).parent.name in _FOLDERS]
    found = (ours or frames or [None])[-1]
    return "the fuzzer" if found is None else f"{_short(found.filename)}:{found.lineno}"


_FOLDERS = ("layouts", "convert", "validate", "runtime")


def _short(path: str) -> str:
    """folder/file.py: nothing of this machine."""
    return "/".join(Path(path).parts[-2:])


def _trace(error: BaseException) -> str:
    """The last lines of the traceback, a call a line."""
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    return "\n".join(
        f"{_short(f.filename)}:{f.lineno} {linecache.getline(f.filename, f.lineno or 0).strip()}"
        for f in frames
    )


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:200]!a}"


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
