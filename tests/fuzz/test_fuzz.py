"""Mutated headers, indexes, configs and outputs: each is taken or refused in one sentence.

The long run is `cd tests && python -m fuzz --count 100000`.
"""

import json
import time
from collections.abc import Iterator
from functools import partial

import pytest
from fuzz import harness
from fuzz.folders import World
from fuzz.targets import TARGETS

from kconvert.layouts import header
from kconvert.layouts.errors import CheckpointError


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with harness.made_world() as made:
        yield made


def test_two_thousand_cases(world: World) -> None:
    report = harness.run(world, 2000, seed=7)
    assert report.failures == []
    assert report.cases.keys() == TARGETS.keys()
    for name in TARGETS:
        assert report.accepted[name] and report.refused[name], name
    assert report.refusal_places > 40
    assert report.accepted.total() + report.refused.total() == report.cases.total() == 2000
    assert report.growth_bytes < 1 << 30


def test_a_case_is_the_same_alone(world: World) -> None:
    """What a failure is reported with is enough to see it again."""
    together = harness.run(world, 60, seed=3)
    second, first = harness.run(world, 40, seed=3, first=20), harness.run(world, 20, seed=3)
    assert json.loads(json.dumps(together.table()))["cases"] == together.cases
    for field in ("cases", "accepted", "refused"):
        parts = getattr(first, field) + getattr(second, field)
        assert getattr(together, field) == parts


def _refuse(text: str, *_: object) -> None:
    raise CheckpointError(text)


def _raise(error: Exception, *_: object) -> None:
    raise error


# What a product must not do, and what the report says of it.
FAULTS = {
    "a mistake": (partial(_raise, KeyError("dtype")), "KeyError: \"'dtype'\""),
    "recursion": (partial(_raise, RecursionError("deep")), "RecursionError: 'deep'"),
    "an OSError without a number": (partial(_raise, OSError("odd")), "OSError: 'odd'"),
    "no end": (lambda *_: time.sleep(9), "Hang: 'more than 0.5 s'"),
    "2 GiB": (lambda *_: bytearray(2 << 30), "MemoryError: ''"),
    "nothing said": (partial(_refuse, " "), "an empty sentence"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_reported(name: str, world: World, monkeypatch) -> None:
    fault, reason = FAULTS[name]
    monkeypatch.setattr(header, "parse_header", fault)
    monkeypatch.setitem(TARGETS, "header", (lambda *_: header.parse_header() or [], 1))
    report = harness.run(world, 3, seed=5, first=1000, only="header", seconds=0.5)
    assert report.failed == 3
    (failure,) = report.failures  # the same place three times
    assert (failure.target, failure.seed, failure.case, failure.times) == ("header", 5, 1000, 3)
    assert failure.reason == reason


@pytest.mark.parametrize("sentence", ["a\nb", "a\x1b[2Jb", "x" * 1001, "\ud800", ""])
def test_sentences_that_cannot_be_shown(sentence: str) -> None:
    assert harness.unreadable(sentence)


def test_a_sentence_that_can() -> None:
    assert harness.unreadable("model.safetensors, tensor λ: dtype 'I31' is not one of …") is None
