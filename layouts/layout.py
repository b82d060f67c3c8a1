"""What a layout is: where the codes and scales of a matrix lie in a blob."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from numpy.typing import NDArray

from kconvert.layouts.errors import UnsupportedError
from kconvert.layouts.quantization import Quantization, Role

# (scheme, bits, zero points); Marlin's kernels call them kU4B8, kU8B128, kU4 and kFE2M1f.
_KINDS = {("int", 4, False), ("int", 8, False), ("int", 4, True), ("mxfp4", 4, False)}


class Layout(ABC):
    """The order of a matrix [n, k] of one quantization. `pack_into` and `unpack` are inverses that
    share no index arithmetic: one is the proof of the other.

    Source arrays are plain (`quantization.py`), floats as their bits in an unsigned dtype.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1  # of the bytes: raised when they change, which changes fingerprints

    def __init__(self, quantization: Quantization) -> None:
        """Raises UnsupportedError if this layout has no order for such codes."""
        if (quantization.scheme, quantization.bits, quantization.zero_point) not in _KINDS:
            raise UnsupportedError(
                f"layout {self.name} has no order for {quantization.text}: known are INT4 and INT8,"
                " symmetric, INT4 with zero points, and MXFP4."
            )
        self.quantization = quantization

    @abstractmethod
    def constraint(self, n: int, k: int) -> str | None:
        """Why a matrix [n, k] cannot be stored, or None."""

    @abstractmethod
    def shape(self, role: Role, n: int, k: int) -> tuple[int, ...]:
        """Shape of what is stored of a matrix [n, k]: codes and zero points in int32 words, scales
        and biases in elements."""

    @abstractmethod
    def pack_into(
        self,
        role: Role,
        source: NDArray[Any],
        rows: range,
        columns: range,
        out: NDArray[Any],
        at: int,
    ) -> None:
        """Pack `rows` × `columns` of a source matrix into `out`, as its rows from `at` on.

        `out` has the `shape` of the whole, maybe fused, matrix. Raises ValueError for other arrays,
        or if tiles would be cut or lie outside.
        """

    @abstractmethod
    def unpack(self, role: Role, packed: NDArray[Any]) -> NDArray[Any]:
        """What `pack_into` made, back in plain order."""

    def restore(self, role: Role, packed: NDArray[Any]) -> NDArray[Any]:
        """The same as `unpack`, for callers that need speed and not a proof."""
        return self.unpack(role, packed)
