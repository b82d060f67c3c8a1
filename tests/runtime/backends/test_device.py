"""Which device a model runs on, and what is refused before anything is loaded."""

from pathlib import Path

import pytest
import torch
from formats_kit import FORMATS

from kconvert.convert import convert
from kconvert.layouts.errors import UnavailableError, UnsupportedError
from kconvert.runtime.backends import device
from kconvert.runtime.backends.device import choose
from kconvert.runtime.config import read_config
from kconvert.runtime.distributed import Ranks
from kconvert.runtime.engine import Engine
from kconvert.runtime.weights import Blobs


@pytest.fixture
def gpu(monkeypatch) -> None:
    """A GPU that the kernels take, as torch would tell of it."""
    monkeypatch.setattr(device, "_no_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100 << 30, 140 << 30))


def chosen(folder: Path, name: str, dtype: str | None = None) -> tuple[str, str]:
    return choose(name, dtype, folder, read_config(folder), Blobs(folder, Ranks()), Ranks())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu(mini, capsys) -> None:
    assert chosen(mini["marlin"], "auto") == ("cpu", "float32")
    assert chosen(mini["marlin"], "auto", "bfloat16") == ("cpu", "bfloat16")
    assert capsys.readouterr().err == ""
    with pytest.raises(UnavailableError, match=r"no NVIDIA GPU .* --device cpu"):
        Engine.open(mini["marlin"], device="cuda")


def test_a_gpu_is_taken_where_kernels_fit(mini, gpu, capsys) -> None:
    pytest.importorskip("cuda.core", reason="the cuda extra is not installed")
    assert chosen(mini["marlin"], "auto") == ("cuda", "bfloat16")
    assert chosen(mini["marlin"], "cpu") == ("cpu", "float32")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("layout", "dtype", "capability", "words"),
    [
        ("w4a16", None, (9, 0), "the blobs are w4a16"),
        ("marlin", "float32", (9, 0), "float32 was asked for"),
        ("marlin", None, (8, 0), "compute capability 8.0"),
    ],
)
def test_what_kernels_do_not_take(layout, dtype, capability, words, mini, gpu, monkeypatch, capsys):
    """auto says so in a line and takes the CPU; asked for by name it is an error."""
    pytest.importorskip("cuda.core", reason="the cuda extra is not installed")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert chosen(mini[layout], "auto", dtype) == ("cpu", "float32")
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
    with pytest.raises(UnsupportedError, match=f"{words}.*--device cpu"):
        chosen(mini[layout], "cuda", dtype)


def test_mxfp4_is_for_the_cpu(gpu, tmp_path: Path, capsys) -> None:
    pytest.importorskip("cuda.core", reason="the cuda extra is not installed")
    convert(FORMATS / "deepseek-v3-mxfp4", tmp_path / "out")
    assert chosen(tmp_path / "out", "auto") == ("cpu", "float32")
    assert "the experts are MXFP4, group_size 32, the kernels take INT4" in capsys.readouterr().err
    with pytest.raises(UnsupportedError, match=r"MXFP4.*--device cpu"):
        chosen(tmp_path / "out", "cuda")


def test_too_little_memory_is_an_error_also_of_auto(mini, gpu, monkeypatch) -> None:
    pytest.importorskip("cuda.core", reason="the cuda extra is not installed")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 140 << 30))
    with pytest.raises(UnavailableError, match=r"needs 2\.2 GB .* 1\.1 GB are free"):
        chosen(mini["marlin"], "auto")


def test_unknown_names(mini) -> None:
    with pytest.raises(UnsupportedError, match="device 'tpu' is none of auto, cpu, cuda"):
        chosen(mini["marlin"], "tpu")
    with pytest.raises(UnsupportedError, match="dtype 'int8' is none of float32, bfloat16"):
        chosen(mini["marlin"], "auto", "int8")
