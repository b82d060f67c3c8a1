"""Standard streams that are closed, or whose reader goes away: neither changes what a command does
nor its exit code."""

import io
import os
import sys
from typing import Any


class _Stream(io.FileIO):
    """The descriptor of a standard stream. Output that nobody reads any more is dropped, and so is
    what cannot be written to stderr, as nobody could be told."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if not isinstance(error, BrokenPipeError) and self.fileno() != 2:
                error.filename = "standard output"
                raise
            return memoryview(data).nbytes


def hold_streams() -> None:
    """Replace stdin, stdout and stderr with streams that do not fail when nobody reads them.

    A closed one becomes /dev/null: if not, the next file that is opened would get its number, and a
    library that prints would write into a blob.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
    for fd, name in (1, "stdout"), (2, "stderr"):
        old = getattr(sys, name)
        new = io.TextIOWrapper(
            io.BufferedWriter(_Stream(fd, "w", closefd=False)),
            encoding=old.encoding if old else "utf-8",
            line_buffering=fd == 2 or bool(old and (old.line_buffering or old.write_through)),
        )
        setattr(sys, name, new)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 (as long as the process)
