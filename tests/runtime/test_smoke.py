"""`kconvert smoke-generate` as a user runs it, on random weights and token ids."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
from kit import KIMI_MINI

from kconvert.convert import convert
from kconvert.runtime import smoke
from kconvert.runtime.engine import Engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    convert(KIMI_MINI, tmp_path_factory.mktemp("smoke") / "out")
    return tmp_path_factory.getbasetemp() / "smoke0/out"


def test_generate_and_check(folder: Path, kconvert) -> None:
    outcome = kconvert(
        "smoke-generate", folder, "--tokens", "1,2,3", "--max-new-tokens", 6, "--check-exact"
    )
    assert outcome.code == 0
    assert "6 tokens" in outcome.out and "6 target forwards" in outcome.out
    assert "exact: every token and logit bit is ar's" in outcome.out
    arguments = ("smoke-generate", folder, "--tokens", "1,2,3", "--max-new-tokens", 6, "--json")
    table = json.loads(kconvert(*arguments).out)
    assert table["tokens"] == Engine.open(folder).generate([1, 2, 3], 6).tokens
    assert [line for line in outcome.out.splitlines() if line.startswith("[")] == [
        f"[{token}]" for token in table["tokens"]
    ]


def test_a_difference_is_found(folder: Path, kconvert, monkeypatch) -> None:
    """One flipped bit of one logit, another token, an early end."""
    truth = Engine.open(folder).generate([1, 2, 3], 6, keep_logits=True)
    assert smoke.first_difference(truth, truth, 3) is None
    flipped = copy.deepcopy(truth)
    flipped.logits[4].view(np.uint32)[7] ^= 1
    assert smoke.first_difference(truth, flipped, 3) == 7
    other = copy.deepcopy(truth)
    other.tokens[2] += 1
    assert smoke.first_difference(other, truth, 3) == 5
    assert (
        smoke.first_difference(
            Engine.open(folder).generate([1, 2, 3], 4, keep_logits=True), truth, 3
        )
        == 7
    )
    monkeypatch.setattr(smoke, "first_difference", lambda *_: 7)
    outcome = kconvert("smoke-generate", folder, "--tokens", "1,2,3", "--check-exact")
    assert outcome.code == 1
    assert "NOT EXACT: position 7 is the first that differs" in outcome.out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "give either --prompt or --tokens"),
        (["--tokens", "1,x"], "'1,x' is not a list like 1,2,3"),
        (["--prompt", "hello"], "has no tiktoken.model"),
        (["--tokens", "1,600"], "token id 600 is out of range"),
        (["--tokens", "1", "--mode", "chain"], "needs a drafter"),
        (["--tokens", "1", "--budget", "many"], "neither auto nor a number"),
        (["--tokens", "1", "--dtype", "int8"], "dtype 'int8'"),
        (["--tokens", "1", "--temperature", "-1"], "temperature -1"),
        (["--tokens", "1", "--drafter", KIMI_MINI], "drafter"),
    ],
)
def test_refused(options, words: str, folder: Path, kconvert) -> None:
    outcome = kconvert("smoke-generate", folder, *options)
    assert outcome.code == 2
    assert words in outcome.err
