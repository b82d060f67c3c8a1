"""Whether the other ranks of a team on GPUs are still there.

A step waits for them on the device, and the host waits for the step: if one has died, nothing ends
that wait, and no error is raised. So their processes are watched, on the machine they share.
"""

import atexit
import os
import select
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kconvert.layouts.errors import LostProcessError

ENDED = "another rank has ended, what it said tells why"
_GRACE = 0.05  # seconds: a rank that ended in good order left nothing to wait for
_UNAVAILABLE = 3  # the exit code of UnavailableError


def process_id() -> tuple[int, int, int]:
    """What identifies this process: the machine's boot, the namespace of process ids, the id."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", "")[:15]
    return int(boot, 16), os.stat("/proc/self/ns/pid").st_ino, os.getpid()


class Watch:
    """Ends this process, with a sentence, when it waits for one of `others` that has ended."""

    def __init__(self, others: Sequence[int]) -> None:
        """`others`: process ids. Raises OSError if the system cannot watch them."""
        self._inside, self._entered, self._ended = False, 0, False
        self._files = [os.pidfd_open(other) for other in others]
        threading.Thread(target=self._watch, name="kconvert-watch", daemon=True).start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around whatever waits for the others. Raises LostProcessError if one had ended before."""
        self._inside, self._entered = True, self._entered + 1
        try:
            if self._ended:
                raise LostProcessError(f"{ENDED}.")
            yield
        finally:
            self._inside = False

    def _watch(self) -> None:
        poll = select.poll()
        for file in self._files:
            poll.register(file, select.POLLIN)
        poll.poll()
        self._ended = True
        entered = self._entered
        time.sleep(_GRACE)
        if self._inside and self._entered == entered:
            print(f"kconvert: {ENDED}.", file=sys.stderr)
            leave()


def watch(processes: Sequence[tuple[int, ...]]) -> Watch | None:
    """A watch over all of `processes` but this one; None if they do not share a machine, or if the
    system cannot watch them."""
    mine = process_id()
    if any(process[:2] != mine[:2] for process in processes):
        return None
    try:
        return Watch([process[2] for process in processes if process != mine])
    except (AttributeError, OSError):
        return None


def leave_at_exit() -> None:
    """Let this process end without closing NCCL and CUDA, which would wait for the lost rank."""
    atexit.register(leave)


def leave() -> None:
    """End this process now, with the exit code of UnavailableError."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(_UNAVAILABLE)
