"""Starts an engine on a folder as a user would, with the CPU shim as one more plugin."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent


_STUB = """\
__version__ = "0"

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    members = {key: key for key in ("NEAREST", "BILINEAR", "BICUBIC", "LANCZOS", "BOX", "HAMMING")}
    return type(name, (), members | {"NEAREST_EXACT": "nearest-exact"})
"""


class Run(NamedTuple):
    """What came of it: the JSON of the case, or None, and all that was printed."""

    result: dict[str, Any] | None
    log: str


def write_plugins(folder: Path) -> None:
    """A distribution of the shim's, so that engines find its entry points."""
    info = folder / "cpu_shim-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu_shim\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ncpu_shim = cpu_shim:install_vllm\n"
        "[sglang.srt.plugins]\ncpu_shim = cpu_shim:install_sglang\n"
    )


def write_stub(folder: Path) -> None:
    """A torchvision that can be imported: SGLang asks for names of it at import, and PyPI's builds
    do not load beside a CPU build of torch."""
    for name in ("", "io", "transforms", "transforms/functional", "transforms/v2/functional"):
        module = folder / "torchvision" / name
        module.mkdir(parents=True, exist_ok=True)
        (module / "__init__.py").write_text(_STUB)
    (folder / "torchvision/transforms/v2/__init__.py").write_text(_STUB)


def run(case: str, folder: Path, arguments: dict[str, Any], timeout: int = 300, **env: str) -> Run:
    """`case` is vllm_case.py or sglang_case.py; `folder` is for what the run writes."""
    folder.mkdir(parents=True, exist_ok=True)
    write_plugins(folder)
    if case.startswith("sglang"):
        write_stub(folder)
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{HERE}:{folder}",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # for the parameters' digests
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **env,
    }
    outcome = subprocess.run(
        [sys.executable, str(HERE / case), str(result), json.dumps(arguments)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=timeout,
    )  # fmt: skip
    done = outcome.returncode == 0 and result.exists()
    return Run(json.loads(result.read_text()) if done else None, outcome.stdout)
