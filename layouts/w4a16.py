"""w4a16: the plain order (`quantization.py`), sharded and fused; for plain kernels, the CPU, other
engines.

A matrix [N, K] of 4-bit codes stays int32 [N, K/8] (nibble j of word m is column 8m + j) with
scales [N, K/g]; 8-bit codes are int32 [N, K/4], whatever the layout's name says.
"""

from typing import Any

from numpy.typing import NDArray

from kconvert.layouts.layout import Layout
from kconvert.layouts.quantization import ZERO_POINTS_A_WORD, Role


class W4A16(Layout):
    """The plain order."""

    name = "w4a16"

    def constraint(self, n: int, k: int) -> str | None:
        """A word holds 8 columns, or 4; a word of zero points 8 rows."""
        a_word = 32 // self.quantization.bits
        if k % a_word:
            return f"{k} columns do not divide into words of {a_word}"
        if self.quantization.zero_point and n % ZERO_POINTS_A_WORD:
            return f"{n} rows do not divide into words of {ZERO_POINTS_A_WORD} zero points"
        return None

    def shape(self, role: Role, n: int, k: int) -> tuple[int, ...]:
        return self.quantization.plain_shape(role, n, k)

    def pack_into(
        self,
        role: Role,
        source: NDArray[Any],
        rows: range,
        columns: range,
        out: NDArray[Any],
        at: int,
    ) -> None:
        part = self.quantization.part(role, source, rows, columns)
        start = at // ZERO_POINTS_A_WORD if role == "zero_point" else at
        out[start : start + len(part)] = part

    def unpack(self, role: Role, packed: NDArray[Any]) -> NDArray[Any]:
        return packed
