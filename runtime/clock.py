"""Where a generation's time goes."""

import time


class Clock:
    """Adds the seconds since its last call to a named part."""

    def __init__(self, parts: dict[str, float]) -> None:
        self._parts, self._last = parts, time.perf_counter()

    def __call__(self, part: str) -> None:
        now = time.perf_counter()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._last
        self._last = now
