"""The owner file that keeps two runs off one output, on any file system.

Created with O_EXCL, which holds where locks do not (flock does nothing on some network file
systems). It names host, pid and the process's start time, so that a run which died on this host
is told from one that lives, and is taken over.
"""

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from kconvert.convert.share import Share
from kconvert.layouts.errors import UnavailableError

OWNER_NAME = "owner"


@contextlib.contextmanager
def owned(work: Path, share: Share | None = None) -> Iterator[None]:
    """Own the work folder, or a share of it whose folder in it exists, while the block runs.

    Shares of one count work side by side, nothing else does. Raises UnavailableError where another
    run stands in the way: one that lives on this host, or any on another host.
    """
    path = work / (share.name if share else "") / OWNER_NAME
    mine = _take(path)
    try:
        # Only now, so that of two that start at once at least one sees the other.
        for other in (work / OWNER_NAME, *work.glob(f"*/{OWNER_NAME}")):
            sibling = share and other.parent.name.endswith(f"-of-{share.count}")
            if other != path and not sibling and other.exists():
                _refuse_living(other)
        yield
    finally:
        with contextlib.suppress(OSError):
            if path.read_text() == mine:  # somebody may have deleted it by hand, and begun
                path.unlink()


def _take(path: Path) -> str:
    pid = os.getpid()
    mine = json.dumps({"host": _host(), "pid": pid, "started": _started(pid)})
    # Between seeing that an owner is dead and replacing it, another run on this host could do the
    # same. Only runs on this host take over, so a lock of this host is enough.
    lock = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            _refuse_living(path)
            path.unlink()
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        with os.fdopen(fd, "w") as file:
            file.write(mine)
            file.flush()
            os.fsync(file.fileno())  # after a power cut it must still say who is dead
        return mine
    except FileExistsError:
        raise UnavailableError(f"{path} was just taken by another run: one at a time.") from None
    finally:
        os.close(lock)


def _refuse_living(path: Path) -> None:
    """Raise unless the owner named in `path` is a process of this host that is no more."""
    try:
        other = json.loads(path.read_text())
        there, pid, started = other["host"], int(other["pid"]), other["started"]
    except (ValueError, KeyError, TypeError):
        there, pid, started = "an unknown host", 0, None  # being written, or cut by a power loss
    if there == _host() and _started(pid) != started:
        return
    raise UnavailableError(
        f"{path} says that another run is at work here (pid {pid} on {there}): wait for it to end,"
        " or delete that file if it is dead."
    )


def _host() -> str:
    """This host, or the container in it: process ids of another one say nothing here."""
    return f"{socket.gethostname()}/{os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot, with the boot's id; None: no such one."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return f"{boot}/{stat.rpartition(')')[2].split()[19]}"
