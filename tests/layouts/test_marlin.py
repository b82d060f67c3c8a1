"""Marlin against vLLM's own kernels, against the formula, and pack against unpack."""

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import DATA, marlin_formula
from safetensors import safe_open

from kconvert.layouts import marlin
from kconvert.layouts.marlin import Marlin
from kconvert.layouts.quantization import Quantization, Scheme
from kconvert.layouts.reader import NUMPY_BITS
from kconvert.layouts.w4a16 import W4A16

CASES = json.loads((DATA / "marlin_cases.json").read_text())


def golden(name: str) -> np.ndarray:
    """A golden tensor; bf16 as its bits."""
    import torch

    with safe_open(DATA / "marlin_cases.safetensors", "pt") as file:
        tensor = file.get_tensor(name)
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return tensor.numpy()


def random_words(seed: int, rows: int, words: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-(1 << 31), 1 << 31, (rows, words), np.int32)


@pytest.mark.parametrize("case", [entry["case"] for entry in CASES["repack"]])
def test_repack_is_vllms(case: int) -> None:
    source, packed = golden(f"repack.{case}.weight_packed"), golden(f"repack.{case}.marlin")
    assert np.array_equal(marlin.pack_weight(source), packed)
    assert np.array_equal(marlin_formula(source), packed)
    assert np.array_equal(marlin.unpack_weight(packed), source)


@pytest.mark.parametrize("case", CASES["hash"], ids=lambda case: f"{case['N']}x{case['K']}")
def test_repack_at_k26_sizes_has_vllms_hash(case: dict) -> None:
    rng = np.random.Generator(np.random.Philox(case["philox_seed"]))
    source = rng.integers(0, 1 << 32, (case["N"], case["K"] // 8), np.uint32).view(np.int32)
    assert hashlib.sha256(source.tobytes()).hexdigest() == case["sha256_input"]
    packed = marlin.pack_weight(source)
    assert hashlib.sha256(packed.tobytes()).hexdigest() == case["sha256_marlin"]


@pytest.mark.parametrize("name", ["w13", "w2"])
@pytest.mark.parametrize("expert", range(8))
def test_moe_weights_and_scales_are_vllms(name: str, expert: int) -> None:
    source = golden(f"moe.0.{name}_weight_packed")[expert]
    assert np.array_equal(marlin.pack_weight(source), golden(f"moe.0.{name}_marlin")[expert])
    scales = golden(f"moe.0.{name}_weight_scale")[expert]
    permuted = golden(f"moe.0.{name}_scale_marlin")[expert]
    assert np.array_equal(marlin.permute_scales(scales), permuted)
    assert np.array_equal(marlin.unpermute_scales(permuted), scales)


def test_single_group_scales_follow_the_single_group_formula() -> None:
    """No golden tensor has one group, so the stated formula is the reference."""
    scales = np.arange(256, dtype=np.uint16)[:, None]
    n = np.arange(256)
    place = 32 * (n // 32) + 8 * (n % 8 // 2) + 2 * (n % 32 // 8) + n % 2
    expected = np.empty((1, 256), np.uint16)
    expected[0, place] = scales[:, 0]
    assert np.array_equal(marlin.permute_scales(scales), expected)
    assert np.array_equal(marlin.unpermute_scales(expected), scales)
    many = np.repeat(scales, 2, axis=1)  # two groups: the other order
    assert not np.array_equal(marlin.permute_scales(many)[:1], expected)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 1 << 32))
def test_pack_is_the_formula_and_unpack_its_inverse(tiles_n: int, tiles_k: int, seed: int) -> None:
    source = random_words(seed, 64 * tiles_n, 2 * tiles_k)
    packed = marlin.pack_weight(source)
    assert np.array_equal(packed, marlin_formula(source))
    assert np.array_equal(marlin.unpack_weight(packed), source)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([Marlin, W4A16]),
    st.integers(1, 3), st.integers(1, 12), st.integers(1, 3), st.integers(0, 1 << 32),
)  # fmt: skip
def test_packing_a_slice_is_slicing_then_packing(layout, n, k, parts, seed) -> None:
    """Every rank's rows of gate and up, fused, and every rank's columns of down."""
    layout, n, k = layout(Quantization(16)), 64 * n, 16 * k
    gate, up = (random_words(seed + i, n * parts, k // 8) for i in range(2))
    down = random_words(seed, n, k * parts // 8)
    for part in range(parts):
        rows, columns = range(part * n, part * n + n), range(part * k, part * k + k)
        w13 = np.empty(layout.shape("code", 2 * n, k), np.int32)
        layout.pack_into("code", gate, rows, range(k), w13, 0)
        layout.pack_into("code", up, rows, range(k), w13, n)
        fused = np.concatenate([gate[part * n : part * n + n], up[part * n : part * n + n]])
        assert np.array_equal(layout.unpack("code", w13), fused)
        w2 = np.empty(layout.shape("code", n, k), np.int32)
        layout.pack_into("code", down, range(n), columns, w2, 0)
        cut = down[:, part * k // 8 : (part + 1) * k // 8]
        assert np.array_equal(layout.unpack("code", w2), cut)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([Marlin, W4A16]), st.integers(1, 4), st.integers(1, 70),
    st.sampled_from([np.uint16, np.uint32]), st.integers(0, 1 << 32),
)  # fmt: skip
def test_scales_come_back(layout, tiles, groups, dtype, seed) -> None:
    layout, n = layout(Quantization(16)), 64 * tiles
    scales = np.random.default_rng(seed).integers(0, 1 << 16, (n, groups + 2)).astype(dtype)
    out = np.empty(layout.shape("scale", n, 16 * groups), dtype)
    layout.pack_into("scale", scales, range(n), range(16, 16 * groups + 16), out, 0)
    assert np.array_equal(layout.unpack("scale", out), scales[:, 1 : groups + 1])


def test_other_arrays_are_refused() -> None:
    """The kernels work by address: what they do not expect must not reach them."""
    words = np.zeros((128, 8), np.int32)
    for wrong in (words.astype(np.int64), words.astype(np.float32)):
        with pytest.raises(ValueError, match="expected C-contiguous int32"):
            marlin.pack_weight(wrong)
        with pytest.raises(ValueError, match="expected C-contiguous int32"):
            marlin.unpack_weight(wrong)
    with pytest.raises(ValueError, match="33 rows"):
        marlin.unpack_weight(np.zeros((500, 66), np.int32))
    layout = Marlin(Quantization(16))
    with pytest.raises(ValueError, match="at least"):
        layout.pack_into("code", words, range(64, 192), range(64), words, 0)
    with pytest.raises(ValueError, match="at least"):
        small = np.zeros((4, 100), np.int32)
        layout.pack_into("code", words, range(64), range(64), small, 0)
    with pytest.raises(ValueError, match="at least"):
        large = np.zeros((9, 64), np.int32)
        layout.pack_into("scale", words, range(64), range(144), large, 0)
    strided = np.zeros((128, 16), np.int32)[:, ::2]
    assert np.array_equal(marlin.pack_weight(strided), marlin.pack_weight(strided.copy()))


@pytest.mark.parametrize(("rows", "words", "reason"), [(32, 4, "32 rows"), (64, 3, "24 columns")])
def test_a_cut_tile_is_refused(rows: int, words: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        marlin.pack_weight(np.zeros((rows, words), np.int32))


@pytest.mark.parametrize("groups", [1, 2, 7, 8, 9, 12, 40])
@pytest.mark.parametrize("kind", ["U8", "BF16", "F32"])
def test_scales_of_any_number_of_groups(kind: str, groups: int) -> None:
    """A slice of them, as a later part of a fused matrix: each where the formula says."""
    scheme, dtype = ("mxfp4", np.uint8) if kind == "U8" else ("int", NUMPY_BITS[kind])
    layout = Marlin(Quantization(32, scheme=scheme))
    source = np.random.default_rng(groups).integers(0, 250, (256, 50)).astype(dtype)
    out = np.zeros((groups, 192), dtype)
    rows, columns = range(64, 192), range(32 * 5, 32 * (5 + groups))
    layout.pack_into("scale", source, rows, columns, out, 64)
    n = np.arange(128)
    i = n % 64 // 8
    if scheme == "mxfp4":
        place = 64 * (n // 64) + 8 * (n % 8) + 4 * (i // 4) + 2 * (i % 2) + i // 2 % 2
    elif groups > 1:
        place = 64 * (n // 64) + 8 * (n % 8) + i
    else:
        place = 32 * (n // 32) + 8 * (n % 8 // 2) + 2 * (n % 32 // 8) + n % 2
    assert np.array_equal(out[:, 64 + place], source[64:192, 5 : 5 + groups].T)
    assert not out[:, :64].any()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 40), st.integers(0, 1 << 32))
def test_eight_bits_are_the_formula(tiles_n: int, tiles_k: int, seed: int) -> None:
    source = random_words(seed, 64 * tiles_n, 4 * tiles_k)
    packed = marlin.pack_weight(source, 8)
    rows, columns = 64 * tiles_n, 16 * tiles_k
    n, k = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    word = k // 16 * 4 * rows + 256 * (n // 64) + 32 * (n % 8) + 8 * (k % 8 // 2)
    word += 2 * (n // 16 % 4) + n // 8 % 2
    byte = k // 8 % 2 + 2 * (k % 2)
    assert np.array_equal(packed.view(np.uint8).reshape(-1)[4 * word + byte], source.view(np.uint8))
    assert np.array_equal(marlin.unpack_weight(packed, 8), source)


@pytest.mark.parametrize(("n", "k"), [(64, 16), (64, 128), (128, 144), (192, 368), (256, 1024)])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_quick_way_back_is_the_proof_s(n: int, k: int, bits: int) -> None:
    layout = marlin.Marlin(Quantization(32, bits))
    packed = np.random.default_rng(n + k).integers(
        -(1 << 31), 1 << 31, layout.shape("code", n, k), np.int64
    ).astype(np.int32)  # fmt: skip
    assert np.array_equal(layout.restore("code", packed), layout.unpack("code", packed))


@pytest.mark.parametrize("groups", [1, 7, 8, 9, 224])
@pytest.mark.parametrize("scheme", ["int", "mxfp4"])
def test_the_quick_way_back_of_scales_is_the_proof_s(groups: int, scheme: Scheme) -> None:
    for dtype in (np.uint8,) if scheme == "mxfp4" else (np.uint16, np.uint32):
        layout = marlin.Marlin(Quantization(32, scheme=scheme))
        packed = np.random.default_rng(groups).integers(0, 256, (groups, 192)).astype(dtype)
        assert np.array_equal(layout.restore("scale", packed), layout.unpack("scale", packed))
