"""`kconvert smoke-generate`: generate once, compare with `ar`, and report."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kconvert.layouts.errors import CheckpointError
from kconvert.runtime.distributed import ranks_from_environment
from kconvert.runtime.drafting.policy import AUTO
from kconvert.runtime.engine import Engine, Generation
from kconvert.runtime.tokenizer import RANKS_NAME, Tokenizer


@dataclass(frozen=True)
class Request:
    """What to generate: the command line's options, by the same names."""

    prompt: str | None
    tokens: list[int] | None
    chat: bool
    mode: str
    budget: int | str
    max_new_tokens: int
    temperature: float
    seed: int
    chain_seed: bool
    check_exact: bool
    ignore_config_keys: tuple[str, ...] = ()


def smoke(
    output: Path,
    drafter: Path | None,
    dtype: str | None,
    request: Request,
    write: Callable[[str], object],
    device: str = "auto",
) -> dict[str, Any]:
    """Generate, `write` text as it comes, and report.

    The report's `differs` is the first position where text or logit bits are not those of `ar`
    (None if there is none, or if that was not asked for). Raises what `Engine` does.
    """
    ranks = ranks_from_environment(output)
    engine = Engine.open(output, drafter, dtype, ranks, device, request.ignore_config_keys)
    engine.set_threads()
    write = write if ranks.rank == 0 else lambda _: None
    tokenizer = None if request.tokens is not None else Tokenizer(output)
    if tokenizer is not None and tokenizer.vocabulary > engine.model.config.vocabulary:
        raise CheckpointError(
            f"{output / RANKS_NAME} and its specials are {tokenizer.vocabulary} tokens, the model"
            f" in {output} has {engine.model.config.vocabulary}: they do not belong together."
        )
    prompt = _prompt(tokenizer, request)
    stream: Callable[..., object] = (
        tokenizer.printer(write) if tokenizer else lambda tokens: write(f"{tokens}\n")
    )

    def generate(mode: str, tell: Callable[..., Any]) -> Generation:
        return engine.generate(
            prompt, request.max_new_tokens, mode, request.budget, request.temperature,
            request.seed, chain_seed=request.chain_seed, keep_logits=request.check_exact,
            on_tokens=tell,
        )  # fmt: skip

    if request.max_new_tokens > 1:
        if request.budget == AUTO:
            engine.costs()
        engine.generate(prompt[:1], 2, request.mode, 1)  # compiles; touches some of the weights
    made = generate(request.mode, stream)
    if tokenizer:
        stream([], last=True)
    alone = request.mode == "ar" and not request.check_exact
    plain = made if alone else generate("ar", lambda _: None)
    return {
        "rank": ranks.rank,
        "mode": request.mode,
        "budget": None if request.mode == "ar" else request.budget,
        "prompt_tokens": len(prompt),
        "tokens": made.tokens,
        "text": tokenizer.decode(made.tokens) if tokenizer else None,
        "seconds": made.seconds,
        "tokens_per_second": _rate(made),
        "target_forwards": made.target_forwards,
        "drafter_forwards": made.drafter_forwards,
        "committed_per_forward": made.committed_per_forward,
        "speedup_over_ar": _rate(made) / _rate(plain) if _rate(plain) else None,
        "parts": made.parts,
        "checked": request.check_exact,
        "differs": first_difference(made, plain, len(prompt)) if request.check_exact else None,
    }


def _prompt(tokenizer: Tokenizer | None, request: Request) -> list[int]:
    if tokenizer is None:
        return request.tokens or []
    text = request.prompt or ""
    return tokenizer.chat(text) if request.chat else tokenizer.encode(text)


def _rate(made: Generation) -> float:
    """Tokens a second of decoding: the prompt's forward and its token do not count."""
    seconds = made.seconds - made.parts.get("prefill", 0.0)
    return (len(made.tokens) - 1) / seconds if seconds > 0 and len(made.tokens) > 1 else 0.0


def first_difference(made: Generation, plain: Generation, start: int) -> int | None:
    """The first position whose token or float32 logit bits differ.

    Raises ValueError if either was generated without `keep_logits`.
    """
    for text in (made, plain):
        if len(text.logits) != len(text.tokens):
            raise ValueError(f"{len(text.tokens)} tokens have {len(text.logits)} rows of logits")
    pairs = zip(made.tokens, plain.tokens, made.logits, plain.logits, strict=False)
    for i, (token, other, logits, others) in enumerate(pairs):
        if token != other or not np.array_equal(logits.view(np.uint32), others.view(np.uint32)):
            return start + i
    same = len(made.tokens) == len(plain.tokens)
    return None if same else start + min(len(made.tokens), len(plain.tokens))
