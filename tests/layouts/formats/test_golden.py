"""Every format and layout against what vLLM's kernels, compressed-tensors, transformers, AutoAWQ's
and GPTQModel's code made (tests/data/README.md)."""

import hashlib
import json
from typing import Any

import numpy as np
import pytest
import torch
from kit import DATA
from safetensors import safe_open

from kconvert.layouts import marlin
from kconvert.layouts.checkpoint import SourceTensor
from kconvert.layouts.errors import CheckpointError, UnsupportedError
from kconvert.layouts.experts import PROJECTIONS, stacked_tensors
from kconvert.layouts.formats.compressed_tensors import PackQuantized
from kconvert.layouts.formats.format import Format
from kconvert.layouts.formats.gptq import Gptq, read_gptq
from kconvert.layouts.formats.known import read_format
from kconvert.layouts.formats.mxfp4 import PackedMxfp4
from kconvert.layouts.layout import Layout
from kconvert.layouts.marlin import Marlin
from kconvert.layouts.quantization import Quantization, dequantize, factors, integers
from kconvert.layouts.reader import Scratch
from kconvert.layouts.scan import cast_to_bf16, widened
from kconvert.layouts.w4a16 import W4A16

CASES = json.loads((DATA / "formats_cases.json").read_text())
FILE = safe_open(DATA / "formats_cases.safetensors", "pt")
NAMES = frozenset(FILE.keys())
DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def bits(name: str) -> np.ndarray:
    """A golden tensor; floats as their bits."""
    tensor = FILE.get_tensor(name)
    if tensor.is_floating_point():
        views = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
        tensor = tensor.view(views[tensor.element_size()])
    return tensor.numpy()


def dtype(name: str) -> str:
    return DTYPES.get(FILE.get_tensor(name).dtype, "U8")


def a_tensor(name: str = "x.qzeros") -> SourceTensor:
    return SourceTensor(name, "I32", (1,), "a.safetensors", 0, 4)


def plain(format: Format, projection: str, stored: dict[str, np.ndarray]) -> dict[str, Any]:
    """By role what a format makes of tensors by companion."""
    return {
        role: format.plain(projection, role, a_tensor(), stored[name], Scratch().take).copy()
        for name, role in format.roles.items()
        if role is not None
    }


def packed(layout: Layout, roles: dict[str, np.ndarray], n: int, k: int) -> dict[str, np.ndarray]:
    """A matrix in a layout; what unpacks it gives it back."""
    out = {}
    for role, source in roles.items():
        out[role] = np.zeros(layout.shape(role, n, k), source.dtype)
        layout.pack_into(role, source, range(n), range(k), out[role], 0)
        assert np.array_equal(layout.unpack(role, out[role]), source), role
    return out


def values(q: Quantization, roles: dict[str, np.ndarray], scale_dtype: str) -> np.ndarray:
    scales = roles["scale"] if q.scheme == "mxfp4" else widened(roles["scale"], scale_dtype)
    return dequantize(integers(q, roles["code"], roles.get("zero_point")), factors(q, scales))


def format_of(case: dict) -> tuple[Format, tuple[str, ...]]:
    """A case's format, and what its tensors are called in the order of the format's companions."""
    family = case["case"].split(".")[0]
    if "mxfp4" in family:
        names = ("weight", "scale") if family == "mxfp4_v4" else ("weight_packed", "weight_scale")
        return PackedMxfp4(), names
    size, width = case.get("group_size"), case["bits"]
    group = None if size in (None, -1) else size
    if family == "gptq":
        q = Quantization(group, width, not case["sym"])
        return Gptq(q, case["checkpoint_format"], True), ("qweight", "scales", "qzeros")
    q = Quantization(group, width, not case["symmetric"])
    return PackQuantized(q), ("weight_packed", "weight_scale", "weight_zero_point")


SINGLE = [c for f in ("int8", "int4_asym", "mxfp4", "mxfp4_v4") for c in CASES["cases"][f]]
GPTQ = [c for c in CASES["cases"]["gptq"] if "bits" in c]
CONVERTED = [c for c in GPTQ if c["sym"] or c["bits"] == 4]


@pytest.mark.parametrize("case", SINGLE + CONVERTED, ids=lambda case: case["case"])
def test_one_matrix(case: dict) -> None:
    (format, names), base, n, k = format_of(case), case["case"], case["N"], case["K"]
    kept = [name for name, role in format.roles.items() if role is not None]
    stored = {kind: bits(f"{base}.{name}") for kind, name in zip(kept, names, strict=False)}
    roles, q = plain(format, "gate", stored), format.quantization
    for layout in (Marlin(q), W4A16(q)):
        found = packed(layout, roles, n, k)
        if layout.name == "marlin":
            assert np.array_equal(found["code"], bits(f"{base}.marlin"))
            assert np.array_equal(found["scale"], golden_scales(base, found["scale"], names[1]))
            if q.zero_point:
                assert np.array_equal(found["zero_point"], bits(f"{base}.zero_point_marlin"))
        back = {role: layout.unpack(role, array) for role, array in found.items()}
        found_values = values(q, back, dtype(f"{base}.{names[1]}"))
        expected = FILE.get_tensor(f"{base}.dequant")
        rounded = torch.from_numpy(found_values).to(expected.dtype)
        assert torch.equal(rounded, expected.T if "gptq" in base else expected)


def golden_scales(base: str, found: np.ndarray, name: str) -> np.ndarray:
    """vLLM's scales, in the dtype of the source's."""
    golden = f"{base}.scale_marlin"
    assert bits(golden).dtype == found.dtype and dtype(golden) == dtype(f"{base}.{name}")
    return bits(golden)


def whole_layers() -> list[dict]:
    """Without those that vLLM pads, and gpt-oss's, which are not for marlin."""
    cases = [*CASES["cases"]["moe_int"], *CASES["cases"]["moe_mxfp4"][:2]]
    return [case for case in cases if case["N_local"] % 64 == 0]


@pytest.mark.parametrize("case", whole_layers(), ids=lambda case: case["case"])
def test_a_whole_layer_on_every_rank(case: dict) -> None:
    format, base = format_of({"symmetric": True, **case})[0], case["case"]
    names = ("w1", "w3", "w2") if "mxfp4" in base else PROJECTIONS
    kept = [name for name, role in format.roles.items() if role is not None]
    q, n, k = format.quantization, case["N"] // case["tp"], case["K"]
    layout = Marlin(q)
    for expert in range(case["E"]):
        source = {
            (p, role): array
            for p, name in zip(PROJECTIONS, names, strict=True)
            for role, array in plain(
                format,
                p,
                {c: np.ascontiguousarray(bits(f"{base}.{name}.{c}")[expert]) for c in kept},
            ).items()
        }
        for rank in range(case["tp"]):
            for stacked in stacked_tensors(q):
                cut = stacked.cut(range(rank * n, (rank + 1) * n), k)
                first = source[stacked.projections[0], stacked.role]
                out = np.zeros(layout.shape(stacked.role, cut.n, cut.k), first.dtype)
                for p, rows, columns, at in cut.parts:
                    layout.pack_into(stacked.role, source[p, stacked.role], rows, columns, out, at)
                kind = "" if stacked.role == "code" else f"_{stacked.role}"
                golden = f"{base}.tp{case['tp']}.rank{rank}.{stacked.matrix}{kind}"
                assert np.array_equal(out, bits(golden)[expert]), golden


@pytest.mark.parametrize(
    "case", [c for c in CASES["hash"] if c["format"] != "awq"], ids=lambda case: case["format"]
)
def test_repack_at_model_sizes_has_vllms_hash(case: dict) -> None:
    rng = np.random.Generator(np.random.Philox(case["philox_seed"]))
    source = rng.integers(0, 1 << 32, case["input_shape"], np.uint32).view(np.int32)
    assert hashlib.sha256(source.tobytes()).hexdigest() == case["sha256_input"]
    repacked = marlin.pack_weight(source, 8 if case["format"] == "int8" else 4)
    assert hashlib.sha256(repacked.tobytes()).hexdigest() == case["sha256_marlin"]


def test_every_code_and_scale_byte_of_mxfp4() -> None:
    """A row a scale byte, twice all codes: what transformers says, but for byte 0, which is 2^−127
    there and 0 in the kernel and here."""
    q = Quantization(32, scheme="mxfp4")
    codes = np.tile(np.arange(16, dtype=np.uint8), (256, 2))
    words = np.ascontiguousarray(codes[:, ::2] | codes[:, 1::2] << 4).view(np.int32)
    with np.errstate(over="ignore", invalid="ignore"):  # the largest bytes, and 255
        found = values(q, {"code": words, "scale": np.arange(256, dtype=np.uint8)[:, None]}, "U8")
    expected = FILE.get_tensor("mxfp4_table.dequant_transformers").numpy()
    assert np.array_equal(found[1:255], expected[1:255]) and not found[0].any()
    kernel = FILE.get_tensor("mxfp4_table.kernel_dequant").float().numpy()
    assert np.array_equal(found[:253], kernel[:253])


def test_gptq_zero_points_between_v1_and_v2() -> None:
    """One addition a word, carries included; by field it would be another model."""
    v2, v1 = bits("gptq_v1_zero.qzeros_v2"), bits("gptq_v1_zero.qzeros_v1")
    q = Quantization(32, zero_point=True)

    def read(kind: str, words: np.ndarray, by_word: bool = True) -> np.ndarray:
        format = Gptq(q, kind, by_word)
        return format.plain("gate", "zero_point", a_tensor(), words, Scratch().take).copy()

    assert np.array_equal(read("gptq", v1), read("gptq_v2", v2))
    with pytest.raises(CheckpointError, match=r"stored as 15.*save the checkpoint as gptq_v2"):
        read("gptq", v1, by_word=False)
    nonzero = np.full((2, 2), 0x76543210, np.int32)
    assert np.array_equal(read("gptq", nonzero, by_word=False), nonzero + np.int32(0x11111111))


def test_symmetric_gptq_zero_points_are_checked() -> None:
    format = Gptq(Quantization(32), "gptq", True)
    tensor, shape = a_tensor(), (64, 128)
    for word in (0x77777777, 0x88888888 - (1 << 32)):
        format.check_dropped(tensor, np.full((4, 8), word, np.int32), *shape)
    mixed = np.full((4, 8), 0x77777777, np.int32)
    mixed[2, 3] = 0x77777778
    with pytest.raises(CheckpointError, match="says sym, and a zero point is not 8"):
        format.check_dropped(tensor, mixed, *shape)


def test_gptq_act_order_is_refused() -> None:
    format, tensor = Gptq(Quantization(32), "gptq", True), a_tensor("x.g_idx")
    trivial = np.arange(128, dtype=np.int32) // 32
    format.check_dropped(tensor, trivial, 64, 128)
    monotone = np.minimum(np.arange(128, dtype=np.int32) // 31, 3)
    for other in (trivial[::-1].copy(), monotone):
        with pytest.raises(UnsupportedError, match=r"act-order.*desc_act false"):
            format.check_dropped(tensor, other, 64, 128)
    Gptq(Quantization(None), "gptq", True).check_dropped(tensor, 0 * trivial, 64, 128)


GPTQ_CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}


@pytest.mark.parametrize(
    ("change", "words"),
    [({"bits": 3}, "bits is 3"), ({"group_size": 48}, "group_size is 48"),
     ({"desc_act": True}, "desc_act is true: act-order"),
     ({"bits": 8, "sym": False}, "8 bit with zero points"),
     ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
     ({"dynamic": {"+:.*down.*": {"bits": 8}}}, "mixed widths"),
     ({"rotation": "hadamard"}, "rotation"), ({"unheard_of": 1}, "unheard_of is not a field")],
)  # fmt: skip
def test_gptq_configs_that_are_refused(change: dict, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        read_gptq(GPTQ_CONFIG | change)


def test_gptq_configs_that_are_not() -> None:
    kept = {"dynamic": {"-:.*attn.*": {}}, "meta": {"quantizer": ["gptqmodel:7.7.0"]}}
    assert read_gptq(GPTQ_CONFIG | kept).quantization == Quantization(32)
    channelwise = {"group_size": -1, "desc_act": True}
    assert read_gptq(GPTQ_CONFIG | channelwise).quantization == Quantization(None)


@pytest.mark.parametrize(
    "config", sorted((DATA / "formats/refused").iterdir()), ids=lambda path: path.stem
)
def test_what_is_refused_by_name(config: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"AWQ packs|desc_act is true"):
        read_format(json.loads(config.read_text()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_cast_is_torchs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ties = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 0.0])
    scales = torch.cat([torch.randn(4000).exp(), ties])
    scales = scales.to(dtype).reshape(4, -1)
    view = torch.uint32 if dtype == torch.float32 else torch.uint16
    out = np.zeros(scales.shape, np.uint16)
    lost = cast_to_bf16(scales.view(view).numpy(), DTYPES[dtype], out)
    expected = scales.to(torch.bfloat16)
    assert np.array_equal(out, expected.view(torch.uint16).numpy())
    assert lost == (expected.to(dtype) != scales).sum()
