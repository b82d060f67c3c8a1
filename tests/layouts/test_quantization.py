"""The plain order, against its definition code by code."""

import numpy as np
import pytest

from kconvert.layouts.quantization import (
    Quantization,
    dequantize,
    factors,
    integers,
    unpack_words,
    unpack_zero_points,
)

RNG = np.random.default_rng(0)
INT4, INT8 = Quantization(32), Quantization(32, 8)
ASYMMETRIC, MXFP4 = Quantization(32, zero_point=True), Quantization(32, scheme="mxfp4")
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def words(n: int, k: int, bits: int) -> np.ndarray:
    return RNG.integers(-(1 << 31), 1 << 31, (n, k * bits // 32)).astype(np.int32)


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_lie_low_bits_first(bits: int) -> None:
    packed = words(3, 64, bits)
    codes, a_word = unpack_words(packed, bits), 32 // bits
    for n in range(3):
        for k in range(64):
            word = int(packed[n, k // a_word]) & 0xFFFFFFFF
            assert codes[n, k] == word >> bits * (k % a_word) & (1 << bits) - 1


def test_zero_points_lie_along_the_rows() -> None:
    packed = words(2, 16, 4)  # int32 [N/8, G] of 16 rows and two groups
    points = unpack_zero_points(packed)
    for n in range(16):
        for g in range(2):
            assert points[n, g] == (int(packed[n // 8, g]) & 0xFFFFFFFF) >> 4 * (n % 8) & 15


@pytest.mark.parametrize("q", [INT4, INT8, ASYMMETRIC, MXFP4], ids=lambda q: q.text)
def test_weights_are_what_codes_and_scales_mean(q: Quantization) -> None:
    packed, points = words(8, 64, q.bits), words(1, 16, 4) if q.zero_point else None
    stored = RNG.integers(120, 134, (8, 2)).astype(np.uint8)
    scales = stored if q.scheme == "mxfp4" else RNG.random((8, 2)).astype(np.float32)
    found = dequantize(integers(q, packed, points), factors(q, scales))
    codes = unpack_words(packed, q.bits)
    for n, k in np.ndindex(8, 64):
        code, scale = int(codes[n, k]), scales[n, k // 32]
        if q.scheme == "mxfp4":
            wanted = np.float32(FP4[code]) * np.float32(2.0 ** (int(scale) - 127))
        else:
            middle = (
                int(unpack_zero_points(points)[n, k // 32]) if q.zero_point else 1 << q.bits - 1
            )
            wanted = np.float32(code - middle) * scale
        assert found[n, k] == wanted


def test_parts_of_a_matrix_in_every_role() -> None:
    q = Quantization(32, zero_point=True, bias=True)
    assert q.roles == ("code", "scale", "zero_point", "bias")
    rows, columns = range(8, 24), range(64, 128)
    for role, shape in {
        "code": (16, 8), "scale": (16, 2), "zero_point": (2, 2), "bias": (16,),
    }.items():  # fmt: skip
        whole = np.arange(np.prod(q.plain_shape(role, 32, 256))).reshape(
            q.plain_shape(role, 32, 256)
        )
        part = q.part(role, whole, rows, columns)
        assert part.shape == shape
        n, k = {"zero_point": (1, 2), "code": (8, 8), "scale": (8, 2), "bias": (8, 0)}[role]
        assert part.flat[0] == (whole[n, k] if role != "bias" else whole[n])


def test_channelwise_scales_belong_to_every_part() -> None:
    assert Quantization(None).groups(range(64, 96)) == range(1)
    assert Quantization(None).text == "INT4, symmetric, channelwise scales"
