"""What a user is told. What can go wrong that a user caused or can mend: one class a kind, each
also the builtin it is; and what is waited for.

`str(error)` is one sentence that names file, tensor, expected and found, and what to do.
The command line maps each class to an exit code (`convert/cli/common.py`).
"""

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
    """`text` as a sentence can be shown: the names in it are of files that others wrote, may be
    long, and a terminal would obey what is not printable."""
    return _shortened(printable(_shortened(text)))


def printable(text: str) -> str:
    """`text` with everything escaped that is not printable, line ends too."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:600]} … {text[-290:]}"


class CheckpointError(KconvertError, ValueError):
    """The source is damaged, incomplete or contradicts itself."""


class UnsupportedError(KconvertError, ValueError):
    """The source or the options are sound but nothing here can carry them out."""


class OutputError(KconvertError, ValueError):
    """The output folder holds something this run must not touch, or is not an output at all."""


class UnavailableError(KconvertError, OSError):
    """Disk, permission or another run stands in the way; the same command may work later."""


@contextmanager
def said_if_slow(sentence: str, seconds: float = 1.0) -> Iterator[None]:
    """Log `sentence` as a warning, which goes to stderr, where the block takes longer."""
    timer = threading.Timer(seconds, _log.warning, ["%s", sentence])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
