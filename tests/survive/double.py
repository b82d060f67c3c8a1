"""Two runs on one output at the same time: one at a time works, and nothing mixes."""

import random
import re
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

from hub.server import Hub, environment
from kit import KIMI_MINI
from survive.runs import Case, Ended, finish, report, start, undisturbed, wrong

_REPO = "test/mini"
_REFUSED = re.compile(r"kconvert: \S+/owner (says that another run is|was just taken).*\n")


def double(count: int, seed: int, folder: Path) -> dict[str, Any]:
    """Start `count` pairs, in turn from a folder and from the Hub; half of them at once."""
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
            which = number % 2
            # Caches of their own, so that nothing but the output brings them together.
            homes = [environment(hub.url, folder / f"home-{i}") for i in range(2)]
            at = time.monotonic()
            first = start(cases[which], out, homes[0])
            time.sleep(draw.choice([0, draw.uniform(0, 2)]))
            pair = [first, start(cases[which], out, homes[1])]
            ended = [finish(process, at) for process in pair]
            ends[_how(ended)] += 1
            failures += [f"pair {number}: {what}" for what in _wrong(ended)]
            failures += [f"pair {number}: {what}" for what in wrong(out, expected[which])]
            shutil.rmtree(out)
    return report("double", begun, seed=seed, pairs=count, ends=dict(ends), failures=failures)


def _how(ended: list[Ended]) -> str:
    done = sum(one.code == 0 for one in ended)
    return {2: "one after the other", 1: "one was refused"}.get(done, "none was done")


def _wrong(ended: list[Ended]) -> list[str]:
    found = [] if any(one.code == 0 for one in ended) else ["none was done"]
    for code, _, err, _ in ended:
        if not (code == 0 and not err) and not (code == 3 and _REFUSED.fullmatch(err)):
            found.append(f"ended with {code}: {err[-500:]}")
    return found
