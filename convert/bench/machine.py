"""What a figure depends on, and what a measurement needs: the machine, time, memory."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kconvert.convert.doctor import probe


def machine() -> dict[str, Any]:
    """The machine, its libraries and the date: what a figure depends on."""
    cpu = probe.cpu()
    return {
        "cpu": cpu["model"],
        "cores": cpu["cores"],
        "numba": version("numba"),
        "numpy": version("numpy"),
        "date": time.strftime("%Y-%m-%d"),
    }


class PeakMemory:
    """Samples the private memory of this process and its children every 5 ms: `start` and `peak` in
    bytes."""

    def __enter__(self) -> "PeakMemory":
        self.start = self.peak = _private_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(0.005):
            self.peak = max(self.peak, _private_bytes())


def _private_bytes() -> int:
    """What this process and its children hold. What they share counts once, which is slower to
    find out."""
    children = multiprocessing.active_children()
    if children:
        pids = [os.getpid(), *(child.pid for child in children)]
        return sum(_anonymous(pid) for pid in pids if pid is not None)
    status = Path("/proc/self/status").read_text()
    kilobytes = next(s for s in status.splitlines() if s.startswith("RssAnon")).split()[1]
    return 1024 * int(kilobytes)


def _anonymous(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return sum(1024 * int(line.split()[1]) for line in fields if line.startswith("Pss_Anon"))


def seconds_of(work: Callable[[], object]) -> float:
    """How long `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
