"""The GPU's engine without a GPU: every kernel is given what it takes, fits, and compiles."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest

pytest.importorskip("cuda.core", reason="the cuda extra is not installed")

import torch
from recorded import GPUS, Launch, recorded

from kconvert.convert import convert
from kconvert.runtime.kernels import nvrtc

TINY = Path(__file__).parents[2] / "tiny_kimi"
SHARED = {"sm_90a": 232_448, "sm_100a": 232_448, "sm_120a": 101_376}  # bytes of a block


@pytest.fixture(scope="module")
def blobs(tmp_path_factory) -> dict[int, Path]:
    root = tmp_path_factory.mktemp("blobs")
    for tp in (1, 2):
        convert(TINY / "model", root / str(tp), tp=tp)
    return {tp: root / str(tp) for tp in (1, 2)}


def parameters(kernel: str) -> list[str]:
    source = (nvrtc.SOURCES / f"{kernel}.cu").read_text()
    entry = re.search(rf"{nvrtc.entry_of(kernel)}\((.*?)\)\s*{{", source, re.DOTALL)
    assert entry, kernel
    return [" ".join(part.split()) for part in entry[1].split(",")]


def assert_fits(launch: Launch) -> None:
    wanted = parameters(launch.kernel)
    assert len(launch.arguments) == len(wanted), launch.kernel
    sizes = {
        "u16": torch.bfloat16, "int": torch.int32, "float": torch.float32, "double": torch.float64,
        "u64": torch.int64, "u32": None, "char": torch.int32, "uint4": None, "int4": None,
        "void": None,
    }  # fmt: skip
    for argument, parameter in zip(launch.arguments, wanted, strict=True):
        where = f"{launch.kernel}, {parameter}: {argument!r:.60}"
        kind = re.sub(r"const |volatile ", "", parameter).split()[0].rstrip("*")
        if "*" not in parameter:
            assert isinstance(argument, int if kind == "int" else float), where
            continue
        if argument is None:
            continue
        assert isinstance(argument, torch.Tensor) and argument.is_contiguous(), where
        if launch.kernel.startswith("moe/"):
            continue  # test_launch.py
        assert sizes[kind] in (None, argument.dtype), where
    assert all(size > 0 for size in launch.grid) and launch.block % 32 == 0


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("arch", GPUS)
def test_every_kernel_is_given_what_it_takes(arch, tp, blobs, monkeypatch) -> None:
    """And compiles, which is the same for both tp but for numbers of heads."""
    made = recorded(blobs[tp], TINY / "drafter", arch, tp, monkeypatch)
    assert len({launch.kernel for launch in made}) >= 20
    for launch in made:
        assert_fits(launch)
    last = made[-made[::-1].index(next(m for m in made[::-1] if m.kernel == "tree/grow")) :]
    for launch in {(m.kernel, *sorted(m.defines.items())): m for m in last}.values():
        if tp == 2 and "HEADS" not in launch.defines:
            continue
        found = nvrtc.resources(launch.kernel, arch, launch.defines)
        assert found.spills == found.stack == 0 and not found.serialized, launch.kernel
        assert launch.shared + found.static_shared <= SHARED[arch], launch.kernel
