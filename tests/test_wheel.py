"""The wheel holds everything: built, installed beside the libraries, used from outside the tree."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from kit import KIMI_MINI

ROOT = Path(__file__).parent.parent
FOLDERS = ("layouts", "convert", "validate", "runtime")


def run(*command: str | Path, cwd: Path) -> str:
    """The output of a command that must succeed, in an environment that knows no checkout."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    outcome = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return outcome.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, as building writes beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, tree / name)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", folder)
    run(sys.executable, "-m", "pip", "wheel", *options, tree, cwd=folder)
    (built,) = folder.glob("kconvert-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """The bin folder of an environment with the wheel and this one's libraries."""
    folder = wheel.parent / "venv"
    venv.create(folder, symlinks=True)
    python = folder / "bin/python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(run(python, "-c", code, cwd=folder).strip())
    libraries = Path(sysconfig.get_path("purelib"))
    # As a path alone, so that this environment's own .pth files (the checkout) are not read.
    (packages / "libraries.pth").write_text(f"{libraries}\n")
    if (libraries / "nvidia").is_dir():  # NVRTC is looked for in site-packages, not on the path
        (packages / "nvidia").symlink_to(libraries / "nvidia")
    options = ("--no-deps", "--no-index", "-q")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, cwd=folder)
    return folder / "bin"


def test_every_module_and_kernel_is_in_it(wheel: Path) -> None:
    expected = {
        f"kconvert/{path.relative_to(ROOT).as_posix()}"
        for name in FOLDERS
        for pattern in ("*.py", "py.typed", "*.cu", "*.cuh", "*.html", "schema/*.json")
        for path in (ROOT / name).rglob(pattern)
    }
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert found == expected


def test_it_works_from_outside_the_tree(installed: Path, tmp_path: Path) -> None:
    kconvert, out = installed / "kconvert", tmp_path / "out"
    code = "import kconvert.layouts; print(kconvert.layouts.__file__)"
    assert str(installed.parent) in run(installed / "python", "-c", code, cwd=tmp_path)
    run(kconvert, "convert", KIMI_MINI, out, cwd=tmp_path)
    said = run(kconvert, "validate", out, "--source", KIMI_MINI, cwd=tmp_path)
    assert said.startswith("ok: ")
    tokens = ("--tokens", "1,2,3", "--max-new-tokens", "2", "--check-exact")
    assert "exact: every token" in run(kconvert, "smoke-generate", out, *tokens, cwd=tmp_path)


def test_its_kernels_compile(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("cuda.core", reason="the cuda extra is not installed")
    code = (
        "from kconvert.runtime.kernels.nvrtc import compile_cubin\n"
        "defines = {'HIDDEN': 7168, 'TOP_K': 8}\n"
        "print(len(compile_cubin('moe/combine', 'sm_90a', defines)[0]))\n"
    )
    assert int(run(installed / "python", "-c", code, cwd=tmp_path)) > 1000
