"""What is waited for, said where it takes long: nothing is silent for minutes."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_log = logging.getLogger(__name__)


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
