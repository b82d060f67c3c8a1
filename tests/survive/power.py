"""Power cuts at random operations: only what was synced survives, and the same command ends well.

Four situations: a new output; one whose first run was killed just before (what it left is not
durable either); one that already holds a part; one that is replaced by --overwrite.
"""

import contextlib
import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kit import KIMI_MINI, copy_mini, load, write
from survive.disk import Call, Disk, KilledError
from survive.runs import MANIFEST, WORK, digests, published, report, wrong

from kconvert.convert import convert
from kconvert.convert.output import lock
from kconvert.convert.output.writer import BlobWriter
from kconvert.layouts.blob import digest, read_blob
from kconvert.layouts.errors import KconvertError
from kconvert.layouts.manifest import read_manifest

SITUATIONS = ("new", "killed before", "part", "overwrite")
_TP = 2


@dataclass
class Tally:
    cuts: Counter = field(default_factory=Counter)
    found: Counter = field(default_factory=Counter)  # what the disks held
    calls: Counter = field(default_factory=Counter)  # of one run
    cut_before: Counter = field(default_factory=Counter)
    blobs_kept: int = 0
    owner_torn: int = 0
    failures: Counter = field(default_factory=Counter)


def power(
    count: int, seed: int, folder: Path, progress: Callable[[int], None] = lambda _: None
) -> dict[str, Any]:
    """Cut `count` conversions of kimi-mini from a folder."""
    begun, draw, tally = time.monotonic(), random.Random(seed), Tally()
    world = _World(folder, tally)
    for number in range(count):
        world.cut(SITUATIONS[number % len(SITUATIONS)], draw)
        if number % 20 == 19:
            progress(number + 1)
    return report(
        "power", begun, seed=seed, cuts=sum(tally.cuts.values()), situations=dict(tally.cuts),
        calls_of_a_run=dict(tally.calls), cut_before=dict(tally.cut_before),
        found=dict(tally.found),
        durable_blobs_kept=tally.blobs_kept, owner_files_torn=tally.owner_torn,
        failures=dict(tally.failures),
    )  # fmt: skip


class _World:
    """A source, another with other weights, what each becomes, and one cut at a time."""

    def __init__(self, folder: Path, tally: Tally) -> None:
        self._folder, self._tally = folder, tally
        self._other = copy_mini(folder / "other")
        for shard in self._other.glob("*.safetensors"):
            tensors = load(shard)
            name = next(iter(tensors))
            write(shard, tensors | {name: tensors[name]._replace(data=tensors[name].data[::-1])})
        self._expected: dict[Path, dict[str, str]] = {}
        for source in (KIMI_MINI, self._other):
            convert(source, folder / "calm", tp=_TP)
            self._expected[source] = digests(folder / "calm")
            shutil.rmtree(folder / "calm")
        tally.calls = self._calls()

    def _calls(self) -> Counter[str]:
        root = self._folder / "counted"
        root.mkdir()
        disk = Disk(root)
        with disk.watched():
            convert(KIMI_MINI, root / "out", tp=_TP)
        disk.close()
        shutil.rmtree(root)
        return disk.calls

    def cut(self, situation: str, draw: random.Random) -> None:
        """Convert, cut, look at what is left, convert again, look."""
        root, left = self._folder / "disk", self._folder / "left"
        root.mkdir()
        out, promised = root / "out", set()
        # Else the run makes it; a kill between that and its sync is not looked into.
        if situation == "killed before" or draw.random() < 0.5:
            out.mkdir()
        if situation == "part":
            convert(KIMI_MINI, out, tp=_TP, layers=[1])
        elif situation == "overwrite":
            convert(self._other, out, tp=_TP)
        disk = Disk(root)
        if situation == "killed before":
            disk.kill_at = self._call(draw)
            self._killed(disk, out, promised)
            disk.calls.clear()
        disk.cut_at = self._call(draw)
        self._tally.cut_before[disk.cut_at[0]] += 1
        before: set[str] = set()

        def power_off() -> None:
            disk.cut_at = None
            before.update(promised)
            disk.rebuild(left, draw)

        disk.on_cut = power_off
        with _boot("before"), disk.watched(), _publishing(promised):
            convert(KIMI_MINI, out, tp=_TP, overwrite=situation == "overwrite")
            if disk.cut_at is not None:
                power_off()
        disk.close()
        self._tally.cuts[situation] += 1
        for failure in self._survived(left / "out", situation, before):
            self._tally.failures[f"{situation}: {failure}"] += 1
        shutil.rmtree(root)
        shutil.rmtree(left)

    def _killed(self, disk: Disk, out: Path, promised: set[str]) -> None:
        with (
            contextlib.suppress(KilledError), _boot("before"), disk.watched(),
            _publishing(promised),
        ):  # fmt: skip
            convert(KIMI_MINI, out, tp=_TP)
        disk.kill_at, disk.killed = None, False

    def _call(self, draw: random.Random) -> Call:
        """One that will come, or at the end none: rare calls are as likely as common ones."""
        name = draw.choice(sorted(self._tally.calls))
        return name, draw.randint(1, self._tally.calls[name] + 1)

    def _survived(self, out: Path, situation: str, promised: set[str]) -> Iterator[str]:
        kept = digests(out) if out.exists() else {}
        yield from (f"{name} was published and is lost" for name in promised - kept.keys())
        yield from self._wrong_at_once(out, kept, situation)
        self._tally.found[_what(kept)] += 1
        blobs = published(out)
        self._tally.owner_torn += not _owner_is_whole(out)
        ours = self._expected[KIMI_MINI]
        try:
            with _boot("after"):
                convert(KIMI_MINI, out, tp=_TP, overwrite=situation == "overwrite")
        except Exception as error:
            yield f"the next run failed: {type(error).__name__}: {error}".replace(str(out), "OUT")
            return
        yield from wrong(out, ours)
        after = published(out)
        for name in blobs:
            if kept[name] == ours.get(name):
                self._tally.blobs_kept += 1
                if after.get(name) != blobs[name]:
                    yield f"{name} was right and was written again"

    def _wrong_at_once(self, out: Path, kept: dict[str, str], situation: str) -> Iterator[str]:
        """What has a final name is whole; a manifest tells of nothing that is not there."""
        sources = [KIMI_MINI] + [self._other] * (situation == "overwrite")
        for name, found in kept.items():
            if name == MANIFEST or WORK in name:  # or a probe, which is named alike
                continue
            if all(self._expected[source].get(name) != found for source in sources):
                yield f"{name} has its final name and other bytes"
        for name, entry in read_manifest(out).files.items() if MANIFEST in kept else ():
            if _entry(out / name) != (entry.bytes, entry.digest):
                yield f"the manifest tells of another {name}"


def _publishing(promised: set[str]) -> Any:
    """Take down which blobs were published, as far as the run knows."""
    real = BlobWriter.publish

    def publish(writer: BlobWriter) -> None:
        real(writer)
        promised.add(writer.planned.path)

    return patch.object(BlobWriter, "publish", publish)


@contextlib.contextmanager
def _boot(name: str) -> Iterator[None]:
    """What ran before the cut was on another boot, whose locks tell nothing: it is waited for,
    without a pause."""
    with (
        patch.object(lock, "_lock_seen_from", lambda _: name),
        patch.object(lock, "PACE", replace(lock.PACE, pause=lambda _: None)),
        patch.object(lock._log, "disabled", True),
    ):
        yield


def _owner_is_whole(out: Path) -> bool:
    path = out / WORK / lock.OWNER_NAME
    try:
        return not path.exists() or bool(json.loads(path.read_text()))
    except ValueError:
        return False


def _entry(path: Path) -> tuple[int, str] | None:
    """What a manifest has to say of a file; None where it is missing or no blob."""
    if not path.exists():
        return None
    try:
        raw = read_blob(path)[0].raw if path.suffix == ".safetensors" else path.read_bytes()
    except KconvertError:
        return None
    return path.stat().st_size, digest(raw)


def _what(kept: dict[str, str]) -> str:
    if MANIFEST in kept:
        return "a manifest"
    blobs = sum(name.endswith(".safetensors") for name in kept)
    return "blobs, no manifest" if blobs else "no blob"
