"""Fixtures for the whole suite."""

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import kit
import pytest

from kconvert.convert.cli import main as cli


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def interruptible() -> Iterator[None]:
    """What is started here takes SIGINT, also where we ignore it (nohup, a job of CI)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def mini(tmp_path: Path) -> Path:
    """A kimi-mini that the test may change."""
    return kit.copy_mini(tmp_path / "source")


@pytest.fixture
def kconvert(monkeypatch, capsys) -> Callable[..., Outcome]:
    """Run a command line in this process; an exception that gets out is a failed test."""

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["kconvert", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.run()
        captured = capsys.readouterr()
        return Outcome(ended.value.code or 0, captured.out, captured.err)

    return run
