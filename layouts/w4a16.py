"""w4a16: the checkpoint's own order, sharded and fused; for plain kernels, the CPU, other engines.

A matrix [N, K] stays int32 [N, K/8] (nibble j of word m is column 8m + j) with scales [N, K/g].
"""

from typing import Any

from numpy.typing import NDArray

from kconvert.layouts.layout import Layout
from kconvert.layouts.quantization import Role


class W4A16(Layout):
    """The source's order."""

    name = "w4a16"

    def constraint(self, n: int, k: int) -> str | None:
        """A word holds 8 columns."""
        return f"{k} columns do not divide into words of 8" if k % 8 else None

    def shape(self, role: Role, n: int, k: int) -> tuple[int, int]:
        return n, len(self._columns(role, range(k)))

    def pack_into(
        self,
        role: Role,
        source: NDArray[Any],
        rows: range,
        columns: range,
        out: NDArray[Any],
        at: int,
    ) -> None:
        stored = self._columns(role, columns)
        out[at : at + len(rows)] = source[rows.start : rows.stop, stored.start : stored.stop]

    def unpack(self, role: Role, packed: NDArray[Any]) -> NDArray[Any]:
        return packed

    def _columns(self, role: Role, columns: range) -> range:
        """The stored columns, words or scales, that hold these columns of the matrix."""
        if role == "code":
            return range(columns.start // 8, columns.stop // 8)
        return self.quantization.groups(columns)
