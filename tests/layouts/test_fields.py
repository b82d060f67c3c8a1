"""Fields of config.json: read as what they are, and named if they are not that."""

import pytest

from kconvert.layouts.errors import CheckpointError, UnsupportedError
from kconvert.layouts.fields import ANY, check_fields, flag, natural, positive, real, text_config


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "8", None, 1 << 40])
def test_sizes(value: object) -> None:
    assert positive({"n": 8}, "n") == 8
    with pytest.raises(CheckpointError, match=r"config\.json: n is "):
        positive({"n": value}, "n")


def test_what_may_be_absent() -> None:
    assert natural({}, "n", 3) == natural({"n": None}, "n", 3) == 3
    assert natural({"n": 0}, "n", 3) == 0
    assert flag({}, "f", None) is None and flag({"f": False}, "f", True) is False
    assert real({}, "x", 1.5) == 1.5 and real({"x": 2}, "x") == 2.0


@pytest.mark.parametrize(
    ("read", "value"),
    [(natural, -1), (natural, False), (flag, 1), (flag, "true"), (real, True), (real, "1"),
     (real, float("nan")), (real, float("inf")), (real, 0)],
)  # fmt: skip
def test_what_is_something_else(read, value: object) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: x is "):
        read({"x": value}, "x", True if read is flag else 1)


def test_a_number_that_must_be_there() -> None:
    with pytest.raises(CheckpointError, match="x is None, expected a number"):
        real({}, "x")


def test_tables_of_known_fields() -> None:
    known = {"bits": (4, 8), "name": ANY}
    check_fields("q", {"bits": 4, "name": object()}, known)
    for table, kind, words in (
        ({"bits": 3}, UnsupportedError, r"q\.bits is 3, only 4 or 8"),
        ({"bits": True}, UnsupportedError, r"q\.bits is true"),
        ({"other": 1}, UnsupportedError, r"q\.other is not a field this version knows"),
        ([], CheckpointError, "q is not an object"),
    ):
        with pytest.raises(kind, match=words):
            check_fields("q", table, known)


def test_the_text_model_of_a_wrapper() -> None:
    assert text_config({"text_config": {"a": 1}}) == {"a": 1}
    assert text_config({"a": 1}) == {"a": 1}
    with pytest.raises(CheckpointError, match="text_config is not an object"):
        text_config({"text_config": 1})
