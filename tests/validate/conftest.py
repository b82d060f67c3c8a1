"""An output of the small checkpoint, made once; tests that change one make their own."""

from pathlib import Path

import pytest
from kit import KIMI_MINI

from kconvert.convert import convert


@pytest.fixture(scope="session")
def output(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("validate") / "out"
    convert(KIMI_MINI, folder, tp=2)
    return folder
