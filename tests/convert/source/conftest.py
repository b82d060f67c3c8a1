"""Commands against the test Hub, by the real client."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hub.server import Hub, environment
from kit import KIMI_MINI

REPO = "moonshotai/Kimi-mini"


class Ended(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        hub.add_repo(REPO, KIMI_MINI)
        yield hub


@pytest.fixture
def command(hub, tmp_path: Path) -> Callable[..., Ended]:
    """Runs kconvert in a process of its own, with a cache of its own."""

    def run(*arguments: object, **more: str) -> Ended:
        code = [sys.executable, "-m", "kconvert.convert.cli", *map(str, arguments)]
        env = environment(hub.url, tmp_path / "home") | more
        made = subprocess.run(code, env=env, capture_output=True, text=True, timeout=120)
        assert "Traceback" not in made.stderr
        return Ended(made.returncode, made.stdout, made.stderr)

    return run
