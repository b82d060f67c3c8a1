"""Without the extra `hub`, or with an engine's older client, the Hub is refused in one sentence;
folders are converted as always."""

import sys

import pytest

from kconvert.convert import source
from kconvert.layouts.errors import UnavailableError


@pytest.mark.parametrize("version", ["1.31.0", "2.3.9", None])
def test_an_older_client_or_none(monkeypatch, version: str | None) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise source.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(source, "version", installed)
    with pytest.raises(UnavailableError, match=r"pip install 'kconvert\[hub\]'"):
        source.open_hub("moonshotai/Kimi-K2.6", None)


@pytest.mark.parametrize("library", ["httpx2", "huggingface_hub"])
def test_a_library_that_is_not_there(monkeypatch, library: str) -> None:
    for name in [name for name in sys.modules if name.startswith("kconvert.convert.source.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(source, "hub", raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UnavailableError, match=r"pip install 'kconvert\[hub\]'"):
        source.open_hub("moonshotai/Kimi-K2.6", None)


def test_the_command_line_says_it(monkeypatch, kconvert, tmp_path) -> None:
    monkeypatch.setattr(source, "version", lambda name: "1.31.0")
    outcome = kconvert("convert", "moonshotai/Kimi-K2.6", tmp_path / "out")
    assert outcome.code == 3
    assert "huggingface_hub 1.31 is installed" in outcome.err
    assert outcome.err.count("\n") == 1
