"""Judges the checkpoints in this folder on the held-out prompts, in plain float32 torch.

    python tests/tiny_kimi/evaluate.py [--folder DIR] [--work DIR] [--json FILE]

Prints the held-out loss beside a bigram model's, how much the greedy text repeats itself, and how
many tokens a target forward commits with the drafter, in a chain and in a tree of 64 nodes.
"""

import argparse
import heapq
import json
import math
import random
import time
from collections import Counter
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import bpe
import corpus
import torch
from bpe import Tokenizer
from checkpoint import read_drafter, read_model
from drafter import Drafter
from model import Kimi
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

HERE = Path(__file__).parent
WORK = Path.home() / ".cache" / "tiny-kimi"
SEED, WINDOW, NEW = 20260, 256, 128


def stream(tokenizer: Tokenizer, chapters: list[corpus.Chapter]) -> list[int]:
    """Chapters as one run of tokens: [BOS] before each book, [EOS] after it."""
    ids: list[int] = []
    for _, book in groupby(chapters, lambda c: c.book):
        ids.append(bpe.BOS)
        for chapter in book:
            ids += tokenizer.encode(chapter.text())
        ids.append(bpe.EOS)
    return ids


@torch.no_grad()
def held_out_loss(model: Kimi, ids: Tensor) -> float:
    """Mean loss in nats a token over windows that do not overlap."""
    model.eval()
    windows = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
    losses = []
    for part in windows.split(16):
        logits = model.logits(model(part)[-1][:, :-1])
        losses.append(F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()) * len(part))
    return float(torch.stack(losses).sum() / len(windows))


def bigram_loss(train: list[int], held_out: list[int]) -> float:
    """The same loss of a bigram model, smoothed with unigrams at the best strength."""
    unigrams, pairs = Counter(train), Counter(pairwise(train))
    size = len(train) + bpe.VOCAB

    def loss(strength: float) -> float:
        total = 0.0
        for (a, b), n in Counter(pairwise(held_out)).items():
            prior = (unigrams[b] + 1) / size
            total -= n * math.log((pairs[a, b] + strength * prior) / (unigrams[a] + strength))
        return total / (len(held_out) - 1)

    return min(loss(strength) for strength in (1, 3, 10, 30, 100, 300))


def held_out_prompts(tokenizer: Tokenizer, chapters: list[corpus.Chapter]) -> list[dict[str, Any]]:
    """100 prompts of 32 to 64 tokens that begin at a verse of a held-out chapter."""
    rng, prompts, used = random.Random(SEED), [], set()
    while len(prompts) < 100:
        chapter = rng.choice(chapters)
        start = rng.randrange(len(chapter.verses))
        ids = tokenizer.encode("".join(f"{n} {verse}\n" for n, verse in chapter.verses[start:]))
        length = rng.randint(32, 64)
        text = tokenizer.decode(ids[:length])
        span = {(chapter.title, verse) for verse in range(start, start + 4)}
        if len(ids) > length and not used & span and tokenizer.encode(text) == ids[:length]:
            used |= span
            prompts.append({"source": chapter.title, "text": text, "token_ids": ids[:length]})
    return prompts


def continuations(model: Kimi, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Prompt and greedy continuation, prompts of one length at a time."""
    device = model.embed_tokens.weight.device
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    results: dict[int, list[int]] = {}
    for _, group in groupby(order, lambda i: len(prompts[i])):
        members = list(group)
        ids = torch.tensor([prompts[i] for i in members], device=device)
        results |= zip(members, model.generate(ids, new).tolist(), strict=True)
    return [results[i] for i in range(len(prompts))]


def repetition(tokens: list[int], n: int = 8) -> float:
    """The share of n-grams that stood earlier in the same text."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams)


@torch.no_grad()
def committed_per_forward(
    model: Kimi, drafter: Drafter, texts: list[list[int]], starts: list[int], budget: int = 0
) -> float:
    """Mean tokens that a target forward commits, the bonus token included.

    Greedy output is the same in every mode, so a round is judged against the text that `generate`
    wrote: the walk follows it as long as the drafted chain (budget 0) or tree contains it.
    """
    committed = forwards = 0
    size = drafter.c.block_size
    for text, start in zip(texts, starts, strict=True):
        ids = torch.tensor([text], device=model.embed_tokens.weight.device)
        anchors = torch.arange(start, start + NEW, device=ids.device).unsqueeze(0)
        features = drafter.features(model(ids))
        hidden = drafter(features, anchors, ids.gather(1, anchors), model.embed_tokens)
        logits = model.lm_head(hidden).float().log_softmax(-1)[0].cpu()  # [NEW, size - 1, V]
        at = 0  # the prefill gave the token at `start`
        while at < NEW - 1:
            wanted = text[start + at + 1 : start + at + size]
            accepted = _accepted(logits[at], wanted, budget)
            committed += min(accepted + 1, NEW - 1 - at)
            forwards += 1
            at += accepted + 1
    return committed / forwards


def _accepted(logprobs: Tensor, wanted: list[int], budget: int) -> int:
    """How many of the wanted tokens the chain, or the best tree of so many nodes, holds."""
    if not budget:
        drafted = logprobs.argmax(-1).tolist()
        return next((i for i, w in enumerate(wanted) if drafted[i] != w), len(wanted))
    values, tokens = logprobs.topk(budget)
    values, tokens = values.tolist(), tokens.tolist()
    heap, found = [(-values[0][0], (0,))], 0
    for _ in range(budget):
        cost, ranks = heapq.heappop(heap)
        depth, rank = len(ranks), ranks[-1]
        if all(tokens[d][r] == wanted[d] for d, r in enumerate(ranks)):
            found = max(found, depth)
        if rank + 1 < budget:
            sibling = cost + values[depth - 1][rank] - values[depth - 1][rank + 1]
            heapq.heappush(heap, (sibling, (*ranks[:-1], rank + 1)))
        if depth < len(values):
            heapq.heappush(heap, (cost - values[depth][0], (*ranks, 0)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=HERE, help="holds model, drafter, prompts")
    parser.add_argument("--work", type=Path, default=WORK, help="the text is fetched to here")
    parser.add_argument("--json", type=Path, help="write the numbers to this file too")
    parser.add_argument("--show", type=int, default=3, help="how many continuations to print")
    options = parser.parse_args()

    began = time.monotonic()
    model, drafter = read_model(options.folder / "model"), read_drafter(options.folder / "drafter")
    tokenizer = bpe.read(options.folder / "model")
    prompts = json.loads((options.folder / "held_out.json").read_text())
    train, held_out = corpus.load(options.work, SEED)
    held_out_ids = stream(tokenizer, held_out)
    characters = len(tokenizer.decode(held_out_ids)) / len(held_out_ids)
    texts = continuations(model, [p["token_ids"] for p in prompts], NEW + drafter.c.block_size)
    starts = [len(p["token_ids"]) for p in prompts]
    written = [text[start : start + NEW] for text, start in zip(texts, starts, strict=True)]
    numbers = {
        "held_out_loss": held_out_loss(model, torch.tensor(held_out_ids)),
        "bigram_loss": bigram_loss(stream(tokenizer, train), held_out_ids),
        "characters_per_token": characters,
        "repeated_8grams": sum(map(repetition, written)) / len(written),
        "distinct_continuations": len({tuple(w) for w in written}),
        "chain_committed_per_forward": committed_per_forward(model, drafter, texts, starts),
        "tree64_committed_per_forward": committed_per_forward(model, drafter, texts, starts, 64),
    }
    for prompt, text in list(zip(prompts, written, strict=True))[: options.show]:
        print(f"--- {prompt['source']}\n{prompt['text']}[...]{tokenizer.decode(text)}\n")
    for name, value in numbers.items():
        print(f"{name:30} {value:.4f}" if isinstance(value, float) else f"{name:30} {value}")
    print(f"{'seconds':30} {time.monotonic() - began:.0f}")
    if options.json:
        options.json.write_text(json.dumps(numbers, indent=2) + "\n")


if __name__ == "__main__":
    main()
