"""The small trained model with its trained drafter: exact, and faster, on held-out text."""

import json
from pathlib import Path

import numpy as np
import pytest

from kconvert.convert import convert
from kconvert.runtime.bench.prompts import read_prompts
from kconvert.runtime.engine import Engine
from kconvert.runtime.smoke import first_difference
from kconvert.validate import validate

TINY = Path(__file__).parents[1] / "tiny_kimi"
PROMPTS = read_prompts(TINY / "held_out.json", None)
NEW = 48


@pytest.fixture(scope="module")
def blobs(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    for layout in ("marlin", "w4a16"):
        convert(TINY / "model", root / layout, layout=layout)
    return {layout: root / layout for layout in ("marlin", "w4a16")}


def test_it_converts_for_two_ranks_and_holds_the_source(tmp_path: Path) -> None:
    convert(TINY / "model", tmp_path / "out", tp=2)
    assert validate(tmp_path / "out", TINY / "model").ok


@pytest.mark.parametrize(
    ("layout", "dtype", "temperature"),
    [("marlin", "float32", 0.0), ("w4a16", "bfloat16", 0.0), ("marlin", "bfloat16", 0.9)],
)
def test_exact_with_the_real_drafter(layout, dtype, temperature, blobs) -> None:
    """A sample of `kconvert bench exact`, whose whole result is committed."""
    engine = Engine.open(blobs[layout], TINY / "drafter", dtype)
    for seed, prompt in enumerate(PROMPTS[::25]):
        options = {"temperature": temperature, "seed": seed, "keep_logits": True}
        truth = engine.generate(prompt, NEW, **options)
        for mode, budget in (("chain", 7), ("ddtree", 4), ("ddtree", 16), ("ddtree", 64)):
            made = engine.generate(prompt, NEW, mode, budget, **options)
            assert first_difference(made, truth, len(prompt)) is None, (mode, budget)


def test_drafts_are_worth_it(blobs) -> None:
    """On a sample of held-out prompts; `kconvert bench decode` has all of them."""
    engine = Engine.open(blobs["marlin"], TINY / "drafter")

    def committed(mode: str, budget: int) -> float:
        made = [engine.generate(prompt, NEW, mode, budget) for prompt in PROMPTS[:10]]
        return sum(len(m.tokens) - 1 for m in made) / sum(m.target_forwards - 1 for m in made)

    chain, rates = committed("chain", 7), [committed("ddtree", b) for b in (8, 16, 64)]
    assert chain > 2
    assert all(rate > chain for rate in rates) and rates == sorted(rates)


def test_it_has_learnt_to_write(blobs) -> None:
    """Held-out text is likelier to it than to a bigram model (tests/tiny_kimi/README.md)."""
    engine = Engine.open(blobs["marlin"])
    losses = []
    for prompt in PROMPTS[::5]:
        logits = engine.logits(prompt)[:-1].astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        likelihood = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        losses += (-likelihood[np.arange(len(logits)), prompt[1:]]).tolist()
    measured = json.loads((TINY / "training.json").read_text())
    assert np.mean(losses) < measured["bigram_loss"] - 0.5
