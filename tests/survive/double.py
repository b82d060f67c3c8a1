"""Two runs on one output at the same time: one at a time works, and nothing mixes.

On one host; on two; and on two where the first is suspended, taken for dead and replaced, and wakes
up again.
"""

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hub.server import Hub, environment
from kit import KIMI_MINI
from survive import elsewhere
from survive.runs import WORK, Case, Ended, finish, report, start, undisturbed, wrong

SITUATIONS = ("one host", "two hosts", "suspended")
_REPO = "test/mini"
_ELSEWHERE = (sys.executable, elsewhere.__file__)
_REFUSED = re.compile(r"kconvert: \S+/owner (says that another run is|was just taken).*\n")
_LOST = re.compile(r"kconvert: \S+/owner is not this run's any more: .*\n")
_NOTICES = re.compile(r"(\S+/owner may be of a run that died|test/mini, .*; again in) .*\n")
_DISTURBED = re.compile(r"kconvert: \S+/incoming/\S+.*\n")
_LIMIT = 60.0  # seconds


def double(count: int, seed: int, folder: Path) -> dict[str, Any]:
    """Start `count` pairs in turn in every situation, and from a folder and from the Hub."""
    draw = random.Random(seed)
    begun, ends, failures = time.monotonic(), Counter(), []
    out, home = folder / "out", folder / "home"
    with Hub() as hub:
        hub.add_repo(_REPO, KIMI_MINI)
        cases = [Case(str(KIMI_MINI), ("--tp", "2")), Case(_REPO, ("--tp", "2"))]
        expected = []
        for case in cases:
            expected.append(undisturbed(case, out, environment(hub.url, home)))
            shutil.rmtree(out)
        for number in range(count):
            which, situation = number % 2, SITUATIONS[number % len(SITUATIONS)]
            # Caches of their own, so that nothing but the output brings them together.
            homes = [environment(hub.url, folder / f"home-{number}-{i}") for i in range(2)]
            if situation == "suspended":
                ended = _suspended(cases[which], out, homes, draw)
                found = _wrong_after_taking_over(ended)
                # The first one may have gone on with a download until it knew.
                again = finish(start(cases[which], out, homes[0]), time.monotonic())
                found += [f"the same again ended with {again.code}"] * (again.code != 0)
            else:
                programs = [_ELSEWHERE] * 2 if situation == "two hosts" else None
                ended = _at_once(cases[which], out, homes, draw, programs)
                found = _wrong(ended)
            ends[f"{situation}: {_how(ended)}"] += 1
            found += wrong(out, expected[which])
            failures += [f"pair {number}, {situation}: {what}" for what in found]
            shutil.rmtree(out)
    return report("double", begun, seed=seed, pairs=count, ends=dict(ends), failures=failures)


def _at_once(
    case: Case, out: Path, homes: list[Mapping[str, str]], draw: random.Random,
    programs: list[tuple[str, ...]] | None,
) -> list[Ended]:  # fmt: skip
    """Half of the pairs really at once."""
    at = time.monotonic()
    options = [{"program": program} for program in programs] if programs else [{}, {}]
    first = start(case, out, homes[0], **options[0])
    time.sleep(draw.choice([0, draw.uniform(0, 2)]))
    pair = [first, start(case, out, homes[1], **options[1])]
    return [finish(process, at) for process in pair]


def _suspended(
    case: Case, out: Path, homes: list[Mapping[str, str]], draw: random.Random
) -> list[Ended]:
    """The first is stopped at a moment when it owns the output, and goes on when the second does,
    or when that is done."""
    at = time.monotonic()
    first = start(case, out, homes[0])
    _wait_for_owner(out, first)
    time.sleep(draw.uniform(0, 0.02))
    first.send_signal(signal.SIGSTOP)
    second = start(case, out, homes[1], program=_ELSEWHERE)
    if draw.random() < 0.5:
        _wait_for_owner(out, second)
        after = None
    else:
        after = finish(second, at)
    first.send_signal(signal.SIGCONT)
    return [finish(first, at), after or finish(second, at)]


def _wait_for_owner(out: Path, process: subprocess.Popen[str]) -> None:
    """Until the output is that process's, or it has ended."""
    deadline = time.monotonic() + _LIMIT
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if json.loads((out / WORK / "owner").read_text())["pid"] == process.pid:
                return
        except (OSError, ValueError):
            pass
        time.sleep(0.001)


def _how(ended: list[Ended]) -> str:
    done = [run.code == 0 for run in ended]
    if all(done):
        return "one after the other"
    return "one was refused" if any(done) else "none was done"


def _wrong(ended: list[Ended]) -> list[str]:
    found = [] if any(run.code == 0 for run in ended) else ["none was done"]
    for code, _, err, _ in ended:
        said = _NOTICES.sub("", err)
        if not (code == 0 and not said) and not (code == 3 and _REFUSED.fullmatch(said)):
            found.append(f"ended with {code}: {err[-500:]}")
    return found


def _wrong_after_taking_over(ended: list[Ended]) -> list[str]:
    """For a moment both may download, into the same files: then the second may have to be run
    again."""
    found = []
    for run, excuse in zip(ended, (_LOST, _DISTURBED), strict=True):
        said = _NOTICES.sub("", run.err)
        if not (run.code == 0 and not said) and not (run.code == 3 and excuse.fullmatch(said)):
            found.append(f"ended with {run.code}: {run.err[-500:]}")
    return found
