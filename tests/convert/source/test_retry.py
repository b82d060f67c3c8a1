"""What is tried again, how often, and with which pauses."""

import httpx2
import pytest
from huggingface_hub.errors import HfHubHTTPError

from kconvert.convert.source.retry import ContentError, Patience, TransferError
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


def test_the_same_wrong_content_twice_is_final() -> None:
    """It need not come twice in a row: it was no accident of the transfer."""
    contents = iter(["a", "b", "a", "c"])

    def call(_: int) -> None:
        raise ContentError("right", next(contents))

    with pytest.raises(UnavailableError, match="found, twice the same: the Hub's copy is damaged"):
        Patience(5, lambda _: None)("it", call)
    assert list(contents) == ["c"]


@pytest.mark.parametrize(
    ("status", "calls", "words"),
    [
        (404, 1, "hub.example answered 404, it does not have that"),
        (400, 1, "hub.example answered 400"),
        (429, 3, "wait for some minutes, or set HF_TOKEN"),
        (503, 3, "answered 503, 3 times; wait until that server is well again"),
    ],
)
def test_what_an_answer_advises(status: int, calls: int, words: str) -> None:
    numbers = []

    def call(number: int) -> None:
        numbers.append(number)
        request = httpx2.Request("GET", "https://hub.example/x")
        raise HfHubHTTPError("no", response=httpx2.Response(status, request=request))

    with pytest.raises(UnavailableError) as caught:
        Patience(3, lambda _: None)("it", call)
    assert words in str(caught.value) and "network" not in str(caught.value)
    assert len(numbers) == calls


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
