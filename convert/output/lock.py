"""The owner file that keeps two runs off one output, on one host or several.

It holds a token of the run that made it. Whether that run lives is told by the lock (flock) that
it holds on the file, if that lock can be seen: on the same boot of the same host, containers
included, and through the same mount. Anywhere else, and if flock does nothing, a counter in the
file tells: a living owner raises it every ten seconds.

On a network file system nothing keeps an owner that was suspended, taken for dead and replaced from
waking up. So a run reads its token again before each rename (`Owner.check`), and whoever takes an
output over first deletes all temporary files: what the other run was about to rename is gone, and
it cannot make another without looking at its token.
"""

import _thread
import contextlib
import fcntl
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from kconvert.convert.output.disk import naming
from kconvert.convert.output.runlog import LOG_NAME
from kconvert.convert.share import Share
from kconvert.layouts.errors import LockedOutputError, one_line

OWNER_NAME = "owner"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pace:
    """How often an owner shows that it lives, and how long others wait for that.

    Looks are counted, not seconds: what holds the waiter up (a server that does not answer, a
    suspended machine) holds the owner up as well, and must not count as its silence.
    """

    beat: float = 10.0  # seconds
    looks: int = 60
    between: float = 1.0  # seconds between two looks
    pause: Callable[[float], object] = time.sleep


PACE = Pace()


class Owner:
    """The right to change an output, or one share of it, until `release`."""

    def __init__(self, path: Path) -> None:
        """Create the file `path`; FileExistsError if it is there."""
        self.token = secrets.token_hex(8)
        self._path = path
        self._fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        self._lock_seen_from = _lock_seen_from(self._fd) if _lock(self._fd) else None
        self._beats = 0
        self._of_main_thread = threading.current_thread() is threading.main_thread()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="owner", daemon=True)
        try:
            self._write()
            self._thread.start()
        except BaseException:
            os.close(self._fd)
            path.unlink(missing_ok=True)
            raise

    def check(self) -> None:
        """Raise UnavailableError unless the output is still this run's."""
        if not self._ours():
            raise LockedOutputError(
                f"{self._path} is not this run's any more: another run took the output over when"
                " this one gave no sign of life, or somebody deleted the file; what is published"
                " stays: run the same command again when no other run is at work."
            )

    def release(self) -> None:
        """Give the output up."""
        self._over.set()
        self._thread.join()
        try:
            with contextlib.suppress(OSError):  # it will be found dead
                if self._ours():  # and stays so for other runs of this host until it is closed
                    self._path.unlink()
        finally:
            os.close(self._fd)

    def _ours(self) -> bool:
        content = _read(self._path)
        return content is not None and _parsed(content).get("token") == self.token

    def _beat(self) -> None:
        while not self._over.wait(PACE.beat):
            with contextlib.suppress(OSError):  # the next one may do
                if not self._ours():
                    if self._of_main_thread:  # which may be waiting for a download
                        _thread.interrupt_main()
                    return
                self._write()

    def _write(self) -> None:
        """Write in place, always the same length; if another run has taken over, this goes into a
        file that has no name any more."""
        self._beats += 1
        table = {
            "token": self.token,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "lock_seen_from": self._lock_seen_from,  # null: from nowhere
            "beats": f"{self._beats:012d}",
        }
        with naming(self._path):
            os.pwrite(self._fd, json.dumps(table).encode(), 0)
            os.fsync(self._fd)  # or other hosts do not see it


@contextlib.contextmanager
def owned(work: Path, share: Share | None = None) -> Iterator[Owner]:
    """Own the work folder, or a share's folder in it, which must exist, while the block runs.

    Shares of the same count work side by side, nothing else does. Raises LockedOutputError if
    another run lives; waits if that is not known.
    """
    owner = _take(work, share)
    try:
        yield owner
    finally:
        owner.release()


def _take(work: Path, share: Share | None) -> Owner:
    path = work / (share.name if share else "") / OWNER_NAME
    silent: dict[Path, bytes] = {}
    while True:
        with _looking(work):
            unknown = {}
            for other in (path, *_rivals(work, share)):
                content = _read(other)
                if content is None:
                    continue
                lives = False if silent.get(other) == content else _lives(other, content)
                if lives:
                    _refuse(other, content)
                elif lives is None:
                    unknown[other] = content
                else:
                    other.unlink(missing_ok=True)
            if not unknown:
                return _created(path, work, share)
        silent = _watch(unknown)


def _created(path: Path, work: Path, share: Share | None) -> Owner:
    """Own `path`; runs of other hosts may be doing the same now."""
    try:
        owner = Owner(path)
    except FileExistsError:
        raise LockedOutputError(f"{path} was just taken by another run: one at a time.") from None
    # Only now, so that of two that start at once at least one sees the other.
    for other in _rivals(work, share):
        if (content := _read(other)) is not None:
            owner.release()
            _refuse(other, content)
    return owner


def _rivals(work: Path, share: Share | None) -> list[Path]:
    """The other owner files that keep this run out: all but those of shares of the same count."""
    siblings = f"-of-{share.count}" if share else None
    of_shares = [
        path for path in sorted(work.glob(f"share-*/{OWNER_NAME}"))
        if not (siblings and path.parent.name.endswith(siblings))
    ]  # fmt: skip
    return [work / OWNER_NAME, *of_shares] if share else of_shares


def _watch(unknown: dict[Path, bytes]) -> dict[Path, bytes]:
    """Wait for a sign of life in owner files, and return those that gave none; UnavailableError
    if one did."""
    first, content = next(iter(unknown.items()))
    more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
    notice = (
        f"{first}{more} may be of a run that died ({_who(content)}): waiting for a sign of life,"
        f" {PACE.looks * PACE.between:.0f} s at most"
    )
    _log.warning("%s", one_line(notice))
    for _ in range(PACE.looks):
        PACE.pause(PACE.between)
        for path, before in list(unknown.items()):
            now = _read(path)
            if now is None:
                del unknown[path]
            elif now != before:
                _refuse(path, now)
        if not unknown:
            break
    return unknown


def _lives(path: Path, content: bytes) -> bool | None:
    """Whether the owner that wrote `content` lives; None if its lock does not tell."""
    try:
        fds = [os.open(path, os.O_RDWR) for _ in range(2)]
    except FileNotFoundError:
        return False
    try:
        here = _lock_seen_from(fds[0])
        if here is None or _parsed(content).get("lock_seen_from") != here:
            return None
        first, second = map(_lock, fds)
        if first is False:
            return True
        return False if first and second is False else None  # both got it: locks do nothing here
    finally:
        for fd in fds:
            os.close(fd)


def _lock(fd: int) -> bool | None:
    """Lock an open file if nobody else has; None if there are no locks here."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _lock_seen_from(fd: int) -> str | None:
    """From where a lock on an open file is seen: this boot and this mount of its file system, as
    two containers' mounts of a network file system need not know of each other's locks."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return f"{boot}/{os.fstat(fd).st_dev}"


@contextlib.contextmanager
def _looking(work: Path) -> Iterator[None]:
    """One run of this host at a time looks at owner files and changes them."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # if there are no locks, `Owner.check` has to do
            fd = os.open(work / LOG_NAME, os.O_CREAT | os.O_RDWR, 0o666)
            stack.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield


def _refuse(path: Path, content: bytes) -> NoReturn:
    raise LockedOutputError(
        f"{path} says that another run is at work here ({_who(content)}): wait for it to end."
    )


def _who(content: bytes) -> str:
    table = _parsed(content)
    return f"pid {table.get('pid', 'unknown')} on {table.get('host', 'an unknown host')}"


def _parsed(content: bytes) -> dict[str, object]:
    """An owner file; empty if it is being written, or was cut by a power loss."""
    try:
        table = json.loads(content)
    except ValueError:
        return {}
    return table if isinstance(table, dict) else {}


def _read(path: Path) -> bytes | None:
    """An owner file; opened again each time, as only then a network file system asks the server."""
    try:
        with naming(path):
            return path.read_bytes()
    except FileNotFoundError:
        return None
