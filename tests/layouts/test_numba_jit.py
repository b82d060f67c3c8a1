"""The kernels are compiled once a machine, and work where nothing can be cached."""

import os
import subprocess
import sys
from pathlib import Path

PROBE = (
    "import numpy as np, sys, time\n"
    "from kconvert.layouts import marlin, repack\n"
    "marlin.pack_weight(np.zeros((64, 32), np.int32))\n"
    "stats = getattr(repack.repack_marlin, 'stats', None)\n"
    "print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))\n"
)


def probe(**environment: str) -> str:
    outcome = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True,
        env={**os.environ, **environment},
    )  # fmt: skip
    return outcome.stdout.strip()


def test_second_process_loads_what_the_first_compiled(tmp_path: Path) -> None:
    assert probe(NUMBA_CACHE_DIR=str(tmp_path)) == "0 1"
    assert probe(NUMBA_CACHE_DIR=str(tmp_path)) == "1 0"


def test_install_folder_that_is_read_only(tmp_path: Path) -> None:
    """The user's own cache folder is used then: a copy of the code on which nothing can be
    created (`__pycache__` is a file there, which stops root too)."""
    install = tmp_path / "install"
    code = install / "kconvert/layouts"
    code.mkdir(parents=True)
    import kconvert.layouts

    for path in Path(kconvert.layouts.__path__[0]).glob("*.py"):
        (code / path.name).write_bytes(path.read_bytes())
    (code / "__pycache__").write_text("not a folder")
    where = {"PYTHONPATH": str(install), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    # The editable install's finder would come first.
    program = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f)]\n"
    )
    for expected in ("0 1", "1 0"):
        outcome = subprocess.run(
            [sys.executable, "-c", program + PROBE + "print(repack.__file__)"],
            capture_output=True, text=True, check=True, env={**os.environ, **where},
        )  # fmt: skip
        counts, file = outcome.stdout.split("\n")[:2]
        assert file == str(code / "repack.py")
        assert counts == expected


def test_no_folder_to_cache_in() -> None:
    """Numba refuses to decorate then; without our fallback the import would fail."""
    refusing = (
        "from numba.core import caching\n"
        "def refuse(*_): raise RuntimeError('cannot cache function: no locator available')\n"
        "caching.FunctionCache.__init__ = refuse\n"
    )
    for _ in range(2):
        outcome = subprocess.run(
            [sys.executable, "-c", refusing + PROBE], capture_output=True, text=True, check=True
        )
        assert outcome.stdout.strip() == "0 1"
