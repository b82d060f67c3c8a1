"""How scales and codes show a damaged source, and scales cast to bfloat16."""

import numpy as np
import pytest
import torch

from kconvert.layouts.scan import ScaleScan, all_one_code, cast_to_bf16, scan_scales, widened

BITS = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32, "U8": np.uint8}
ONE = {"BF16": 0x3F80, "F16": 0x3C00, "F32": 0x3F800000, "U8": 127}
BAD = {"BF16": (0x7F80, 0xFFC1), "F16": (0x7C00, 0xFE00), "F32": (0x7F800000, 0xFFC00000),
       "U8": (255,)}  # fmt: skip


@pytest.mark.parametrize("dtype", BITS)
def test_the_first_scale_that_is_not_finite_and_zeros_are_found(dtype: str) -> None:
    scales = np.full((5, 7), ONE[dtype], BITS[dtype])
    assert scan_scales(scales, dtype) == ScaleScan(None, 0)
    scales[0, 3] = scales[4, 6] = 0
    assert scan_scales(scales, dtype) == ScaleScan(None, 2)
    for value in BAD[dtype]:
        scales[2, 5], scales[3, 0] = value, value
        assert scan_scales(scales, dtype) == ScaleScan((2, 5), 2)


@pytest.mark.parametrize("bits", [4, 8])
def test_one_code_everywhere(bits: int) -> None:
    for code in (0, 1, (1 << bits) - 1):
        word = sum(code << at for at in range(0, 32, bits))
        words = np.full((3, 4), word, np.uint32).view(np.int32)
        assert all_one_code(words, bits)
        words[2, 3] ^= 1
        assert not all_one_code(words, bits)
    assert not all_one_code(np.full((3, 4), 0x12345678, np.int32), bits)


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_casts_round_as_torch_does(dtype: str) -> None:
    kind = {"F16": torch.float16, "F32": torch.float32}[dtype]
    values = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).to(kind)
    bits = values.view(torch.uint16 if dtype == "F16" else torch.uint32).numpy()
    out = np.empty(bits.shape, np.uint16)
    lost = cast_to_bf16(bits, dtype, out)
    cast = values.to(torch.bfloat16)
    assert np.array_equal(out, cast.view(torch.uint16).numpy())
    assert lost == int((cast.float() != values.float()).sum()) > 0
    assert np.array_equal(widened(out, "BF16"), cast.float().numpy())
