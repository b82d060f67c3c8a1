"""Kills at random moments of a conversion, each resumed by the same command.

Half of the moments are spread over the time of an undisturbed run, the other half over the
changes it makes in the output, so that short phases (publishing, the manifest) are hit as well.
"""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hub.server import Hub, environment
from kit import KIMI_MINI
from survive.runs import MANIFEST, WORK, Case, finish, names, published, report, start, wrong
from survive.runs import digests as digests_of

from kconvert.convert.synth.write import synth

MINI, LARGE = "test/mini", "test/large"
SIGNALS = (signal.SIGKILL,) * 4 + (signal.SIGTERM, signal.SIGINT)
PLANNING, ENDING = "planning, output not owned", "ending, all is there"
_MOST = 12  # kills of one conversion
_LIMIT = 120.0  # seconds a run may take to end


@dataclass
class Tally:
    """What was seen."""

    kills: int = 0
    too_late: int = 0
    conversions: Counter = field(default_factory=Counter)
    signals: Counter = field(default_factory=Counter)
    phases: Counter = field(default_factory=Counter)
    outside: Counter = field(default_factory=Counter)
    most: int = 0
    slowest_end: float = 0.0
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Undisturbed:
    seconds: float
    changes: int
    digests: Mapping[str, str]


def kills(
    count: int, seed: int, folder: Path, progress: Callable[[int], None] = lambda _: None,
    large: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Kill `count` living runs; `large`: also of a checkpoint with matrices of K2.6's size."""
    # A shell's background job ignores it, and so would the runs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    begun, draw, tally = time.monotonic(), random.Random(seed), Tally()
    with Hub() as hub:
        cases = _cases(hub, folder, large)
        known = [_undisturbed(hub, case, folder / "calm") for case in cases]
        while tally.kills < count:
            which = draw.randrange(len(cases))
            conversion = _Conversion(hub, cases[which], known[which], folder / "killed", tally)
            conversion.go(draw, count - tally.kills)
            progress(tally.kills)
    return report(
        "kills", begun, seed=seed, kills=tally.kills, too_late=tally.too_late,
        conversions=dict(tally.conversions), most_kills_of_one=tally.most,
        signals=dict(tally.signals), phases=dict(tally.phases),
        outside_the_command=dict(tally.outside),
        slowest_end_after_a_signal=round(tally.slowest_end, 2), failures=tally.failures,
    )  # fmt: skip


def _cases(hub: Hub, folder: Path, large: bool) -> list[Case]:
    hub.add_repo(MINI, KIMI_MINI)
    cases = [
        Case(MINI, ("--tp", "2"), 4e6),
        Case(str(KIMI_MINI), ("--tp", "4", "--ep", "2", "--layout", "w4a16")),
    ]
    if large:
        source = folder / "large"
        synth(source, "k2.6", layers=[1], experts=4)
        hub.add_repo(LARGE, source)
        options = "--tp", "4", "--layers", "1"
        cases += [Case(LARGE, options, 2e8), Case(str(source), options)]
    return cases


def _undisturbed(hub: Hub, case: Case, folder: Path) -> Undisturbed:
    out, hub.bandwidth = folder / "out", case.bandwidth
    begun = time.monotonic()
    process = start(case, out, environment(hub.url, folder / "home"))
    changes = _watch(process, out, begun, due=float("inf"))
    ended = finish(process, begun)
    if ended.code != 0:
        raise RuntimeError(f"an undisturbed run ended with {ended.code}: {ended.err[-2000:]}")
    known = Undisturbed(ended.seconds, changes, digests_of(out))
    shutil.rmtree(folder)
    return known


def _watch(
    process: subprocess.Popen, out: Path, begun: float, due: float, change: int = 0,
    delay: float = 0.0,
) -> int:  # fmt: skip
    """Look on until `due` seconds have passed, or `delay` more since a `change`, or it ended;
    how often the names in `out` have changed."""
    changes, last = 0, names(out)
    while process.poll() is None and time.monotonic() - begun < due:
        if (now := names(out)) != last:
            changes, last = changes + 1, now
            if changes == change:
                due = time.monotonic() - begun + delay
        time.sleep(0.001)
    return changes


class _Conversion:
    """One output, killed again and again until it is whole."""

    def __init__(
        self, hub: Hub, case: Case, known: Undisturbed, folder: Path, tally: Tally
    ) -> None:
        self._hub, self._case, self._known, self._tally = hub, case, known, tally
        self._folder, self._out = folder, folder / "out"
        self._environment = environment(hub.url, folder / "home")
        self._kind = "folder" if Path(case.source).is_dir() else "Hub"
        self._blobs: dict[str, tuple[int, int]] = {}

    def go(self, draw: random.Random, most: int) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._hub.bandwidth = self._case.bandwidth
        killed, most = 0, min(most, draw.randint(1, _MOST))
        while killed < most and self._killed(draw):
            killed += 1
        self._tally.conversions[self._kind] += 1
        self._tally.most = max(self._tally.most, killed)
        begun = time.monotonic()
        ended = finish(start(self._case, self._out, self._environment), begun, _LIMIT)
        if ended.code != 0 or ended.err:
            self._fail(f"the last run ended with {ended.code}: {ended.err[-1500:]}")
        self._check_blobs()
        for what in wrong(self._out, self._known.digests):
            self._fail(what)

    def _killed(self, draw: random.Random) -> bool:
        """Run and kill; False if the run was done before."""
        sign = draw.choice(SIGNALS)
        begun = time.monotonic()
        process = start(self._case, self._out, self._environment)
        if draw.random() < 0.5:
            _watch(process, self._out, begun, due=draw.uniform(0, self._known.seconds))
        else:
            change = draw.randint(1, self._known.changes)
            _watch(process, self._out, begun, _LIMIT, change, delay=draw.uniform(0, 0.02))
        phase, sent = self._phase(process.pid), time.monotonic()
        process.send_signal(sign)
        try:
            ended = finish(process, begun, _LIMIT)
        except subprocess.TimeoutExpired:
            self._fail(f"{sign.name}: did not end in {_LIMIT:.0f} s")
            return True
        if ended.code == 0:
            self._tally.too_late += 1
            return False
        if sign == signal.SIGKILL:
            phase = self._phase(process.pid)
        else:
            self._tally.slowest_end = max(self._tally.slowest_end, time.monotonic() - sent)
        self._tally.kills += 1
        self._tally.signals[sign.name] += 1
        self._tally.phases[f"{self._kind}: {phase}"] += 1
        self._check_end(sign, ended.code, ended.err, phase)
        self._check_blobs()
        return True

    def _check_end(self, sign: signal.Signals, code: int, err: str, phase: str) -> None:
        if sign == signal.SIGKILL:
            right = code == -signal.SIGKILL
        else:
            right = code == 130 and err == self._case.resumes(self._out) + "\n"
            # Python starts before the command can take signals, and ends after it was left.
            outside = " in convert" not in err and "kconvert:" not in err
            if not right and outside and phase in (PLANNING, ENDING) and code in (-sign, 1, 130):
                self._tally.outside[f"{sign.name} while {phase}: exit code {code}"] += 1
                right = True
        if not right:
            self._fail(f"{sign.name} while {phase}: ended with {code}: {err[-1500:]}")

    def _check_blobs(self) -> None:
        now = published(self._out)
        for name, mark in self._blobs.items():
            if now.get(name) != mark:
                self._fail(f"{name} was published, and is not the same file any more")
        self._blobs |= now

    def _phase(self, pid: int) -> str:
        """What a run is at, by what lies there; before it owns the output that is an earlier
        run's."""
        there = names(self._out)
        ours = [name.removeprefix(f"{WORK}/") for name in there if name.startswith(f"{WORK}/")]
        incoming = [name for name in ours if name.startswith("incoming/")]
        if MANIFEST in there:
            return ENDING
        try:
            if json.loads((self._out / WORK / "owner").read_text())["pid"] != pid:
                return PLANNING
        except (OSError, ValueError):
            return PLANNING
        if self._known.digests.keys() - there == {MANIFEST}:
            return "all but the manifest"
        if any(".safetensors." in name and name.endswith(".partial") for name in ours):
            return "converting, a partial blob"
        if any(name.endswith(".safetensors") for name in incoming):
            return "checking, a whole shard"
        if incoming:
            return "downloading, a part of a shard"
        if any(name.endswith(".safetensors") for name in there):
            return "between blobs"
        return "starting, output owned"

    def _fail(self, what: str) -> None:
        what = what.replace(str(self._folder), "").replace(sys.prefix, "")
        self._tally.failures.append(f"{self._kind}, after {self._tally.kills} kills: {what}")
        print(self._tally.failures[-1], file=sys.stderr)
