"""The house as CONTRIBUTING.md has it: imports run one way, no circle, no room overflows."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("layouts", "convert", "validate", "runtime")
MAY_IMPORT = {
    "layouts": ("layouts",),
    "convert": ("layouts", "convert"),
    "convert.cli": ("layouts", "convert", "validate", "runtime"),
    "validate": ("layouts", "validate", "convert.source"),
    "runtime": ("layouts", "runtime"),
}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Our own modules that a file imports, and whether as soon as it is loaded itself. What is
    only for type checkers does not count."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: relative import"
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kconvert."):
            module = node.module.removeprefix("kconvert.")
            for name in node.names:
                inner = f"{module}.{name.name}"
                yield (inner if inner in MODULES else module), node in tree.body


def inside(module: str, parts: tuple[str, ...]) -> bool:
    return any(module == part or module.startswith(f"{part}.") for part in parts)


def test_imports_run_one_way() -> None:
    for module, path in MODULES.items():
        room = next(
            room for room in (module.rpartition(".")[0], "") if room in MAY_IMPORT or not room
        )
        allowed = MAY_IMPORT[room or module.partition(".")[0]]
        for other, at_once in imports(path):
            assert inside(other, allowed), f"{module} imports {other}"
            far = other.partition(".")[0] in ("validate", "runtime")
            assert not (module.startswith("convert") and far and at_once), (
                f"{module}: {other} early"
            )


def test_no_circle_also_no_lazy_one() -> None:
    """Each module can be loaded after all that it imports anywhere; a package's own `__init__`
    may load what lies in it."""
    edges = {
        module: {other for other, _ in imports(path) if other != module}
        for module, path in MODULES.items()
    }
    done: set[str] = set()
    while ready := [m for m, others in edges.items() if m not in done and others <= done]:
        done.update(ready)
    assert done == edges.keys(), sorted(edges.keys() - done)


@pytest.mark.parametrize(
    "module", ["kconvert.layouts", "kconvert.convert", "kconvert.validate", "kconvert.runtime"]
)
def test_a_package_loads_nothing_heavy(module: str) -> None:
    heavy = "{'torch', 'numba', 'compressed_tensors', 'huggingface_hub'}"
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert outcome.stdout.strip() == "[]", outcome.stderr


def test_files_and_folders_stay_small() -> None:
    for path in MODULES.values():
        assert len(path.read_text().splitlines()) <= 400, path
    for folder in {path.parent for path in MODULES.values()}:
        assert len([*folder.glob("*.py")]) <= 19, folder
