"""The engine on a GPU: every mode, budget, bucket and prompt step gives the bits of ar."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kconvert.convert import convert
from kconvert.runtime.bench.prompts import read_prompts
from kconvert.runtime.engine import Engine, Generation
from kconvert.runtime.smoke import first_difference

pytestmark = pytest.mark.gpu

TINY = Path(__file__).parents[1] / "tiny_kimi"
PROMPTS = read_prompts(TINY / "held_out.json", None)
NEW = 64


@pytest.fixture(scope="module")
def blobs(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("tiny") / "one"
    convert(TINY / "model", output)
    return output


@pytest.fixture(scope="module")
def engine(blobs: Path) -> Engine:
    return Engine.open(blobs, TINY / "drafter", device="cuda")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_mode_and_bucket_gives_the_bits_of_ar(
    temperature: float, engine, monkeypatch
) -> None:
    rounds = engine.decoder.rounds
    for seed, prompt in enumerate(PROMPTS[::20]):
        options = {"temperature": temperature, "seed": seed, "keep_logits": True}
        truth = engine.generate(prompt, NEW, **options)
        assert first_difference(engine.generate(prompt, NEW, **options), truth, 0) is None
        for mode, budget in (
            ("chain", 1), ("chain", 4), ("chain", 7), ("ddtree", 1), ("ddtree", 4), ("ddtree", 7),
            ("ddtree", 16), ("ddtree", 33), ("ddtree", 64), ("ddtree", "auto"),
        ):  # fmt: skip
            made = engine.generate(prompt, NEW, mode, budget, **options)
            assert first_difference(made, truth, len(prompt)) is None, (mode, budget)
        for mode, budget, bucket in (
            ("ar", 0, 8), ("ar", 0, 65), ("chain", 4, 16), ("ddtree", 7, 33), ("ddtree", 7, 65),
        ):  # fmt: skip
            monkeypatch.setattr(engine.decoder, "rounds", partial(rounds, bucket=bucket))
            made = engine.generate(prompt, NEW, mode, budget, **options)
            assert first_difference(made, truth, len(prompt)) is None, (mode, budget, bucket)
        monkeypatch.setattr(engine.decoder, "rounds", rounds)


def test_without_looking_at_logits_the_text_is_the_same(engine) -> None:
    """Then the host launches a step ahead of what it reads."""
    for prompt in PROMPTS[:6]:
        truth = engine.generate(prompt, NEW, keep_logits=True)
        for mode, budget in (("ar", 0), ("ddtree", 16), ("ddtree", "auto")):
            assert engine.generate(prompt, NEW, mode, budget).tokens == truth.tokens, mode


def test_a_prompt_in_steps_and_a_text_resumed(engine, monkeypatch) -> None:
    rounds = engine.decoder.rounds
    text = [token for prompt in PROMPTS[:40] for token in prompt][:1100]
    made: dict[int, Generation] = {}
    for rows in (1024, 330, 64, 1):
        monkeypatch.setattr(engine.decoder, "rounds", partial(rounds, prefill_rows=rows))
        made[rows] = engine.generate(text, 24, "ddtree", 16, keep_logits=True)
        assert first_difference(made[rows], made[1024], len(text)) is None, rows
    monkeypatch.setattr(engine.decoder, "rounds", rounds)
    truth = made[1024]
    for cut in (1, 9, 17):
        resumed = engine.generate(text + truth.tokens[:cut], 24 - cut, keep_logits=True)
        later = Generation(tokens=truth.tokens[cut:], logits=truth.logits[cut:])
        assert first_difference(resumed, later, 0) is None


def test_long_contexts(engine) -> None:
    """Around boundaries of prefix, parts, and up to 8k."""
    text = [token for prompt in PROMPTS for token in prompt]
    text = (text * (1 + 8200 // len(text)))[:8200]
    for length in (30, 33, 63, 64, 65, 94, 95, 96, 97, 127, 128, 160, 500, 2047, 4090, 8100):
        truth = engine.generate(text[:length], 40, keep_logits=True)
        made = engine.generate(text[:length], 40, "ddtree", 16, keep_logits=True)
        assert first_difference(made, truth, length) is None, length


def test_logits_are_the_cpus(engine, blobs) -> None:
    cpu = Engine.open(blobs, dtype="bfloat16", device="cpu")
    for prompt in PROMPTS[:10]:
        found, wanted = engine.logits(prompt), cpu.logits(prompt)
        rows = np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
        assert np.median(rows) <= 1e-2 and (rows <= 3e-2).mean() >= 0.95, rows.max()


def test_rejected_slots_are_nan(engine) -> None:
    import torch

    engine.generate(PROMPTS[0], 20, "ddtree", 16, keep_logits=True)
    decoder = engine.decoder
    start, _, before, accepted, count = decoder._state[:5].tolist()
    keys = decoder._cache.keys
    assert start == before + accepted
    assert torch.isfinite(keys[:, :start]).all()
    assert keys[:, start : before + count].isnan().all() and count > accepted
