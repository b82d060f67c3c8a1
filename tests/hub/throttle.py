"""A bandwidth that all connections share."""

import threading
import time

LARGEST = 1 << 18
PIECES_PER_SECOND = 50  # small pieces make a smooth rate


class Throttle:
    """Hands out slots on one clock: a connection may send a piece when its slot begins."""

    def __init__(self) -> None:
        self._rate: float | None = None
        self._lock = threading.Lock()
        self._free_at = 0.0

    @property
    def rate(self) -> float | None:
        """Bytes per second, None for no limit; may change at any time."""
        return self._rate

    @rate.setter
    def rate(self, rate: float | None) -> None:
        with self._lock:
            self._rate = rate
            self._free_at = 0.0  # slots handed out at the old rate say nothing about the new one

    def piece(self) -> int:
        """How many bytes to send at once."""
        rate = self._rate
        return LARGEST if rate is None else max(1, min(LARGEST, int(rate / PIECES_PER_SECOND)))

    def wait_for(self, count: int) -> float:
        """Seconds to wait before sending so many bytes."""
        with self._lock:
            if self._rate is None:
                return 0.0
            now = time.monotonic()
            begins = max(now, self._free_at)
            self._free_at = begins + count / self._rate
            return begins - now
