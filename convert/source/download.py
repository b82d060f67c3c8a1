"""Shards on their way: the next one is downloaded while this one is converted.

At most WINDOW shards are held at once, more only if two neighbouring jobs need more. A shard is
taken from huggingface_hub's cache if it is there, and is then left alone; else it is downloaded
into the output's work folder and deleted when its last blob is published. No shard is converted
before its content has the hash that the Hub names.
"""

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from operator import contains
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from kconvert.convert.output.disk import naming
from kconvert.convert.progress import Meter
from kconvert.convert.source.local import stamp
from kconvert.convert.source.protocol import INCOMING, WINDOW
from kconvert.convert.source.repo import Repo
from kconvert.convert.source.retry import Patience, TransferError
from kconvert.layouts.checkpoint import Shard
from kconvert.layouts.errors import UnavailableError
from kconvert.layouts.header import read_header

_ATTEMPTS = 10  # without any progress: four minutes of pauses
_FAREWELL = 2.0  # seconds


class _StoppedError(Exception):
    """The run is over; nobody waits for this shard any more."""


class Arrivals:
    """The shards of each job of a run, which calls `take` and `release` in the jobs' order."""

    def __init__(
        self,
        repo: Repo,
        shards: dict[str, Shard],
        order: list[set[str]],
        work: Path,
        meter: Meter,
        keep: bool,
    ) -> None:
        """`order[i]`: what job i needs. `keep`: download into the cache instead, to stay."""
        self._repo, self._shards, self._meter, self._keep = repo, shards, meter, keep
        self._folder = work / INCOMING
        self._order = order
        needed = [(name, i) for i, names in enumerate(order) for name in sorted(names)]
        self._last = dict(needed)
        self._first: dict[str, int] = {}  # in the order of need
        for name, job in needed:
            self._first.setdefault(name, job)
        self._now = -1  # the job that runs
        self._held: set[str] = set()
        self._ours: dict[str, Path] = {}  # held and downloaded for this run: to be deleted
        self._stamps: dict[str, tuple[int, ...] | None] = {}  # from before they were checked
        self._arrived: dict[str, Future[Path]] = {}  # held; set when the content is right
        self._change = threading.Condition()
        self._stop = threading.Event()
        self._checker = ThreadPoolExecutor(1, thread_name_prefix="check")
        # Daemons do not keep an interrupted program waiting for a server.
        self._thread = threading.Thread(target=self._run, name="download", daemon=True)
        self._bar = _counting(meter, self._stop)
        self._patience = Patience(_ATTEMPTS, self._pause)

    def __enter__(self) -> Self:
        self._clear()
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._stop.set()
        with self._change:
            self._change.notify_all()
        self._checker.shutdown(wait=kind is None, cancel_futures=True)
        # On a failure it ends with the next bytes, and tidies up; but a server may say nothing.
        self._thread.join(None if kind is None else _FAREWELL)
        if kind is None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def path(self, shard: str) -> Path:
        """Where a taken shard lies."""
        return self._arrived[shard].result()

    def ready(self, job: int) -> bool:
        """Whether all shards of a job are there and right."""
        arrived = [self._arrived.get(shard) for shard in self._order[job]]
        return all(shard is not None and shard.done() for shard in arrived)

    def take(self, job: int) -> None:
        """Wait until all shards of a job are there and right.

        Raises UnavailableError if one cannot be fetched, OSErrors of the disk as they are.
        """
        with self._change:
            self._now = job
            self._change.notify_all()
        for shard in sorted(self._order[job]):
            with self._change:
                self._change.wait_for(partial(contains, self._arrived, shard))
            self._arrived[shard].result()

    def check(self, job: int) -> None:
        """Raise UnavailableError if something wrote to a job's shards since they were found right,
        such as a run that does not know yet that it lost the output."""
        for shard in self._order[job]:
            if _stamp(self.path(shard)) != self._stamps[shard]:
                raise UnavailableError(
                    f"{self.path(shard)} was changed by another program while it was being"
                    " read: run the same command again."
                )

    def release(self, job: int, forget: Callable[[str], object]) -> None:
        """Give up the shards that no later job needs, as this job's blobs are published."""
        done = [shard for shard in self._order[job] if self._last[shard] <= job]
        for shard in done:
            forget(shard)
            if shard in self._ours:
                self._ours.pop(shard).unlink(missing_ok=True)
        with self._change:
            self._held.difference_update(done)
            self._change.notify_all()

    def _run(self) -> None:
        for shard in self._first:
            with self._change:
                self._change.wait_for(partial(self._may_or_ends, shard))
                if self._stop.is_set():
                    return
                self._held.add(shard)
            arrived: Future[Path] = Future()
            try:
                path = self._get(shard)
                arrived = self._checker.submit(self._checked, shard, path)
            except BaseException as error:
                arrived.set_exception(error)
            with self._change:
                self._arrived[shard] = arrived
                self._change.notify_all()
            if self._stop.is_set() or (arrived.done() and arrived.exception() is not None):
                return

    def _may_or_ends(self, shard: str) -> bool:
        """Whether a shard may be fetched now, or the run is over."""
        room = len(self._held) < WINDOW or self._first[shard] <= self._now
        return room or self._stop.is_set()

    def _get(self, shard: str) -> Path:
        cached = self._repo.cached(shard)
        return cached if cached is not None else self._download(shard)

    def _download(self, shard: str, again: bool = False) -> Path:
        with self._meter.busy("download"):
            if self._keep:
                return self._repo.fetch(shard, self._bar, self._patience, again)
            self._folder.mkdir(parents=True, exist_ok=True)
            self._ours[shard] = self._repo.download(shard, self._folder, self._bar, self._patience)
            return self._ours[shard]

    def _checked(self, shard: str, first: Path) -> Path:
        """`first`, or if its content is not right the path of a new copy."""

        def attempt(number: int) -> Path:
            path = first if number == 0 else self._download(shard, again=True)
            self._stamps[shard] = _stamp(path)
            try:
                with self._meter.busy("check", self._shards[shard].size), naming(path):
                    self._repo.check(shard, path, self._go_on)
            except TransferError as error:
                if self._repo.offline:
                    raise UnavailableError(
                        f"{path} is damaged ({error}): delete it, and run again without"
                        " HF_HUB_OFFLINE."
                    ) from None
                if shard in self._ours:
                    path.unlink()
                raise
            if read_header(path).raw != self._shards[shard].header:
                raise UnavailableError(
                    f"{self._repo.name}, {shard}: its header was read wrong before; run the same"
                    " command again."
                )
            return path

        return Patience(pause=self._pause)(f"{self._repo.name}, {shard}", attempt)

    def _pause(self, seconds: float) -> None:
        self._stop.wait(seconds)
        self._go_on()

    def _go_on(self) -> None:
        if self._stop.is_set():
            raise _StoppedError

    def _clear(self) -> None:
        """Delete what an earlier run left and this one cannot use."""
        usable = {self._repo.part(self._folder, shard) for shard in self._first}
        usable |= {self._folder / shard for shard in self._first}
        for path in [path for path in self._folder.rglob("*") if not path.is_dir()]:
            if path not in usable:
                path.unlink()


def _stamp(path: Path) -> tuple[int, ...] | None:
    """`stamp`, or None if the file is gone."""
    try:
        return stamp(path)
    except FileNotFoundError:
        return None


def _counting(meter: Meter, stop: threading.Event) -> type[Any]:
    """A tqdm class that shows nothing, counts, and breaks a download off when told to."""

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            if stop.is_set():
                raise _StoppedError
            meter.add("download", int(n or 0))
            return None

    return Bar
