"""What a user is told: the errors that a user caused or can mend, and what a slow step is doing.

Four classes say whose fault it is: the source's, the request's, the output's, the machine's. The
classes derived from them are what a program may want to tell apart. Each is also the builtin that
it specializes. `str(error)` is one sentence that names file, tensor, expected and found, and what
to do. The command line maps the classes to exit codes (`EXIT_CODES` in convert/cli/common.py).
"""

import errno
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_MOST_CHARACTERS = 900
_log = logging.getLogger(__name__)


class KconvertError(Exception):
    """An expected failure; its text is shown to the user as it is."""

    def __str__(self) -> str:
        return one_line(super().__str__())


def one_line(text: str) -> str:
    """`text` made safe to show: the names in it come from files that others wrote; they may be
    long, and hold control characters that a terminal would obey."""
    return _shortened(printable(_shortened(text)))


def printable(text: str) -> str:
    """`text` with everything that is not printable escaped, line ends included."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:600]} … {text[-290:]}"


class CheckpointError(KconvertError, ValueError):
    """The source is damaged, incomplete or contradicts itself."""


class MissingFileError(CheckpointError, FileNotFoundError):
    """A file that is needed is not there: get it, or choose layers that do not need it."""


class TruncatedFileError(CheckpointError, EOFError):
    """A file ends before what its header says: download it again."""


class ChangedFileError(CheckpointError):
    """A file does not match its digest or hash, or was changed since it was last looked at."""


class UnsupportedError(KconvertError, ValueError):
    """The source and the options are sound, but not supported."""


class OptionError(UnsupportedError):
    """An option's value is not valid, or not for this model: another may be."""


class OutputError(KconvertError, ValueError):
    """The output folder holds something this run must not touch, or is not an output at all."""


class UnfinishedOutputError(OutputError, FileNotFoundError):
    """The folder is no output, or not a finished one: run the conversion (again)."""


class OccupiedOutputError(OutputError, FileExistsError):
    """The folder holds something else: choose another, or replace what is there."""


class NewerFormatError(OutputError):
    """A later version wrote it: use that version."""


class UnavailableError(KconvertError, OSError):
    """Disk, network, permission or another run stands in the way; the same command may work
    later."""


class NoSpaceError(UnavailableError):
    """A disk has too little room; `errno` is ENOSPC."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.errno = errno.ENOSPC


class LockedOutputError(UnavailableError, BlockingIOError):
    """Another run is at work in the output: wait for it to end."""


class HubError(UnavailableError, ConnectionError):
    """The Hub cannot be reached, or does not give what it should."""


class AccessError(UnavailableError, PermissionError):
    """The Hub wants a token that may read the repository."""


class LostProcessError(UnavailableError, ChildProcessError):
    """A worker or another rank has ended before its work was done."""


class DeviceMemoryError(UnavailableError, MemoryError):
    """The GPU's memory is too small, or used up."""


@contextmanager
def said_if_slow(sentence: str, seconds: float = 1.0) -> Iterator[None]:
    """Log `sentence` as a warning, which goes to stderr, if the block takes longer."""
    timer = threading.Timer(seconds, _log.warning, ["%s", sentence])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
