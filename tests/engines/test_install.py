"""kconvert installs beside the engines: pip finds versions for both (it downloads nothing but what
the packages say of themselves; minutes an engine, and the package index is needed)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "engine", ["vllm==0.26.0", "vllm==0.32.0", "vllm==0.33.0", "sglang==0.5.17", "sglang==0.5.23"]
)
def test_pip_finds_versions_for_both(engine: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ["--dry-run", "--ignore-installed", "-q", "--report", str(report)]
    outcome = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, str(ROOT), engine],
        capture_output=True, text=True,
    )  # fmt: skip
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    found = {
        item["metadata"]["name"].lower(): item["metadata"]["version"]
        for item in json.loads(report.read_text())["install"]
    }
    name, _, version = engine.partition("==")
    assert found[name] == version
    assert "kconvert" in found
