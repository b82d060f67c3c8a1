"""The real command in a process of its own, and what must be true of its output in the end."""

import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

WORK = ".kconvert"
LOG, OUTLINE = "runs.jsonl", "outline.json"
MANIFEST = "kconvert.json"
KCONVERT = (sys.executable, "-m", "kconvert.convert.cli")


class Case(NamedTuple):
    """A conversion: a folder or a repository's name, and options of the command line."""

    source: str
    options: tuple[str, ...]
    bandwidth: float | None = None  # of the Hub, bytes a second

    def arguments(self, out: Path) -> list[str]:
        return ["convert", self.source, str(out), *self.options]

    def resumes(self, out: Path) -> str:
        """What the command prints when it is interrupted."""
        return f"kconvert: interrupted; to resume: {shlex.join(['kconvert', *self.arguments(out)])}"


class Ended(NamedTuple):
    code: int
    out: str
    err: str
    seconds: float


def start(
    case: Case, out: Path, environment: Mapping[str, str], program: tuple[str, ...] = KCONVERT
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*program, *case.arguments(out)], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], begun: float, limit: float = 600) -> Ended:
    """Wait for a process that was started at `begun`; TimeoutExpired, and its end, if it hangs."""
    try:
        out, err = process.communicate(timeout=limit)
    finally:
        process.kill()
    return Ended(process.returncode, out, err, time.monotonic() - begun)


def undisturbed(case: Case, out: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """The digests of a run that nobody disturbs."""
    ended = finish(start(case, out, environment), time.monotonic())
    if ended.code != 0:
        raise RuntimeError(f"an undisturbed run ended with {ended.code}: {ended.err[-2000:]}")
    return digests(out)


def names(folder: Path) -> frozenset[str]:
    """All paths below a folder that may be changing or not exist."""
    return frozenset(
        os.path.relpath(os.path.join(parent, name), folder)
        for parent, folders, files in os.walk(folder)
        for name in (*folders, *files)
    )


def digests(out: Path) -> dict[str, str]:
    """Every file of an output and what it holds, the work folder apart."""
    return {
        path.relative_to(out).as_posix(): hashlib.blake2b(path.read_bytes()).hexdigest()
        for path in out.rglob("*")
        if path.is_file() and WORK not in path.relative_to(out).parts
    }


def wrong(out: Path, expected: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with a finished output: nothing, if all is well."""
    found = digests(out)
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            what = "missing" if name not in found else "other bytes"
            yield f"{name}: {what if name in expected else 'not of this output'}"
    for folder in out.rglob(WORK):
        left = sorted(names(folder) - (_may_stay(out) if folder.parent == out else set()))
        yield from (f"{(folder / name).relative_to(out)} stayed" for name in left)


def _may_stay(out: Path) -> set[str]:
    """The log, and what the rest of an output that is not complete will be made by."""
    manifest = out / MANIFEST
    complete = manifest.exists() and json.loads(manifest.read_text())["complete"]
    return {LOG} if complete else {LOG, OUTLINE}


def published(out: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of change of every blob that has its final name."""
    found = {}
    for path in out.glob("*/*.safetensors"):
        status = path.stat()
        found[path.relative_to(out).as_posix()] = status.st_ino, status.st_mtime_ns
    return found


def report(what: str, begun: float, **counts: Any) -> dict[str, Any]:
    """A result as it is kept: no host, no path of this machine."""
    return {
        "survive": what,
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(time.monotonic() - begun, 1),
        "cores": len(os.sched_getaffinity(0)),
        **counts,
    }
