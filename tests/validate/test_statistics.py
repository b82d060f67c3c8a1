"""What codes and scales look like, counted in the bytes of the blobs."""

from pathlib import Path

import numpy as np
import pytest
from kit import KIMI_MINI

from kconvert.layouts.checkpoint import read_checkpoint
from kconvert.layouts.quantization import Quantization, unpack_words
from kconvert.layouts.scan import widened
from kconvert.validate import validate
from kconvert.validate.statistics import LayerStatistics, ScaleSums, count_codes, sum_scales


def test_statistics_are_those_of_the_source(output: Path) -> None:
    """From marlin's bytes, in whatever order they lie."""
    layer = validate(output).statistics[1]
    checkpoint = read_checkpoint(KIMI_MINI)
    for expert in (0, 7):
        codes = np.zeros(16, np.int64)
        scales, squares = [], []
        for name, tensor in checkpoint.tensors.items():
            if f"layers.1.mlp.experts.{expert}." not in name:
                continue
            raw = (KIMI_MINI / tensor.shard).read_bytes()[tensor.start :][: tensor.nbytes]
            if name.endswith("weight_packed"):
                words = np.frombuffer(raw, np.int32).reshape(tensor.shape)
                read = unpack_words(words, 4)
                codes += np.bincount(read.reshape(-1), minlength=16)
                groups = ((read.astype(np.int64) - 8) ** 2).reshape(len(read), -1, 32)
                squares.append(groups.sum(axis=2).reshape(-1))
            elif name.endswith("weight_scale"):
                scales.append(np.abs(widened(np.frombuffer(raw, np.uint16), "BF16")))
        assert (layer.codes[expert] == codes).all()
        every = np.concatenate(scales).astype(np.float64)
        assert layer.scales[expert, 0] == every.size
        assert layer.means[expert] == pytest.approx(every.mean())
        weights = np.sqrt((np.concatenate(squares) * every**2).sum() / codes.sum())
        assert layer.sizes[expert] == pytest.approx(weights, rel=0.05)  # an estimate
        assert layer.greatest[expert] == every.max()
        assert layer.bits_a_weight == 4.5  # a bf16 scale for 32 codes
        assert layer.least[expert] == every[every > 0].min()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [1, 2, 7, 4096])
def test_codes_are_counted(bits: int, size: int) -> None:
    words = np.random.default_rng(size).integers(-(1 << 31), 1 << 31, size).astype(np.int32)
    expected = np.bincount(unpack_words(words[None], bits).reshape(-1), minlength=1 << bits)
    assert (count_codes(words, bits) == expected).all()


def test_odd_scales_are_counted() -> None:
    bits = np.array(
        [0x0000, 0x8000, 0x0001, 0x3F80, 0xC000, 0x7F80], np.uint16
    )  # ±0, tiny, 1, −2, ∞
    sums = sum_scales(bits, "BF16")
    assert (sums.count, sums.zeros, sums.denormals, sums.greatest) == (6, 2, 1, 2.0)
    assert sums.not_finite == 1
    assert sums.total == pytest.approx(3.0) and 0 < sums.least < 1e-38
    exponents = sum_scales(np.array([0, 127, 129], np.uint8), "U8")
    assert (exponents.zeros, exponents.least, exponents.greatest) == (1, 1.0, 4.0)


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_scale_there_is(dtype: str) -> None:
    """Against numpy, of all 65,536 bit patterns."""
    bits = np.random.default_rng(0).permutation(1 << 16).astype(np.uint16)
    with np.errstate(invalid="ignore"):  # signaling NaN
        values = np.abs(widened(bits, dtype).astype(np.float64))
    finite = values[np.isfinite(values)]
    normal = 2.0**-126 if dtype == "BF16" else 2.0**-14
    sums = sum_scales(bits, dtype)
    assert sums.zeros == (finite == 0).sum() == 2
    assert sums.denormals == ((finite > 0) & (finite < normal)).sum()
    assert sums.not_finite == len(values) - len(finite)
    assert (sums.least, sums.greatest) == (finite[finite > 0].min(), finite.max())
    assert sums.total == pytest.approx(finite.sum(), rel=1e-12)
    assert sums.squares == pytest.approx((finite**2).sum(), rel=1e-12)


def test_an_expert_unlike_the_others() -> None:
    layer = LayerStatistics(8, Quantization(32))
    for expert in range(8):
        mean = 3.0 if expert == 5 else 1.0 + expert / 100
        layer.add_scales(expert, ScaleSums(10, 0, 0, 0, 10 * mean, 10 * mean**2, mean, mean))
    assert layer.outliers == [5]
