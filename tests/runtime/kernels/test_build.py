"""Every kernel compiles for every GPU we target, with what the table says, and nothing spills.

NVRTC needs no GPU for this. Registers may only go down; shared memory (dynamic included) must fit
the GPU, which compiling alone does not prove.
"""

import pytest

pytest.importorskip("cuda.core", reason="the cuda extra is not installed")

from kconvert.runtime.bench.moe import SHAPES
from kconvert.runtime.kernels import nvrtc
from kconvert.runtime.kernels.attention.launch import AttentionShape, Form
from kconvert.runtime.kernels.drafter.launch import HeadShape
from kconvert.runtime.kernels.linear.launch import kernel as linear_kernel
from kconvert.runtime.kernels.moe.launch import gemm_kernels
from kconvert.runtime.kernels.moe.shape import Gpu, schedule

GPUS = {
    "sm_90a": (Gpu("sm_90a", 228 * 1024, 132), 232_448),
    "sm_100a": (Gpu("sm_100a", 228 * 1024, 148), 232_448),
    "sm_120a": (Gpu("sm_120a", 100 * 1024, 188), 101_376),
}
K26_TP8 = AttentionShape(heads=8, q_lora=1536, kv_lora=512, nope=128, rope=64, value=128)
SMALL = {
    "moe/align": {"EXPERTS": 384, "BLOCKS": 8},
    "moe/router": {"EXPERTS": 384, "TOP_K": 8},
    "moe/combine": {"HIDDEN": 7168, "TOP_K": 8},
    "rows/add_norm": {"SIZE": 7168},
    "rows/embed": {},
    "tree/top_k": {},
    "tree/grow": {"LEVELS": 7, "CHUNKS": 40},
    "tree/pick": {},
    "tree/walk": {},
    "tree/compact": {},
    "tree/gather": {},
    "drafter/heads": {"Q_HEADS": 64, "KV_HEADS": 8, "DIM": 128},
    "drafter/attend": {
        "Q_HEADS": 64, "KV_HEADS": 8, "DIM": 128, "BLOCK": 8, "WINDOW": 2048, "CAUSAL": 0,
    },
    "w4a16/rows": {},
    "floor/read": {},
} | {f"attention/{name}": macros for name, macros in K26_TP8.macros.items()}  # fmt: skip
SMALL["attention/merge"] |= {"WARPS": 17}
# (kernel, rows a block) -> registers at most on sm_90a, sm_100a, sm_120a; 0 where it is not used
REGISTERS = {
    ("moe/align", 0): (31, 44, 44),
    ("moe/router", 0): (27, 24, 26),
    ("moe/combine", 0): (47, 48, 48),
    ("w4a16/rows", 0): (31, 32, 36),
    ("floor/read", 0): (29, 28, 32),
    ("rows/add_norm", 0): (60, 58, 70),
    ("rows/embed", 0): (30, 30, 34),
    ("attention/store", 0): (38, 32, 35),
    ("attention/queries", 0): (70, 64, 86),
    ("attention/merge", 0): (56, 50, 56),
    ("tree/top_k", 0): (40, 40, 43),
    ("tree/grow", 0): (53, 54, 56),
    ("tree/pick", 0): (42, 46, 44),
    ("tree/walk", 0): (56, 48, 56),
    ("tree/compact", 0): (56, 42, 40),
    ("tree/gather", 0): (32, 28, 26),
    ("drafter/heads", 0): (26, 28, 30),
    ("drafter/attend", 0): (167, 133, 143),
    ("moe/w13", 8): (96, 128, 128),
    ("moe/w2", 8): (107, 109, 104),
    ("moe/w13_wide", 16): (0, 106, 102),
    ("moe/w13_group", 16): (168, 0, 0),
    ("moe/w2", 16): (100, 112, 116),
    ("moe/w13_wide", 32): (0, 124, 0),
    ("moe/w13_group", 32): (168, 0, 0),
    ("moe/w2", 32): (168, 161, 0),
    ("moe/w2_group", 32): (168, 0, 0),
    ("moe/w13_many", 64): (168, 0, 0),
    ("moe/w2_many", 64): (168, 0, 0),
    ("moe/w13_many", 96): (168, 0, 0),
    ("moe/w2_many", 96): (168, 0, 0),
}
# (shape, tokens) -> shared memory of a block of w13 and of w2, in bytes, on each GPU
SHARED = {
    ("tp8", 1): ((45056, 59392), (45056, 59392), (45056, 59392)),
    ("tp8", 33): ((45056, 39936), (45056, 39936), (45056, 39936)),
    ("tp8", 330): ((155848, 52224), (75776, 52224), (75776, 52224)),
    ("tp8", 1024): ((200904, 76800), (114688, 76800), (75776, 52224)),
    ("tp2", 1): ((45056, 71680), (45056, 71680), (45056, 71680)),
    ("tp2", 33): ((45056, 52224), (45056, 52224), (45056, 52224)),
    ("tp2", 330): ((155848, 76800), (75776, 76800), (75776, 76800)),
    ("tp2", 1024): ((200904, 200904), (75776, 76800), (75776, 76800)),
    ("ep8", 1): ((45056, 88064), (45056, 88064), (45056, 88064)),
    ("ep8", 33): ((45056, 68608), (45056, 68608), (45056, 68608)),
    ("ep8", 330): ((155848, 109568), (75776, 109568), (75776, 100352)),
    ("ep8", 1024): ((200904, 200904), (75776, 109568), (75776, 100352)),
    ("tp8", 2048): ((205344, 174656), (114688, 76800), (75776, 52224)),
    ("tp8", 4096): ((227872, 224832), (114688, 76800), (75776, 52224)),
    ("tp1", 4096): ((197152, 223264), (75776, 109568), (75776, 100352)),
    ("ep8", 4096): ((227872, 223264), (75776, 109568), (75776, 100352)),
}


def gemms(gpu: Gpu):
    """(shape's name, tokens, kernel, macros, dynamic shared memory) of every schedule we time."""
    for name, tokens in SHARED:
        shape = SHAPES[name]
        for kernel, defines, shared, _ in gemm_kernels(shape, schedule(shape, tokens, gpu)):
            yield name, tokens, kernel, defines, shared


@pytest.mark.parametrize("arch", GPUS)
@pytest.mark.parametrize("kernel", SMALL)
def test_small_kernels(kernel, arch):
    found = nvrtc.resources(kernel, arch, SMALL[kernel])
    assert found.spills == found.stack == 0
    assert found.registers <= REGISTERS[kernel, 0][list(GPUS).index(arch)]
    assert found.static_shared <= 49_152


# rows -> registers of a linear product [2112, 7168] on each GPU
LINEAR = {1: (64, 56, 64), 16: (80, 64, 64), 33: (152, 128, 128), 65: (254, 170, 128)}


@pytest.mark.parametrize("arch", GPUS)
@pytest.mark.parametrize("rows", LINEAR)
def test_linear(rows, arch):
    gpu, limit = GPUS[arch]
    defines, shared = linear_kernel(2112, 7168, rows, gpu)
    found = nvrtc.resources("linear/linear", arch, defines)
    assert found.spills == found.stack == 0
    assert found.registers <= LINEAR[rows][list(GPUS).index(arch)]
    assert shared + found.static_shared <= limit


# form of attend -> registers on each GPU, 0 where it does not fit
ATTEND = {
    Form(16, 2): (125, 123, 111),
    Form(16, 4): (134, 162, 0),
    Form(32, 2): (198, 176, 0),
    Form(32, 4): (192, 191, 0),
    Form(64, 2): (221, 253, 0),
    Form(64, 3): (221, 254, 0),
}


@pytest.mark.parametrize("arch", GPUS)
@pytest.mark.parametrize("form", ATTEND)
def test_attend(form, arch):
    most, (_, limit) = ATTEND[form][list(GPUS).index(arch)], GPUS[arch]
    assert (form.shared(K26_TP8) <= limit) == bool(most)
    if most:
        found = nvrtc.resources("attention/attend", arch, form.macros(K26_TP8))
        assert found.spills == found.stack == found.static_shared == 0
        assert not found.serialized
        assert found.registers <= most


def test_the_drafters_attention_fits_the_smallest_gpu():
    assert HeadShape(64, 8, 128).shared <= 101_376


@pytest.mark.parametrize("arch", GPUS)
def test_gemm_kernels(arch):
    gpu, limit = GPUS[arch]
    compiled = {}
    for name, tokens, kernel, defines, shared in gemms(gpu):
        key = kernel, *sorted(defines.items())
        if key not in compiled:
            compiled[key] = nvrtc.resources(kernel, arch, defines)
        found, where = compiled[key], f"{name}, {tokens} tokens, {kernel}"
        assert found.spills == found.stack == found.wrong_copies == 0, where
        assert not found.serialized, where
        most = REGISTERS[kernel, defines["BLOCK_ROWS"]][list(GPUS).index(arch)]
        assert found.registers <= most, where
        assert shared + found.static_shared <= limit, where
        assert shared in SHARED[name, tokens][list(GPUS).index(arch)], where


def test_a_kernel_that_does_not_compile_says_why():
    with pytest.raises(Exception, match="HIDDEN"):
        nvrtc.compile_cubin("moe/combine", "sm_90a", {"TOP_K": 8})


def test_cubins_are_cached_by_options(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    macros = {"EXPERTS": 384, "BLOCKS": 1}
    first = nvrtc.cached_cubin("moe/align", "sm_90a", macros)
    monkeypatch.setattr(nvrtc, "compile_cubin", lambda *a: pytest.fail("compiled again"))
    assert nvrtc.cached_cubin("moe/align", "sm_90a", macros) == first
    monkeypatch.setattr(nvrtc, "compile_cubin", lambda *a: (b"other", ""))
    assert nvrtc.cached_cubin("moe/align", "sm_90a", macros | {"EXPERTS": 48}) == b"other"
    assert nvrtc.cached_cubin("moe/align", "sm_120a", macros) == b"other"
