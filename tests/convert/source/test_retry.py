"""What is tried again, how often, and with which pauses."""

import pytest

from kconvert.convert.source.retry import Patience, TransferError
from kconvert.layouts.errors import CheckpointError, UnavailableError


def test_attempts_and_pauses() -> None:
    pauses: list[float] = []
    calls: list[int] = []

    def call(number: int) -> None:
        calls.append(number)
        raise TransferError("wrong bytes")

    with pytest.raises(UnavailableError, match=r"it: wrong bytes, 10 times; check the network"):
        Patience(10, pauses.append)("it", call)
    assert calls == list(range(10))
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_progress_counts_anew() -> None:
    """A link that breaks every ten megabytes gets through all the same."""
    got = [0]

    def call(number: int) -> int:
        got[0] += 1 if number % 3 == 0 else 0
        if got[0] == 20:
            return number
        raise OSError("the connection broke")

    pauses: list[float] = []
    assert Patience(4, pauses.append)("it", call, lambda: got[0]) == 57
    assert set(pauses) == {1, 2, 4}


def test_what_is_final_is_not_tried_again() -> None:
    calls = []

    def call(number: int) -> None:
        calls.append(number)
        raise CheckpointError("no such thing.")

    with pytest.raises(CheckpointError, match=r"^no such thing\.$"):
        Patience()("it", call)
    assert calls == [0]


def test_the_disks_own_errors_are_named() -> None:
    def call(_: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left") as caught:
        Patience()("model.safetensors", call)
    assert caught.value.filename == "model.safetensors"
