"""What is public is where it is looked for; importing it changes nothing in the host process."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("kconvert.layouts", "kconvert.convert", "kconvert.validate", "kconvert.runtime")
# The libraries first: what they change by themselves is theirs.
SCRIPT = """
import gc, importlib, logging, os, resource, signal, sys, threading, warnings
for library in ("compressed_tensors", "httpx2", "huggingface_hub", "matplotlib", "numba",
                "tiktoken", "torch", "tqdm", "transformers", "typer"):
    importlib.import_module(library)
import huggingface_hub.utils, torch

known = [log for log in logging.root.manager.loggerDict.values() if isinstance(log, logging.Logger)]

def state():
    return {
        "environment": dict(os.environ), "arguments": list(sys.argv), "path": list(sys.path),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads(),
                    threading.active_count()),
        "logging": [(log.name, log.level, list(log.handlers)) for log in (logging.root, *known)],
        "bars": huggingface_hub.utils.are_progress_bars_disabled(),
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "warnings": list(warnings.filters), "collector": (gc.isenabled(), gc.get_freeze_count()),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE), "folder": os.getcwd(),
    }

before = state()
for module in sys.argv[1:]:
    importlib.import_module(module)
after = state()
for what in before:
    assert before[what] == after[what], (what, before[what], after[what])
print("nothing changed")
"""
ENGINES = ("plugins.vllm", "plugins.sglang", "plugins.entry")  # import what is not installed
OURS = [
    ".".join(("kconvert", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for folder in ("layouts", "convert", "validate", "runtime")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.stem != "__main__"
]


def test_importing_changes_nothing_in_the_process() -> None:
    modules = [name for name in OURS if not name.endswith(ENGINES)]
    outcome = subprocess.run(
        [sys.executable, "-c", SCRIPT, *modules], capture_output=True, text=True, cwd=ROOT
    )
    assert outcome.stdout == "nothing changed\n", outcome.stderr[-2000:]


@pytest.mark.parametrize("package", PACKAGES)
def test_all_that_is_public_is_there_and_documented(package: str) -> None:
    module, page = import_module(package), (ROOT / "API.md").read_text()
    for name in module.__all__:
        assert getattr(module, name).__doc__, name
        assert re.search(rf"\b{name}\b", page), name
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        module.nothing  # noqa: B018
