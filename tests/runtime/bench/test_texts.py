"""What `bench exact` runs beside its prompts, and how near two engines' logits are."""

import json
from pathlib import Path

import numpy as np
import pytest

from kconvert.convert import convert
from kconvert.convert.cli.bench_text import exact_text
from kconvert.runtime.backends.torch_twins import TwinBackend
from kconvert.runtime.bench import texts
from kconvert.runtime.bench.agreement import MOST_TOSSES, NEAR, agreement
from kconvert.runtime.bench.exact import bench_exact
from kconvert.runtime.bench.prompts import read_prompts
from kconvert.runtime.bench.texts import CONTEXTS
from kconvert.runtime.distributed import Ranks
from kconvert.runtime.engine import Engine
from kconvert.runtime.model import Model
from kconvert.runtime.weights import Blobs

TINY = Path(__file__).parents[2] / "tiny_kimi"
PROMPTS = read_prompts(TINY / "held_out.json", 3)


@pytest.fixture(scope="module")
def blobs(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("texts") / "one"
    convert(TINY / "model", output)
    return output


@pytest.fixture(autouse=True)
def short(monkeypatch) -> None:
    monkeypatch.setattr(texts, "NEW", 12)


def exact(blobs: Path, longest: int) -> dict:
    return bench_exact(
        [blobs], TINY / "drafter", PROMPTS[:1], 2, lambda _: None, (0.8,), ("bfloat16",), "cpu",
        longest,
    )  # fmt: skip


def test_longer_texts_are_exact_too(blobs: Path) -> None:
    table = exact(blobs, 33)
    rows = [row for row in table["rows"] if "what" in row]
    kinds = [("context", "chain"), ("context", "ddtree")]
    for mode in ("ar", "ddtree"):
        kinds += [(what, mode) for what in ("prompt rows", "resumed after", "again")]
    assert [(row["what"], row["mode"]) for row in rows] == kinds
    assert table["exact"] and all(row["tokens"] for row in rows)
    assert "texts of up to 33, every logit bit is ar's" in exact_text(table)


def test_a_difference_is_named_by_its_text(blobs: Path, monkeypatch) -> None:
    real = Engine.generate

    def generate(self, prompt, *rest, prompt_rows=None, **options):
        made = real(self, prompt, *rest, **options)
        if prompt_rows == 330 or len(prompt) == 31:
            made.logits[0] = -made.logits[0]
        return made

    monkeypatch.setattr(Engine, "generate", generate)
    table = exact(blobs, 30)
    differ = {(row["what"], row["mode"]): row["differ"] for row in table["rows"] if "what" in row}
    assert differ["prompt rows", "ar"] == {330: 30} == differ["prompt rows", "ddtree"]
    assert differ["resumed after", "ar"] == {1: 31} and differ["context", "chain"] == {}
    assert "T 0.8 ddtree 16, prompt rows 330: position 30" in exact_text(table)


def test_contexts_end_around_every_boundary() -> None:
    for boundary in (64, 96, 128, 330, 1024):
        assert {boundary - 1, boundary + 1} <= {*CONTEXTS, 329, 331}
    assert max(CONTEXTS) > 8000 and max(CONTEXTS) + 40 <= 8192


def test_how_near_the_twins_are(blobs: Path) -> None:
    """Where routers choose alike, near; a choice that was no toss is told from one that was."""
    cpu = Engine.open(blobs, dtype="bfloat16", device="cpu")
    model = cpu.model
    twin = Engine(Model(model.config, Blobs(blobs, Ranks()), TwinBackend(model.config, "bfloat16")),
                  None)  # fmt: skip
    near = agreement(twin, cpu, PROMPTS)
    assert near["positions"] == sum(map(len, PROMPTS))
    assert near["tossed_share"] <= MOST_TOSSES and near["unlike"] == 0
    assert 0 < near["median"] < near["largest"] <= NEAR and near["further_than_near"] == 0
    assert json.loads(json.dumps(near)) == near

    real = model.backend.route

    def other(logits, bias, step):
        ids, weights = real(logits, bias, step)
        ids[0, 0] = next(e for e in range(16) if e not in ids[0])  # of a chunk's first row
        return ids, weights

    model.backend.route = other
    near = agreement(cpu, twin, [PROMPTS[0]])
    assert near["tossed"] >= 1 and near["unlike"] >= 1 and near["widest_margin"] > 1e-2
    assert np.isfinite(near["largest"])
