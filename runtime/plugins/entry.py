"""What the engines call at start-up, in each of their processes (entry points in pyproject.toml).

This module imports nothing of theirs, so that looking the entry points up costs nothing.
"""

import os
import sys
import traceback


def vllm() -> None:
    """Register `--load-format kconvert` with vLLM (group `vllm.general_plugins`)."""
    from kconvert.runtime.plugins.vllm import register

    register()


def sglang() -> None:
    """Let SGLang load folders that have a kconvert.json (group `sglang.srt.plugins`)."""
    try:
        from kconvert.runtime.plugins.sglang import register

        register()
    except Exception:
        # SGLang would log it and go on without us; then nobody would know why loading fails.
        traceback.print_exc()
        sys.stderr.write(
            "kconvert: this SGLang cannot be extended; SGLANG_PLUGINS leaves it out.\n"
        )
        sys.stderr.flush()
        os._exit(1)
