"""How weights are quantized, whatever a checkpoint's format; and their plain order.

The plain order of a matrix [N, K], which formats give and layouts take, is compressed-tensors': a
code of b bits at row n, column k is bits b·(k mod 32/b) of word k div 32/b, int32 [N, K·b/32];
scales [N, G], as their bits; zero points int32 [N/8, G], that of row n in nibble n mod 8 of word
n div 8; biases [N].
"""

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

# What a stored tensor is to the matrix it belongs to.
Role = Literal["code", "scale", "zero_point", "bias"]
Scheme = Literal["int", "mxfp4"]
SCHEMES: tuple[Scheme, ...] = ("int", "mxfp4")
ZERO_POINTS_A_WORD = 8
# Twice the value of an MXFP4 code (FP4 E2M1): of 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign
# (OCP Microscaling Formats 1.0, 5.3.3).
_TWICE_FP4 = np.array([s * m for s in (1, -1) for m in (0, 1, 2, 3, 4, 6, 8, 12)], np.int8)


class Quantization(NamedTuple):
    """Codes of `bits` bits, `group_size` columns a scale (None: a row has one).

    `scheme` "int": integers; without zero points a code c means (c − 2^(bits−1)) · scale, with them
    (c − z) · scale. "mxfp4": 4-bit floats (E2M1) times 2^(scale byte − 127).
    """

    group_size: int | None
    bits: int = 4
    zero_point: bool = False
    scheme: Scheme = "int"
    bias: bool = False  # the matrices have biases beside them, not quantized

    def __str__(self) -> str:
        return f"group_size {self.group_size}" if self.group_size else "channelwise scales"

    @property
    def text(self) -> str:
        """For a person: INT4, symmetric, group_size 32."""
        if self.scheme == "mxfp4":
            return f"MXFP4, {self}"
        return f"INT{self.bits}, {'with zero points' if self.zero_point else 'symmetric'}, {self}"

    @property
    def roles(self) -> tuple[Role, ...]:
        """What is stored of a matrix, in this order."""
        roles: list[Role] = ["code", "scale"]
        if self.zero_point:
            roles.append("zero_point")
        if self.bias:
            roles.append("bias")
        return tuple(roles)

    def words(self, columns: range) -> range:
        """The words of a row that hold its columns `columns` (whole words)."""
        a_word = 32 // self.bits
        return range(columns.start // a_word, columns.stop // a_word)

    def groups(self, columns: range) -> range:
        """The scales of a row that belong to its columns `columns` (whole groups)."""
        if self.group_size is None:
            return range(1)
        return range(columns.start // self.group_size, columns.stop // self.group_size)

    def part(self, role: Role, plain: NDArray[Any], rows: range, columns: range) -> NDArray[Any]:
        """The part of a matrix's `plain` array that belongs to some rows and columns of it."""
        if role == "bias":
            return plain[rows.start : rows.stop]
        if role == "zero_point":
            rows = range(rows.start // ZERO_POINTS_A_WORD, rows.stop // ZERO_POINTS_A_WORD)
        stored = self.words(columns) if role == "code" else self.groups(columns)
        return plain[rows.start : rows.stop, stored.start : stored.stop]

    def plain_shape(self, role: Role, n: int, k: int) -> tuple[int, ...]:
        """The shape of a matrix's plain array."""
        if role == "bias":
            return (n,)
        if role == "code":
            return n, len(self.words(range(k)))
        rows = n // ZERO_POINTS_A_WORD if role == "zero_point" else n
        return rows, len(self.groups(range(k)))


def unpack_words(words: NDArray[np.int32], bits: int) -> NDArray[np.uint8]:
    """Plain words int32 [N, K·bits/32] → codes uint8 [N, K], low bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = words.view(np.uint32)[:, :, None] >> shifts & np.uint32((1 << bits) - 1)
    return codes.astype(np.uint8).reshape(len(words), -1)


def unpack_zero_points(words: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Plain words int32 [N/8, G] → zero points uint8 [N, G]."""
    return np.ascontiguousarray(unpack_words(np.ascontiguousarray(words.T), 4).T)


def integers(
    quantization: Quantization,
    words: NDArray[np.int32],
    zero_points: NDArray[np.int32] | None = None,
) -> NDArray[np.int8]:
    """Plain words, and zero points if there are any → int8 [N, K], which times `factors` are the
    weights: c − z, or c − 2^(bits−1); for MXFP4 twice the code's value."""
    codes = unpack_words(words, quantization.bits)
    if zero_points is None or quantization.scheme == "mxfp4":
        return meaning(quantization, codes)
    points = unpack_zero_points(zero_points).view(np.int8)
    return codes.view(np.int8) - np.repeat(points, codes.shape[1] // points.shape[1], axis=1)


def meaning(quantization: Quantization, codes: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Codes uint8 → int8 of the same shape, as `integers` does without zero points."""
    if quantization.scheme == "mxfp4":
        return _TWICE_FP4[codes]
    # Modulo 256, which is right for 8 bits too.
    return (codes - np.uint8(1 << (quantization.bits - 1))).view(np.int8)


def factors(quantization: Quantization, scales: NDArray[Any]) -> NDArray[np.float32]:
    """Scales [N, G], float32 or MXFP4's bytes → what `integers` are multiplied by, float32.

    A byte e is 2^(e − 128), as the integers are doubled; 0 is 0 and 255 infinite, as the Marlin
    kernel reads them.
    """
    if quantization.scheme != "mxfp4":
        return scales
    power = (scales.astype(np.uint32) << np.uint32(23)).view(np.float32)
    return power * np.float32(0.5)


def dequantize(codes: NDArray[np.int8], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """`integers` int8 [N, K] times their `factors` float32 [N, G] → float32 [N, K], exact for bf16
    scales."""
    group = codes.shape[1] // scales.shape[1]
    values: NDArray[Any] = codes.astype(np.float32) * np.repeat(scales, group, axis=1)
    return values
