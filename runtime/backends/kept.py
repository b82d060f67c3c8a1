"""A cache of arrays that are slow to make and large to keep, bounded in bytes."""

from collections.abc import Callable, Hashable
from typing import Any

from numpy.typing import NDArray

Arrays = tuple[NDArray[Any], ...]


class Kept:
    """Arrays by key. If all together would pass `most` bytes, those used longest ago are given up.
    One entry alone may be larger."""

    def __init__(self, most: int) -> None:
        self._most, self.nbytes = most, 0
        self._entries: dict[Hashable, Arrays] = {}  # in the order of their last use

    def get(self, key: Hashable, make: Callable[[], Arrays]) -> Arrays:
        """The arrays of `key`, made if they are not here."""
        arrays = self._entries.pop(key, None)
        if arrays is None:
            arrays = make()
            self.nbytes += _size(arrays)
            while self._entries and self.nbytes > self._most:
                self.nbytes -= _size(self._entries.pop(next(iter(self._entries))))
        self._entries[key] = arrays
        return arrays


def _size(arrays: Arrays) -> int:
    return sum(array.nbytes for array in arrays)
