"""How weights are quantized, whatever format a checkpoint says it in."""

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

# What a stored tensor is to the matrix it belongs to.
Role = Literal["code", "scale", "zero_point", "bias"]


class Quantization(NamedTuple):
    """Integer codes of `bits` bits, `group_size` columns a scale (None: a row has one). Without
    zero points a code c means (c − 2^(bits−1)) · scale."""

    group_size: int | None
    bits: int = 4
    zero_point: bool = False

    def __str__(self) -> str:
        return f"group_size {self.group_size}" if self.group_size else "channelwise scales"

    def groups(self, columns: range) -> range:
        """The scales of a row that belong to its columns `columns` (whole groups)."""
        if self.group_size is None:
            return range(1)
        return range(columns.start // self.group_size, columns.stop // self.group_size)


def dequantize(codes: NDArray[np.int8], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Signed codes int8 [N, K] (the nibble − 8) times their scales float32 [N, G] → float32 [N, K],
    exact for 4-bit codes and bf16 scales."""
    group = codes.shape[1] // scales.shape[1]
    values: NDArray[Any] = codes.astype(np.float32) * np.repeat(scales, group, axis=1)
    return values
