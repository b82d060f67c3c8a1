"""Network faults of every kind on every request: no wrong byte, no hang, no traceback.

A run may give up with one sentence; the same command again goes on, until the output is whole.
"""

import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from hub.faults import Fault, FaultKind, Schedule, no_faults, random_faults
from hub.server import Hub, environment
from kit import KIMI_MINI
from survive import impatient
from survive.runs import Case, finish, report, start, undisturbed, wrong

from kconvert.convert.synth.write import synth

MINI, LARGE = "test/mini", "test/large"
_SCALE = 0.02  # of every pause
_LIMIT = 120.0  # seconds a run may take
_RUNS = 40  # of one conversion, until it is whole
_RATES = (0.05, 0.2, 0.4, 0.5)
_OUTAGES = 0.3  # of conversions: from some request on, all fail, until the next run
_EVERY_LARGE = 6  # one of so many conversions
_AGAIN = re.compile(r"test/.*: .*; again in \d+ s")
_SILENT = impatient.TIMEOUT + 1
# By name, except that a silence is one second longer than the client waits, not 28.
KINDS = [kind for kind in get_args(FaultKind) if kind != "delay"] + [
    Fault("delay", seconds=_SILENT), Fault("delay", after=30_000, seconds=_SILENT),
]  # fmt: skip


@dataclass
class Tally:
    conversions: int = 0
    outages: int = 0
    runs: int = 0
    ends: Counter = field(default_factory=Counter)  # exit codes
    notices: int = 0
    sentences: Counter = field(default_factory=Counter)
    most_runs: int = 0
    longest: float = 0.0
    most_requests: int = 0  # for one file in one run
    failures: list[str] = field(default_factory=list)


def faults(
    count: int, seed: int, folder: Path, progress: Callable[[int], None] = lambda _: None,
    scale: float = _SCALE, large: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Convert until `count` faults were met; `large`: also what is downloaded in many pieces."""
    begun, draw, tally = time.monotonic(), random.Random(seed), Tally()
    with Hub() as hub:
        world = _World(hub, folder, tally, scale)
        cases = [world.mini] + ([world.large()] if large else [])
        while world.met.total() < count:
            is_large = large and tally.conversions % _EVERY_LARGE == 1
            world.convert(cases[is_large], draw)
            progress(world.met.total())
    return report(
        "faults", begun, seed=seed, faults=world.met.total(), by_kind=dict(world.met),
        by_request=dict(world.requests), conversions=tally.conversions, outages=tally.outages,
        runs=tally.runs, exit_codes=dict(tally.ends), most_runs_of_one=tally.most_runs,
        notices_of_another_attempt=tally.notices, limit_seconds=_LIMIT,
        sentences=dict(tally.sentences.most_common()),
        longest_run_seconds=round(tally.longest, 2), pauses_scaled_by=scale,
        timeouts_seconds=impatient.TIMEOUT, most_requests_for_one_file=tally.most_requests,
        failures=tally.failures,
    )  # fmt: skip


class _World:
    """A Hub with repositories, what they become, and the faults that were met."""

    def __init__(self, hub: Hub, folder: Path, tally: Tally, scale: float) -> None:
        self._hub, self._folder, self._tally = hub, folder, tally
        self._program = (sys.executable, impatient.__file__, str(scale))
        self._expected: dict[Case, dict[str, str]] = {}
        self.met: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        hub.add_repo(MINI, KIMI_MINI)
        self.mini = self._calm(Case(MINI, ("--tp", "2")))

    def large(self) -> Case:
        """One shard with matrices of K2.6's size."""
        synth(self._folder / "large", "k2.6", layers=[1], experts=2)
        self._hub.add_repo(LARGE, self._folder / "large")
        return self._calm(Case(LARGE, ("--layers", "1")))

    def _calm(self, case: Case) -> Case:
        place = self._folder / "calm"
        self._expected[case] = undisturbed(
            case, place / "out", environment(self._hub.url, place / "home")
        )
        shutil.rmtree(place)
        return case

    def convert(self, case: Case, draw: random.Random) -> None:
        """Run until the output is whole."""
        place, seed = self._folder / "faulty", draw.randrange(1 << 30)
        some = random_faults(seed, draw.choice(_RATES), KINDS)
        outage = draw.random() < _OUTAGES
        self._tally.conversions += 1
        self._tally.outages += outage
        for number in range(1, _RUNS + 1):
            begins = len(self._hub.requests) + draw.randrange(40)
            every = random_faults(seed, 1.0, KINDS)
            self._hub.faults = _from(begins, every) if outage and number == 1 else some
            if self._run(case, place):
                self._tally.most_runs = max(self._tally.most_runs, number)
                break
        else:
            self._fail(f"not whole after {_RUNS} runs")
        self._hub.faults = no_faults
        for what in wrong(place / "out", self._expected[case]):
            self._fail(what)
        shutil.rmtree(place)

    def _run(self, case: Case, place: Path) -> bool:
        patience = f"{impatient.TIMEOUT:.0f}"
        own = {"HF_HUB_DOWNLOAD_TIMEOUT": patience, "HF_HUB_ETAG_TIMEOUT": patience}
        of_client = environment(self._hub.url, place / "home") | own
        first, begun = len(self._hub.requests), time.monotonic()
        try:
            process = start(case, place / "out", of_client, self._program)
            ended = finish(process, begun, _LIMIT)
        except subprocess.TimeoutExpired:
            self._fail(f"no end after {_LIMIT:.0f} s")
            return False
        seen = self._hub.requests[first:]
        for request in seen:
            if request.fault is not None:
                self.met[request.fault.kind] += 1
                self.requests[f"{request.kind} {request.method}"] += 1
        asked = Counter((r.kind, r.method, r.path) for r in seen)
        tally = self._tally
        tally.runs += 1
        tally.ends[ended.code] += 1
        tally.longest = max(tally.longest, ended.seconds)
        tally.most_requests = max(tally.most_requests, *asked.values())
        lines = [line for line in ended.err.splitlines() if not _AGAIN.fullmatch(line)]
        tally.notices += ended.err.count("\n") - len(lines)
        tally.sentences.update(map(_form, lines))
        one_sentence = len(lines) == 1 and lines[0].startswith("kconvert: ")
        if ended.code not in (0, 2, 3) or not (one_sentence if ended.code else not lines):
            self._fail(f"ended with {ended.code}: {ended.err[-1500:]}")
        return ended.code == 0

    def _fail(self, what: str) -> None:
        what = what.replace(str(self._folder), "").replace(sys.prefix, "")
        self._tally.failures.append(f"after {self.met.total()} faults: {what}")
        print(self._tally.failures[-1], file=sys.stderr)


def _from(number: int, schedule: Schedule) -> Schedule:
    return lambda request: schedule(request) if request.number >= number else None


def _form(sentence: str) -> str:
    """A sentence without its names and numbers."""
    sentence = re.sub(r"test/(mini|large)", "REPO", sentence.strip())
    sentence = re.sub(r"[\w.-]+\.(safetensors|json)\b", "FILE", sentence)
    sentence = re.sub(r"\b[0-9a-f]{40,64}\b", "HASH", sentence)
    return re.sub(r"\d[\d,]*", "N", sentence)
