"""Does converting hide behind downloading? At 0.2 GB/s the whole may take 1.05 times as long as
the download and the conversion of one shard do, and 1.5 GiB of private memory."""

import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hub.server import Hub, environment
from hub.throttle import Throttle
from survive.runs import Case, finish, report, start

from kconvert.convert.synth.write import synth

BANDWIDTH = 0.2e9
BUFFERED = 0.1  # seconds
MOST_RATIO = 1.05
MOST_PRIVATE = 3 << 29
_REPO = "test/layers"
_DOWNLOAD = """
import sys, huggingface_hub as hub
hub.snapshot_download(sys.argv[1], local_dir=sys.argv[2], allow_patterns="*.safetensors")
"""


def overlap(folder: Path, layers: int, experts: int, rounds: int = 1) -> dict[str, Any]:
    """Convert so many layers of K2.6 with so many experts each; medians of `rounds`."""
    begun, source = time.monotonic(), folder / "source"
    shards = synth(source, "k2.6", layers=range(1, layers + 1), experts=experts)
    nbytes = sum(path.stat().st_size for path in shards)
    with Hub() as hub:
        hub.throttle = _Link()
        hub.bandwidth = BANDWIDTH
        repo = hub.add_repo(_REPO, source)
        repo.info(repo.branches["main"], blobs=True)  # hashed once, before anything is timed
        of_client = environment(hub.url, folder / "home")
        options = "--tp", "8", "--layers"
        one = Case(str(source), (*options, "1"))
        every = Case(_REPO, (*options, f"1-{layers}"))
        times: dict[str, list[float]] = {"one_shard": [], "download": [], "whole": []}
        private, loads = 0, []
        for _ in range(rounds):
            loads.append(round(os.getloadavg()[0], 2))
            seconds, _ = _converted(one, folder / "out", of_client)
            times["one_shard"].append(seconds)
            times["download"].append(_timed(lambda: _download(of_client, folder / "plain")))
            _forget(folder / "plain")
            seconds, peak = _converted(every, folder / "out", of_client)
            times["whole"].append(seconds)
            private = max(private, peak)
    middle = {name: statistics.median(seconds) for name, seconds in times.items()}
    ratio = middle["whole"] / (middle["download"] + middle["one_shard"])
    against_limit = middle["whole"] / (nbytes / BANDWIDTH + middle["one_shard"])
    failures = [f"{ratio:.3f} times as long"] * (ratio > MOST_RATIO)
    failures += [f"{private:,} bytes of private memory"] * (private > MOST_PRIVATE)
    return report(
        "overlap", begun, layers=layers, experts=experts, shard_bytes=nbytes,
        bytes_per_second=BANDWIDTH, rounds=rounds, load_before=loads,
        seconds_of={name: [round(s, 2) for s in seconds] for name, seconds in times.items()},
        download_at_the_limit=round(nbytes / BANDWIDTH, 2), ratio=round(ratio, 4),
        ratio_to_the_limit=round(against_limit, 4), most_ratio=MOST_RATIO,
        peak_private_bytes=private, most_private_bytes=MOST_PRIVATE, failures=failures,
    )  # fmt: skip


def _converted(case: Case, out: Path, of_client: Mapping[str, str]) -> tuple[float, int]:
    """Seconds and peak private bytes of a process that converts; its output is deleted."""
    begun = time.monotonic()
    process = start(case, out, of_client)
    memory = _Private(process.pid)
    ended = finish(process, begun)
    memory.stop()
    if ended.code != 0:
        raise RuntimeError(f"ended with {ended.code}: {ended.err[-2000:]}")
    _forget(out)
    return ended.seconds, memory.peak


def _download(of_client: Mapping[str, str], folder: Path) -> None:
    """The same bytes with the plain client, in a process as ours is."""
    subprocess.run([sys.executable, "-c", _DOWNLOAD, _REPO, folder], env=of_client, check=True)


def _timed(work: Callable[[], None]) -> float:
    begun = time.monotonic()
    work()
    return time.monotonic() - begun


def _forget(folder: Path) -> None:
    """Deleted and written back, so that the next measurement pays for itself alone."""
    shutil.rmtree(folder)
    os.sync()


class _Link(Throttle):
    """What is sent late, as this machine has other work, catches up out of the link's buffers; so
    that one connection can fill it, as one on a real network of that rate does."""

    def wait_for(self, count: int) -> float:
        with self._lock:
            now = time.monotonic()
            begins = max(now - BUFFERED, self._free_at)
            self._free_at = begins + count / BANDWIDTH
            return max(0.0, begins - now)


class _Private:
    """Samples another process's private memory until it ends."""

    def __init__(self, pid: int) -> None:
        self.peak, self._pid, self._over = 0, pid, threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(0.02):
            try:
                lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
            except OSError:
                return
            found = [line.split()[1] for line in lines if line.startswith("RssAnon")]
            self.peak = max(self.peak, *(1024 * int(kilobytes) for kilobytes in found), 0)
