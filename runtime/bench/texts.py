"""Texts for `bench exact` beside its short prompts: long contexts that end around every kind of
boundary, prompts in steps of other sizes, texts resumed in the middle, buckets, reruns."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kconvert.runtime.engine import Engine, Generation
from kconvert.runtime.smoke import first_difference

# Around multiples of 64 (splits of attention), 32 past those (a prefix's boundary), powers of two
# (a cache grows), 64, 330 and 1024 (rows of a prompt's step), and up to 8k.
CONTEXTS = (1, 30, 31, 32, 33, 63, 64, 65, 94, 95, 96, 97, 127, 128, 129, 160, 329, 331, 500, 1023,
            1024, 1025, 2047, 4090, 8150)  # fmt: skip
PROMPT_ROWS = (1, 64, 330, 1024)
PROMPT = 1100  # tokens that are run in such steps
CUTS = (1, 2, 9, 17, 31, 33)
RESUMED = 150  # tokens of the prompt of a text that is resumed
NEW = 40


@dataclass(frozen=True)
class Case:
    """A text and how it is run; `key` tells it apart from the others of its kind."""

    what: str
    key: int
    mode: str
    budget: int
    length: int  # tokens of the prompt
    cut: int = 0  # tokens of the text that are given with it
    options: dict[str, Any] = field(default_factory=dict)


def cases(engine: Engine, longest: int) -> list[Case]:
    """The cases for contexts of up to `longest` tokens; those of buckets are for a GPU."""
    assert engine.drafter is not None
    chain = "chain", engine.drafter.config.block - 1
    tree = "ddtree", 16
    ar = "ar", 0
    made = [Case("context", n, *kind, n) for kind in (chain, tree) for n in CONTEXTS
            if n <= longest]  # fmt: skip
    prompt, resumed = min(PROMPT, longest), min(RESUMED, longest)
    for kind in (ar, tree):
        made += [Case("prompt rows", rows, *kind, prompt, options={"prompt_rows": rows})
                 for rows in PROMPT_ROWS]  # fmt: skip
        made += [Case("resumed after", cut, *kind, resumed, cut) for cut in CUTS]
        made += [Case("again", 0, *kind, resumed)]
    if engine.device == "cuda":
        from kconvert.runtime.backends.cuda_decoder import BUCKETS

        for kind in (ar, chain, tree):
            made += [Case("bucket", rows, *kind, resumed, options={"bucket": rows})
                     for rows in BUCKETS if rows > kind[1]]  # fmt: skip
    return made


def rows_of(
    engine: Engine, text: Sequence[int], made: Sequence[Case], mine: slice, temperature: float
) -> list[dict[str, Any]]:
    """A row for each kind and mode, from the cases `mine`: tokens compared, and by key the first
    position that differs. A case is left out if a stop token comes before its cut."""
    base: dict[str, Any] = {"temperature": temperature, "seed": 1, "keep_logits": True}
    truths: dict[int, Generation] = {}
    rows: dict[tuple[str, str, int], dict[str, Any]] = {}
    for case in made:
        kind = case.what, case.mode, case.budget
        rows.setdefault(kind, {
            "what": case.what, "mode": case.mode, "budget": case.budget, "tokens": 0,
            "target_forwards": 0, "ar_forwards": 0, "differ": {},
        })  # fmt: skip
    for case in made[mine]:
        row = rows[case.what, case.mode, case.budget]
        prompt = list(text[: case.length])
        if case.length not in truths:
            truths[case.length] = engine.generate(prompt, NEW, **base)
        truth = truths[case.length]
        if case.cut >= len(truth.tokens):
            continue
        prompt += truth.tokens[: case.cut]
        found = engine.generate(
            prompt, NEW - case.cut, case.mode, case.budget, **base, **case.options
        )
        later = Generation(tokens=truth.tokens[case.cut :], logits=truth.logits[case.cut :])
        compare(engine, row, case.key, found, later, len(prompt))
    return list(rows.values())


def compare(
    engine: Engine, row: dict[str, Any], key: int, made: Generation, truth: Generation, start: int
) -> None:
    """Count a text that was `made` after `start` tokens into a row of results, and note under `key`
    where it differs: by its logits' bits, or on a GPU by a slot of the cache."""
    position = first_difference(made, truth, start)
    if position is None and engine.decoder:
        position = engine.decoder.wrong_slot()
    if position is not None:
        row["differ"][key] = position
    row["tokens"] += len(made.tokens)
    row["target_forwards"] += made.target_forwards
    row["ar_forwards"] += len(truth.tokens)
