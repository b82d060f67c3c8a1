"""The engine on a GPU: every mode, budget, bucket and prompt step gives the bits of ar."""

from itertools import cycle, islice
from pathlib import Path

import pytest

from kconvert.convert import convert
from kconvert.runtime.bench.agreement import MOST_TOSSES, agreement
from kconvert.runtime.bench.prompts import read_prompts
from kconvert.runtime.bench.texts import cases, rows_of
from kconvert.runtime.engine import Engine
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
def test_every_mode_and_bucket_gives_the_bits_of_ar(temperature: float, engine) -> None:
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
            made = engine.generate(prompt, NEW, mode, budget, bucket=bucket, **options)
            assert first_difference(made, truth, len(prompt)) is None, (mode, budget, bucket)


def test_without_looking_at_logits_the_text_is_the_same(engine) -> None:
    """Then the host launches a step ahead of what it reads."""
    for prompt in PROMPTS[:6]:
        truth = engine.generate(prompt, NEW, keep_logits=True)
        for mode, budget in (("ar", 0), ("ddtree", 16), ("ddtree", "auto")):
            assert engine.generate(prompt, NEW, mode, budget).tokens == truth.tokens, mode


def test_longer_texts(engine) -> None:
    """Contexts up to 8k around every boundary, prompts in steps of other sizes, texts resumed,
    every bucket, and the slots that each step leaves: what `bench exact` runs beside its prompts.
    """
    text = list(islice(cycle(token for prompt in PROMPTS for token in prompt), 8192))
    found = rows_of(engine, text, cases(engine, len(text)), slice(None), 0.8)
    assert {row["what"] for row in found} == {
        "context", "prompt rows", "resumed after", "again", "bucket",
    }  # fmt: skip
    assert not any(row["differ"] for row in found), found


def test_logits_are_the_cpus(engine, blobs) -> None:
    """Where the routers choose the same experts; where they do not it was a toss."""
    near = agreement(engine, Engine.open(blobs, dtype="bfloat16", device="cpu"), PROMPTS[:10])
    print(near)
    assert near["tossed_share"] <= MOST_TOSSES and near["unlike"] == 0
    assert near["further_than_near"] == 0 and near["median"] <= 1e-2


def test_rejected_slots_are_nan(engine) -> None:
    engine.generate(PROMPTS[0], 20, "ddtree", 16, keep_logits=True)
    decoder = engine.decoder
    start, _, before, accepted, count = decoder._state[:5].tolist()
    assert start == before + accepted and count > accepted
    assert decoder.wrong_slot() is None
    for slot, value in ((start - 1, float("nan")), (start, 0.0)):
        decoder._cache.keys[1, slot, 3] = value
        assert decoder.wrong_slot() == slot
        decoder._cache.keys[1, slot] = 0.0 if slot < start else float("nan")
