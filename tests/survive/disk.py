"""What a power cut leaves of a folder, on a disk that keeps only what was synced.

Every call that changes the folder passes through here. A file is sure to hold what it held at its
last fsync; what was written since may be there, or in part, or be zeros. A folder is sure to list
what it listed at its last fsync; a name that came, went or was renamed since may be there or not,
each by itself. So every order in which a real disk may write is one of the draws.
"""

import contextlib
import os
import random
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PAGE = 4096
_CHANGE = ("ftruncate", "pwrite", "mkdir", "rename", "unlink", "rmdir", "fsync")
Call = tuple[str, int]  # such a call, counted from 1
Listing = dict[str, int]  # name → inode


class KilledError(BaseException):
    """The process is no more: no clean-up happens either."""


class Disk:
    """The folder `root`, which is empty or durable as it is now.

    `calls` counts them by name. Before call `cut_at`, `on_cut` is called; call `kill_at` and all
    that come later fail.
    """

    def __init__(self, root: Path) -> None:
        self.root = os.path.realpath(root)
        self.calls: Counter[str] = Counter()
        self.cut_at: Call | None = None
        self.kill_at: Call | None = None
        self.killed = False
        self.on_cut: Callable[[], None] = lambda: None
        self._lock = threading.RLock()
        self._open: dict[int, int] = {}  # inode → descriptor, held so that no number comes twice
        self._synced: dict[int, bytes] = {}  # of files
        self._listings: dict[int, list[Listing]] = {}  # of folders, since the last fsync
        self._look(durable=True)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Changes are seen while the block runs. `os` is one for all: one disk at a time."""
        real = {name: getattr(os, name) for name in (*_CHANGE, "open")}
        try:
            for name, call in real.items():
                setattr(os, name, self._seeing(name, call))
            yield
        finally:
            for name, call in real.items():
                setattr(os, name, call)

    def close(self) -> None:
        for fd in self._open.values():
            os.close(fd)

    def rebuild(self, target: Path, draw: random.Random) -> None:
        """Write into the new folder `target` what the disk may hold after a cut now."""
        with self._lock:
            self._look()
            self._rebuild(os.stat(self.root).st_ino, target, draw, {})

    def _seeing(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def seen(what: Any, *args: Any, **options: Any) -> Any:
            reads = name == "open" and not args[0] & (os.O_CREAT | os.O_TRUNC)
            if reads or not self._ours(what):
                return call(what, *args, **options)
            with self._lock:
                self._count(name)
                if name == "fsync":  # taken for done: the draws do not depend on a real one
                    return self._sync(os.fstat(what))
                result = call(what, *args, **options)
                if name not in ("pwrite", "ftruncate"):
                    self._look()
                return result

        return seen

    def _ours(self, what: Any) -> bool:
        path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else os.fspath(what)
        return f"{os.path.abspath(path)}/".startswith(f"{self.root}/")

    def _count(self, name: str) -> None:
        self.calls[name] += 1
        call = name, self.calls[name]
        if call == self.cut_at:
            self.on_cut()
        self.killed |= call == self.kill_at
        if self.killed:
            raise KilledError

    def _sync(self, status: os.stat_result) -> None:
        self._look()
        if stat.S_ISDIR(status.st_mode):
            self._listings[status.st_ino] = self._listings[status.st_ino][-1:]
        else:
            self._synced[status.st_ino] = self._content(status.st_ino)

    def _look(self, durable: bool = False) -> None:
        """Take in what every folder lists now; what is met for the first time was made since."""
        folders = [self.root]
        while folders:
            folder = folders.pop()
            with os.scandir(folder) as entries:
                listing = {entry.name: entry.inode() for entry in entries}
            for name, inode in listing.items():
                path = os.path.join(folder, name)
                if os.path.isdir(path):
                    folders.append(path)
                if inode not in self._open:
                    self._open[inode] = os.open(path, os.O_RDONLY)
                    if not os.path.isdir(path):
                        self._synced[inode] = self._content(inode) if durable else b""
            past = self._listings.setdefault(os.stat(folder).st_ino, [] if durable else [{}])
            if not past or past[-1] != listing:
                past.append(listing)

    def _content(self, inode: int) -> bytes:
        fd = self._open[inode]
        return os.pread(fd, os.fstat(fd).st_size, 0)

    def _rebuild(
        self, inode: int, target: Path, draw: random.Random, made: dict[int, Path]
    ) -> None:
        target.mkdir()
        past = self._listings[inode]
        for name in sorted({name for listing in past for name in listing}):
            child = draw.choice([listing.get(name) for listing in (past[0], past[-1], *past)])
            if child is None:
                continue
            if child in self._listings:
                self._rebuild(child, target / name, draw, made)
            elif child in made:  # under its old name and its new one
                os.link(made[child], target / name)
            else:
                made[child] = target / name
                made[child].write_bytes(self._torn(child, draw))

    def _torn(self, inode: int, draw: random.Random) -> bytes:
        old, new = self._synced[inode], self._content(inode)
        if old == new:
            return old
        match draw.randrange(5):
            case 0:
                return old
            case 1:
                return new
            case 2:
                return new[: draw.randrange(len(new) + 1)]
            case 3:  # the size is there, the rest of the bytes is not
                return new[: draw.randrange(len(new) + 1)].ljust(len(new), b"\0")
        old = old.ljust(len(new), b"\0")
        starts = range(0, len(new), PAGE)
        return b"".join(draw.choice((old, new))[at : at + PAGE] for at in starts)[: len(new)]
