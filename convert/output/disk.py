"""Calls to the file system whose errors name a path, and what some file systems cannot do."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

# How file systems say that they lack something (FUSE, CIFS and other network ones).
UNSUPPORTED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add `path` to the system's errors on an open file, which do not say which file it is."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, if its file system can."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        with naming(folder):
            os.fsync(fd)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(fd)


def read_file(path: Path) -> bytes:
    """All of a small file."""
    with naming(path):
        return path.read_bytes()
