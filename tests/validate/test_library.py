"""The outside opinion: loaded only if there is a source, and not silently."""

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from kit import KIMI_MINI

from kconvert.convert import convert
from kconvert.layouts.quantization import Quantization
from kconvert.validate import library


def test_no_torch_without_a_source(tmp_path: Path) -> None:
    convert(KIMI_MINI, tmp_path / "out")
    code = (
        "import sys; from kconvert.validate import validate;"
        f" print(validate({str(tmp_path / 'out')!r}).ok,"
        " {'torch', 'compressed_tensors'} & set(sys.modules))"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert made.stdout == "True set()\n", made.stderr


def test_it_says_what_it_waits_for(monkeypatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(library, "said_if_slow", lambda text: said.append(text) or nullcontext())
    codes = library.library_codes(Quantization(32), np.array([[0x76543210]], np.int32))
    assert codes.tolist() == [[-8, -7, -6, -5, -4, -3, -2, -1]]
    assert said == ["loading compressed-tensors and torch, which decode the source's codes too"]
