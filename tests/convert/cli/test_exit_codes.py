"""One table from errors to exit codes, and the page that says so."""

import builtins
import re
from pathlib import Path

import pytest
import typer

import kconvert.layouts
from kconvert.convert.cli.common import EXIT_CODES, explained
from kconvert.layouts.errors import KconvertError

PAGE = (Path(__file__).parents[3] / "API.md").read_text()
ROWS = re.findall(r"^\| `(\w+)` \| `(\w+)` \| .* \| (\d) \|$", PAGE, re.MULTILINE)
CLASSES = {
    name for name, value in vars(kconvert.layouts).items()
    if isinstance(value, type) and issubclass(value, KconvertError)
}  # fmt: skip


def code_of(error: BaseException) -> int:
    @explained
    def command() -> None:
        raise error

    with pytest.raises(typer.Exit) as ended:
        command()
    return ended.value.exit_code


def test_the_page_has_every_class() -> None:
    assert {name for name, _, _ in ROWS} == CLASSES - {"KconvertError"}


@pytest.mark.parametrize(("name", "builtin", "code"), ROWS)
def test_the_page_is_right(name: str, builtin: str, code: str, capsys) -> None:
    kind = getattr(kconvert.layouts, name)
    assert issubclass(kind, getattr(builtins, builtin))
    assert code_of(kind("something is wrong.")) == int(code)
    assert capsys.readouterr().err == "kconvert: something is wrong.\n"


def test_the_table() -> None:
    """Whoever changes it changes what scripts rely on."""
    assert [(kind.__name__, code) for kind, code in EXIT_CODES] == [
        ("UnavailableError", 3), ("KconvertError", 2), ("OSError", 3), ("MemoryError", 3),
    ]  # fmt: skip
    assert code_of(PermissionError(13, "Permission denied", "/x")) == 3
    assert code_of(MemoryError()) == 3
    with pytest.raises(ZeroDivisionError):  # a bug stays one
        code_of(ZeroDivisionError())
