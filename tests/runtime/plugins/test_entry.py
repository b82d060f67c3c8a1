"""The entry points: named as the engines look for them, harmless where the engine is another."""

import sys
from importlib.metadata import entry_points

import pytest

from kconvert.runtime.plugins import entry


@pytest.mark.parametrize("group", ["vllm.general_plugins", "sglang.srt.plugins"])
def test_they_are_found(group: str) -> None:
    (found,) = (point for point in entry_points(group=group) if point.name == "kconvert")
    assert found.load() in (entry.vllm, entry.sglang)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_that_cannot_be_extended_is_left_alone(engine: str, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, engine, None)
    monkeypatch.delitem(sys.modules, f"kconvert.runtime.plugins.{engine}", raising=False)
    getattr(entry, engine)()
    said = capsys.readouterr().err
    assert f"this version of {engine} cannot be extended (ModuleNotFoundError" in said
    assert said.count("\n") == 1
