"""The layouts by name: one module each, all with the functions that `Layout` lists."""

from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts import marlin, w4a16
from kconvert.layouts.errors import UnsupportedError


class Layout(Protocol):
    """A layout module: where the codes and scales of a matrix [n, k] lie."""

    NAME: str

    def constraint(self, n: int, k: int) -> str | None:
        """Why a matrix cannot be stored, or None."""

    def weight_shape(self, n: int, k: int) -> tuple[int, int]:
        """Shape in int32 words."""

    def scale_shape(self, n: int, groups: int) -> tuple[int, int]:
        """Shape of the scales."""

    def pack_weight_into(
        self,
        source: NDArray[np.int32],
        rows: range,
        columns: range,
        out: NDArray[np.int32],
        at: int,
    ) -> None:
        """Pack a part of a matrix as the rows from `at` of a fused one."""  # fmt: skip

    def pack_scales_into(
        self,
        source: NDArray[np.generic],
        rows: range,
        groups: range,
        out: NDArray[np.generic],
        at: int,
    ) -> None:
        """The same for its scales."""  # fmt: skip

    def unpack_weight(self, packed: NDArray[np.int32]) -> NDArray[np.int32]:
        """Back to compressed-tensors' order, by arithmetic of its own."""

    def unpermute_scales(self, permuted: NDArray[np.generic]) -> NDArray[np.generic]:
        """Back to compressed-tensors' order, by arithmetic of its own."""


_LAYOUTS = {module.NAME: cast(Layout, module) for module in (marlin, w4a16)}
NAMES = tuple(_LAYOUTS)


def layout_named(name: str) -> Layout:
    """The layout called `name`; UnsupportedError with the known names otherwise."""
    if not isinstance(name, str) or name not in _LAYOUTS:
        raise UnsupportedError(f"layout {name!r} is unknown; known are {', '.join(NAMES)}.")
    return _LAYOUTS[name]
