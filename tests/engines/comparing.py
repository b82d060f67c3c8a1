"""What the tests of both engines share: folders, each made once, and what is asserted of runs."""

from pathlib import Path
from typing import Any

from engines import checkpoints, launch

from kconvert.convert import convert


class Folders:
    """Checkpoints and what is converted from them, each made once."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def source(self, name: str) -> Path:
        folder = self.root / name
        if not folder.exists():
            checkpoints.write(folder, wrapped=name == "k26")
        return folder

    def converted(self, name: str, layout: str, tp: int = 1, ep: int = 1) -> Path:
        folder = self.root / f"{name}-{layout}-{tp}-{ep}"
        if not folder.exists():
            convert(str(self.source(name)), folder, layout=layout, tp=tp, ep=ep)
        return folder


def assert_same(ours: launch.Run, stock: dict[str, Any], repacks: int) -> None:
    assert ours.result is not None, ours.log[-4000:]
    assert ours.result["tokens"] == stock["tokens"]
    assert ours.result["logprobs"] == stock["logprobs"]
    assert [rank["repacks"] for rank in ours.result["ranks"]] == [repacks] * len(stock["ranks"])
    for mine, theirs in zip(ours.result["ranks"], stock["ranks"], strict=True):
        assert mine["parameters"] == theirs["parameters"]


def assert_refused(run: launch.Run, *words: str) -> None:
    assert run.result is None
    for word in words:
        assert word in run.log, run.log[-4000:]
