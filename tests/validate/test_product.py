"""The product that reads as the kernels do: it agrees with the layout, and with nothing else."""

import numpy as np
import pytest
from kit import KIMI_MINI

from kconvert.convert import convert
from kconvert.layouts.marlin import Marlin
from kconvert.layouts.quantization import Quantization
from kconvert.layouts.w4a16 import W4A16
from kconvert.validate import validate
from kconvert.validate.product import products_agree, read_in_order

KINDS = {
    "int4": (Quantization(32), "BF16", np.uint16),
    "int4-float32": (Quantization(32), "F32", np.uint32),
    "int4-channel": (Quantization(None), "BF16", np.uint16),
    "int4-zero": (Quantization(32, zero_point=True), "F16", np.uint16),
    "int8": (Quantization(32, bits=8), "BF16", np.uint16),
    "int8-channel": (Quantization(None, bits=8), "BF16", np.uint16),
    "mxfp4": (Quantization(32, scheme="mxfp4"), "U8", np.uint8),
}


def packed(kind: str, n: int = 128, k: int = 192):
    quantization, dtype, word = KINDS[kind]
    layout, random = Marlin(quantization), np.random.default_rng(7)
    stored = []
    for role, kind_of in (("code", np.int32), ("scale", word)):
        bits = np.iinfo(kind_of)
        low, high = (bits.min, bits.max) if role == "code" else (1, bits.max // 3)
        shape = quantization.plain_shape(role, n, k)
        plain = random.integers(low, high, shape, kind_of)
        out = np.empty(layout.shape(role, n, k), kind_of)
        layout.pack_into(role, plain, range(n), range(k), out, 0)
        stored.append(out)
    return layout, *stored, dtype


@pytest.mark.parametrize("kind", KINDS)
def test_it_agrees_with_the_layout(kind: str) -> None:
    assert products_agree(*packed(kind), 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("role", ["code", "scale"])
def test_an_inverse_that_swaps_anything_is_found(kind: str, role: str, monkeypatch) -> None:
    """Two rows, as a packing with the same fault would have hidden."""
    layout, codes, scales, dtype = packed(kind)
    right, order = layout.unpack, [1, 0, *range(2, 128)]
    wrong = lambda r, array: right(r, array)[order] if r == role else right(r, array)  # noqa: E731
    monkeypatch.setattr(layout, "unpack", wrong)
    assert not products_agree(layout, codes, scales, dtype, 0)


def test_a_layout_that_is_its_own_inverse_but_not_the_kernels(tmp_path, monkeypatch) -> None:
    convert(KIMI_MINI, tmp_path / "out", tp=2)
    unpack = Marlin.unpack
    monkeypatch.setattr(Marlin, "unpack", lambda self, role, array: unpack(self, role, array)[::-1])
    result = validate(tmp_path / "out")
    assert {finding.check for finding in result.findings} == {"product"}
    assert len(result.findings) == 2 * 2 * 2


def test_the_plain_layout_has_no_other_order(tmp_path) -> None:
    assert not read_in_order(W4A16(Quantization(32)))
    convert(KIMI_MINI, tmp_path / "out", layout="w4a16")
    assert validate(tmp_path / "out").check("product").skipped == (
        "layout w4a16 is read in the plain order"
    )
