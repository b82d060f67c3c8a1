"""The entry points: named as the engines look for them, harmless where the engine is another."""

import ast
import subprocess
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


def test_what_is_imported() -> None:
    """Looking the entry points up, and the part that knows no engine: no torch, no compiler."""
    modules = ["plugins.entry", "filling.filler", "plugins.loading"]
    code = (
        "import sys\n"
        + "".join(f"import kconvert.runtime.{name}\n" for name in modules)
        + "print(sorted({m.partition('.')[0] for m in sys.modules}))"
    )
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    loaded = set(ast.literal_eval(outcome.stdout))
    own = {name for name in loaded if not name.startswith("_")} - set(sys.stdlib_module_names)
    assert own <= {"kconvert", "numpy", "xxhash", "safetensors"}
    assert {"numpy", "xxhash"} <= own
