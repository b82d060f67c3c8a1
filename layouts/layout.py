"""What a layout is: where the codes and scales of a matrix lie in a blob."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from numpy.typing import NDArray

from kconvert.layouts.errors import UnsupportedError
from kconvert.layouts.quantization import Quantization, Role


class Layout(ABC):
    """The order of a matrix [n, k] of one quantization. `pack_into` and `unpack` are inverses that
    share no index arithmetic: one is the proof of the other.

    Source arrays are codes int32 [N, K/8] and scales [N, G] as compressed-tensors orders them, the
    scales as their bits in an unsigned dtype.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1  # of the bytes: it rises when they change, and fingerprints with it

    def __init__(self, quantization: Quantization) -> None:
        """Raises UnsupportedError where this layout has no order for such codes."""
        if quantization.bits != 4 or quantization.zero_point:
            zero_points = " with zero points" if quantization.zero_point else ""
            raise UnsupportedError(
                f"layout {self.name} has no order for {quantization.bits}-bit codes{zero_points};"
                " only symmetric INT4 can be converted."
            )
        self.quantization = quantization

    @abstractmethod
    def constraint(self, n: int, k: int) -> str | None:
        """Why a matrix [n, k] cannot be stored, or None."""

    @abstractmethod
    def shape(self, role: Role, n: int, k: int) -> tuple[int, int]:
        """Shape of what is stored of a matrix [n, k]: codes in int32 words, scales in elements."""

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
        or where tiles would be cut or lie outside.
        """

    @abstractmethod
    def unpack(self, role: Role, packed: NDArray[Any]) -> NDArray[Any]:
        """What `pack_into` made, back in compressed-tensors' order."""
