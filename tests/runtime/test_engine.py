"""The promise: chain and ddtree give what ar gives, bit for bit, whatever is drafted."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kit import KIMI_MINI

from kconvert.convert import convert
from kconvert.layouts.errors import (
    CheckpointError,
    KconvertError,
    UnfinishedOutputError,
    UnsupportedError,
)
from kconvert.runtime.cache import LatentCache
from kconvert.runtime.drafting.budget import Calibration, CostCurve, Pauses
from kconvert.runtime.engine import Engine, Generation
from kconvert.runtime.model import Model

PROMPT = np.random.default_rng(5).integers(0, 256, 70).tolist()
NEW_CACHE = Model.new_cache
NEW = 60  # with the prompt past the first split of the attention


class ScriptedDrafter:
    """Knows what will come, and errs: often the right token is only its second choice, sometimes
    it is far down, so that trees of every budget commit more and less than chains."""

    def __init__(self, text: list[int], vocabulary: int, seed: int = 1) -> None:
        self.config = SimpleNamespace(block=8, target_layer_ids=(1,))
        self._text, self._vocabulary, self._seed = text, vocabulary, seed
        self.length = 0

    def reset(self) -> None:
        self.length = 0

    def extend(self, features: torch.Tensor) -> None:
        assert torch.isfinite(features).all()
        self.length += len(features)

    def draft(self, anchor: int, position: int, embed, head) -> torch.Tensor:
        assert position == self.length and anchor == self._text[position]
        assert torch.isfinite(head(embed(torch.tensor([anchor])))).all()
        rng = np.random.default_rng([self._seed, position])
        logits = rng.normal(size=(7, self._vocabulary)).astype(np.float32)
        for depth in range(7):
            if position + 1 + depth < len(self._text):
                logits[depth, self._text[position + 1 + depth]] += rng.choice([0, 4, 9])
        return torch.from_numpy(logits)


@pytest.fixture(scope="module")
def engines(mini) -> dict[tuple[str, str], Engine]:
    return {
        (layout, dtype): Engine.open(folder, dtype=dtype)
        for layout, folder in mini.items()
        for dtype in ("float32", "bfloat16")
    }


@pytest.fixture
def poisoned(monkeypatch) -> None:
    """What was never written is NaN too."""

    def new_cache(self: Model, slots: int) -> LatentCache:
        cache = NEW_CACHE(self, slots)
        cache._keys.fill(np.nan)
        return cache

    monkeypatch.setattr(Model, "new_cache", new_cache)


def logits_of(engine: Engine, tokens: np.ndarray, start: int, cache: LatentCache) -> np.ndarray:
    """float32 [T, V] of a step of these rows."""
    model = engine.model
    hidden, _ = model.forward(model.backend.sequence(tokens, start), cache)
    return model.backend.gather(model.head(hidden))


def bits(generation: Generation) -> np.ndarray:
    return np.stack(generation.logits).view(np.uint32)


def speculate(engine: Engine, truth: Generation, **options: object) -> Generation:
    vocabulary = engine.model.config.vocabulary
    engine.drafter = ScriptedDrafter(PROMPT + truth.tokens, vocabulary)
    try:
        return engine.generate(PROMPT, NEW, keep_logits=True, **options)
    finally:
        engine.drafter = None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_every_mode_gives_the_bits_of_ar(dtype, temperature, engines, poisoned) -> None:
    engine = engines["marlin", dtype]
    sampled = {"temperature": temperature, "seed": 11}
    truth = engine.generate(PROMPT, NEW, keep_logits=True, **sampled)
    assert len(truth.tokens) == NEW and truth.target_forwards == NEW
    rates = {}
    for mode, budgets in (("chain", (0, 1, 4, 7)), ("ddtree", (0, 1, 4, 7, 16, 33, 64))):
        for budget in budgets:
            made = speculate(
                engine, truth, mode=mode, budget=budget, chain_seed=budget == 33, **sampled
            )
            assert made.tokens == truth.tokens, (mode, budget)
            assert np.array_equal(bits(made), bits(truth)), (mode, budget)
            assert sum(made.accepted) == NEW
            if budget == 0:
                assert made.target_forwards == NEW
            rates[mode, budget] = made.committed_per_forward
    assert min(rates["ddtree", 64], rates["chain", 7]) > 1.3  # drafts were accepted, and rejected
    assert max(rates.values()) < 8


@pytest.mark.parametrize("layout", ["marlin", "w4a16"])
def test_layouts_agree(layout, engines, poisoned) -> None:
    """Both layouts hold the same codes, so both give the same bits."""
    truth = engines["marlin", "float32"].generate(PROMPT, NEW, keep_logits=True)
    made = speculate(engines[layout, "float32"], truth, mode="ddtree", budget=16)
    assert np.array_equal(bits(made), bits(truth))


def test_what_was_rejected_is_poison(engines, monkeypatch) -> None:
    """After every step the rejected rows' latents are NaN, and no committed one is."""
    real, rejected = LatentCache.commit, []

    def commit(self, slots, accepted):
        real(self, slots, accepted)
        end = slots[0] + len(accepted)
        rejected.append(len(slots) - len(accepted))
        assert np.isfinite(self._keys[:, :end]).all()
        assert np.isnan(self._keys[:, end : end + rejected[-1]]).all()

    monkeypatch.setattr(LatentCache, "commit", commit)
    engine = engines["marlin", "float32"]
    truth = engine.generate(PROMPT, NEW)
    speculate(engine, truth, mode="ddtree", budget=16)
    assert sum(rejected) > NEW


def test_auto_budget_changes_the_trees_and_not_the_tokens(engines, monkeypatch) -> None:
    """Rows that cost nothing: every node is verified. Each as dear as a forward: drafting rests."""
    engine = engines["marlin", "float32"]
    truth = engine.generate(PROMPT, NEW, keep_logits=True)
    whole = speculate(engine, truth, mode="ddtree", budget=64)
    monkeypatch.setattr(engine, "pauses", Pauses())
    monkeypatch.setattr(engine, "calibration", Calibration())
    for costs, forwards, drafts in (
        (CostCurve((1, 65), (1e3, 1e3)), whole.target_forwards, whole.drafter_forwards),
        (CostCurve((1, 65), (1e3, 65e3)), NEW, 6),  # pauses of 1, 2, 4, 8, 16 and 32 rounds
    ):
        monkeypatch.setattr(engine, "_costs", costs)
        made = speculate(engine, truth, mode="ddtree", budget="auto")
        assert np.array_equal(bits(made), bits(truth))
        assert (made.target_forwards, made.drafter_forwards) == (forwards, drafts)
    again = speculate(engine, truth, mode="ddtree", budget="auto")
    assert again.drafter_forwards == 1  # it has learnt to rest for 64 rounds


def test_auto_does_not_believe_a_drafter_that_errs(engines, monkeypatch) -> None:
    """Always sure and always wrong: after a few rounds it is hardly asked any more."""
    engine = engines["marlin", "float32"]
    truth = engine.generate(PROMPT, NEW)
    wrong = [(token + 1) % 512 for token in PROMPT + truth.tokens]

    def draft(self, anchor: int, position: int, embed, head) -> torch.Tensor:
        logits = torch.zeros(7, 512)
        for depth, token in enumerate(wrong[position + 1 : position + 8]):
            logits[depth, token] = 30.0
        return logits

    monkeypatch.setattr(ScriptedDrafter, "draft", draft)
    monkeypatch.setattr(engine, "pauses", Pauses())
    monkeypatch.setattr(engine, "calibration", Calibration())
    monkeypatch.setattr(engine, "_costs", CostCurve((1, 65), (1e3, 20e3)))
    made = speculate(engine, truth, mode="ddtree", budget="auto")
    assert made.tokens == truth.tokens
    assert 2 <= made.drafter_forwards < 12


def test_parts_are_what_time_went_to(engines, monkeypatch) -> None:
    """By a clock that only forwards (1 s) and the drafter's context (10 s) move."""
    now = [0.0]
    engine = engines["marlin", "float32"]
    truth = engine.generate(PROMPT, NEW)
    forward, extend = engine.model.forward, ScriptedDrafter.extend

    def slow(seconds, function):
        def call(*arguments):
            now[0] += seconds
            return function(*arguments)

        return call

    monkeypatch.setattr("kconvert.runtime.clock.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(engine.model, "forward", slow(1, forward))
    monkeypatch.setattr(ScriptedDrafter, "extend", slow(10, extend))
    made = speculate(engine, truth, mode="ddtree", budget=16)
    steps, prompt = made.target_forwards - 1, 2  # 70 tokens in rows of 64
    assert made.parts["prefill"] == prompt * (1 + 10)
    assert (made.parts["verify"], made.parts["draft"]) == (steps, 10 * (steps - 1))
    assert made.parts["tree"] == made.parts["walk"] == made.parts["host"] == 0
    assert made.seconds == sum(made.parts.values())


def test_rows_do_not_depend_on_what_else_is_in_a_step(engines) -> None:
    """All at once and one by one: the same bits, past two splits of the attention."""
    for dtype in ("float32", "bfloat16"):
        engine = engines["marlin", dtype]
        tokens = np.random.default_rng(3).integers(0, 512, 170).tolist()
        whole = engine.logits(tokens)
        truth = engine.generate(tokens[:1], 0)
        assert truth.tokens == []
        cache = engine.model.new_cache(170)
        for i, token in enumerate(tokens):
            row = logits_of(engine, np.array([token]), i, cache)
            assert np.array_equal(row[0].view(np.uint32), whole[i].view(np.uint32)), i


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prompt_of_any_number_of_rows_has_the_same_bits(dtype, engines, poisoned) -> None:
    """1,100 rows in steps of 1 (the last ones), 64, 97, 130, 330 and 1024."""
    engine = engines["marlin", dtype]
    tokens = np.random.default_rng(6).integers(0, 512, 1100)

    def logits(rows: int) -> np.ndarray:
        cache = engine.model.new_cache(len(tokens))
        return np.concatenate([
            logits_of(engine, tokens[i : i + rows], i, cache)
            for i in range(0, len(tokens), rows)
        ])  # fmt: skip

    truth = logits(64)
    assert np.isfinite(truth).all()
    for rows in (97, 130, 330, 1024):
        assert np.array_equal(logits(rows).view(np.uint32), truth.view(np.uint32)), rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_text_resumed_in_the_middle_goes_on_the_same(dtype, engines) -> None:
    """What was generated has the bits that it has as a prompt."""
    engine = engines["marlin", dtype]
    truth = engine.generate(PROMPT, NEW, keep_logits=True)
    for cut in (1, 17, 42):
        resumed = engine.generate(PROMPT + truth.tokens[:cut], NEW - cut, keep_logits=True)
        assert resumed.tokens == truth.tokens[cut:]
        assert np.array_equal(bits(resumed), bits(truth)[cut:])


def test_stop_tokens_and_streaming(engines, monkeypatch) -> None:
    engine = engines["marlin", "float32"]
    truth = engine.generate(PROMPT, NEW)
    stop = truth.tokens[20]
    first = truth.tokens.index(stop)
    config = replace(engine.model.config, stop_tokens=frozenset([stop]))
    monkeypatch.setattr(engine.model, "config", config)
    streamed: list[list[int]] = []
    made = speculate(engine, truth, mode="ddtree", budget=16, on_tokens=streamed.append)
    assert made.tokens == [t for tokens in streamed for t in tokens] == truth.tokens[: first + 1]
    assert [len(tokens) for tokens in streamed] == made.accepted  # as they are committed
    assert len(made.accepted) > 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([], 1), "prompt is empty"),
        (([512], 1), "token id 512 is out of range"),
        (([-1], 1), "token id -1 is out of range"),
        (([10**20], 1), "token id 100000000000000000000 is out of range"),
        (([1], 262_144), "262144 positions"),
        (([1], 1, "tree"), "mode 'tree' is none of ar, chain, ddtree"),
        (([1], 1, "chain"), "needs a drafter"),
        (([1], 1, "ar", -1), "budget -1 is neither auto nor a number from 0 to 4096"),
        (([1], 1, "ar", 4097), "budget 4097"),
        (([1], 1, "ar", "many"), "budget many"),
        (([1], 1, "ar", 1, -0.5), "temperature -0.5"),
        (([1], 1, "ar", 1, 1e308), "temperature 1e.308 is not between 0 and 1e.06"),
        (([1], 1, "ar", 1, 1.0, 2**64), "seed 18446744073709551616"),
    ],
)
def test_refused(arguments, words: str, engines) -> None:
    with pytest.raises(UnsupportedError, match=words):
        engines["marlin", "float32"].generate(*arguments)


def test_blobs_that_cannot_be_run(mini, tmp_path: Path) -> None:
    import shutil

    convert(KIMI_MINI, tmp_path / "two", tp=2)
    with pytest.raises(UnsupportedError, match=r"for 2 rank\(s\), 1 were started: start 2"):
        Engine.open(tmp_path / "two")
    convert(KIMI_MINI, tmp_path / "part", layers=[1])
    with pytest.raises(UnfinishedOutputError, match="holds a part"):
        Engine.open(tmp_path / "part")
    with pytest.raises(KconvertError, match=r"has no kconvert\.json"):
        Engine.open(KIMI_MINI)
    out = Path(shutil.copytree(mini["marlin"], tmp_path / "out"))
    (out / "common/layer-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match="is missing or was changed"):
        Engine.open(out)


def test_logits_that_are_not_finite(engines, monkeypatch) -> None:
    engine = engines["marlin", "float32"]
    monkeypatch.setattr(
        engine.model, "head", lambda hidden: np.full((len(hidden), 512), np.nan, np.float32)
    )
    with pytest.raises(CheckpointError, match="position 2 are not finite"):
        engine.generate([1, 2], 4)


def test_opening_maps_and_does_not_read(mini) -> None:
    """Weights are views of the mapped files."""
    blobs = Engine.open(mini["marlin"]).model.blobs
    tensor = blobs.get("model.embed_tokens.weight", (512, 256))
    while not isinstance(tensor, np.memmap):
        tensor = tensor.base
    assert tensor.mode == "r"


@pytest.mark.parametrize(("hidden", "wanted"), [(2047, [1]), (2048, []), (None, [])])
def test_threads_are_limited_when_it_is_asked_for(hidden, wanted, engines, monkeypatch) -> None:
    """And then for a small drafter alone; opening an engine changes nothing of the process."""
    limits: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", limits.append)
    engine = engines["w4a16", "float32"]
    drafter = hidden and SimpleNamespace(config=SimpleNamespace(hidden=hidden))
    opened = Engine(engine.model, drafter)
    assert limits == []
    opened.set_threads()
    assert limits == wanted
