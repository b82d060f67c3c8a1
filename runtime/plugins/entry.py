"""What the engines call at start-up, in each of their processes (entry points in pyproject.toml).

This module imports nothing of theirs, so that looking the entry points up costs nothing. An engine
that cannot be extended is left alone: it may be serving something else, and it refuses a converted
folder by itself, as it finds no weights there.
"""

import sys
from importlib import import_module


def vllm() -> None:
    """Register `--load-format kconvert` with vLLM (group `vllm.general_plugins`)."""
    _register("vllm")


def sglang() -> None:
    """Let SGLang load folders that have a kconvert.json (group `sglang.srt.plugins`)."""
    _register("sglang")


def _register(engine: str) -> None:
    try:
        import_module(f"kconvert.runtime.plugins.{engine}").register()
    except Exception as error:  # another version's modules, names or signatures: anything
        print(
            f"kconvert: this version of {engine} cannot be extended"
            f" ({type(error).__name__}: {error}), so it cannot serve converted folders; everything"
            " else works as before.",
            file=sys.stderr,
            flush=True,
        )
