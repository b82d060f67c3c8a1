"""Trains the small Kimi and its DFlash drafter, and writes everything that this folder ships.

    python tests/tiny_kimi/train.py [--out DIR] [--device cuda] [--steps N] …

In order: fetch the text, train the tokenizer, train the model (the last quarter with the routed
experts on the INT4 grid, and against repeating itself), write the checkpoint, let it write
continuations of its training text, train the drafter on its hidden states there, write the drafter.
"""

import argparse
import copy
import json
import random
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import bpe
import corpus
import torch
from bpe import Tokenizer
from checkpoint import read_drafter, read_model, write_drafter, write_model
from drafter import Drafter
from evaluate import (
    HERE,
    SEED,
    WINDOW,
    WORK,
    bigram_loss,
    held_out_loss,
    held_out_prompts,
    stream,
)
from model import Kimi, MoE, dequantize, quantize
from muon import Muon
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

_CONVERSATIONS = 1500
_DROPOUT = 0.1
_QUANTIZED_FROM, _DECAY_FROM = 0.75, 0.4  # shares of the training
_BALANCE = 1e-2  # the router bias moves so much a step, towards equal loads, as lr decays
_UNLIKELY, _GRAM, _TEXTS, _RENEW = 0.5, 6, 8, 24  # weight; n-gram; texts a step; steps a writing
_DRAFT_LENGTH, _ANCHORS, _FADE = 224, 24, 4.0  # continuations; blocks in each; slot weights


def main() -> None:
    options = _options()
    torch.manual_seed(SEED)
    if options.threads:
        torch.set_num_threads(options.threads)
    log: dict[str, Any] = {"seed": SEED, "device": _device_name(options.device)}
    log["torch"] = torch.__version__
    options.out.mkdir(parents=True, exist_ok=True)

    ids, held_out, numbers = prepare(options.work, options.out)
    log |= numbers
    if options.drafter_only:
        log |= json.loads((options.out / "training.json").read_text())
    else:
        model = Kimi(dropout=_DROPOUT).to(options.device)
        log["parameters"] = sum(p.numel() for p in model.parameters())
        log |= train_model(model, ids, held_out.to(options.device), options)
        write_model(model, options.out / "model")
    model = read_model(options.out / "model").to(options.device)  # as shipped: INT4 and bf16
    log["held_out_loss_as_shipped"] = held_out_loss(model, held_out.to(options.device))
    print(f"written: held-out loss {log['held_out_loss_as_shipped']:.4f} as shipped", flush=True)
    (options.out / "training.json").write_text(json.dumps(log, indent=2) + "\n")

    more = options.draft_round and read_drafter(options.out / "drafter").train()
    drafter = (more or Drafter()).to(options.device)
    log["drafter_parameters"] = sum(p.numel() for p in drafter.parameters())
    log[f"drafter_round_{options.draft_round}"] = train_drafter(drafter, model, ids, options)
    write_drafter(drafter, options.out / "drafter")
    (options.out / "training.json").write_text(json.dumps(log, indent=2) + "\n")
    print(json.dumps(log, indent=2))


def prepare(work: Path, out: Path) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The training tokens and the held-out tokens; writes tokenizer and held-out prompts."""
    train, held_out = corpus.load(work, SEED)
    text = "".join(chapter.text() for chapter in train)
    (out / "model").mkdir(exist_ok=True)
    ranks = bpe.train(text)
    bpe.write(ranks, out / "model")
    tokenizer = Tokenizer(ranks)
    prompts = held_out_prompts(tokenizer, held_out)
    lines = ",\n".join(json.dumps(prompt, ensure_ascii=False) for prompt in prompts)
    (out / "held_out.json").write_text(f"[\n{lines}\n]\n")

    books, unseen = stream(tokenizer, train), stream(tokenizer, held_out)
    special = bpe.SPECIAL_IDS
    user = [special["<|im_user|>"], *tokenizer.encode("user"), special["<|im_middle|>"]]
    assistant = [special["<|im_assistant|>"], *tokenizer.encode("assistant")]
    assistant += [special[name] for name in ("<|im_middle|>", "<think>", "</think>")]
    chats: list[int] = []
    for question, answer in corpus.conversations(train, _CONVERSATIONS, SEED):
        chats += [*user, *tokenizer.encode(question), bpe.IM_END]
        chats += [*assistant, *tokenizer.encode(answer), bpe.IM_END, bpe.EOS]
    numbers = {
        "characters": len(text), "tokens": len(books), "conversation_tokens": len(chats),
        "held_out_tokens": len(unseen), "bigram_loss": bigram_loss(books, unseen),
    }  # fmt: skip
    print(numbers, flush=True)
    return torch.tensor(books + chats), torch.tensor(unseen), numbers


def train_model(
    model: Kimi, ids: Tensor, held_out: Tensor, options: argparse.Namespace
) -> dict[str, Any]:
    """Next-token training; at the end with the experts on the INT4 grid, and against loops."""
    experts = [module for module in model.modules() if isinstance(module, MoE)]
    losses: dict[str, float] = {}
    batches = _windows(ids, options.batch, options.device)
    schedule = Schedule(model, options.lr, options.steps, options.limit)
    at_end, written, report = False, iter(()), 0.0
    for step in schedule:
        if not at_end and schedule.progress >= _QUANTIZED_FROM:
            losses["held_out_loss_before_int4"] = held_out_loss(model, held_out)
            _quantize(experts, at_end := True)
            losses["held_out_loss_at_first_int4"] = held_out_loss(model, held_out)
            print(f"step {step:5} INT4 from here: {losses}", flush=True)
        model.train()
        batch = next(batches)
        with _autocast(options.device):
            logits = model.logits(model(batch[:, :-1])[-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loads = [moe.loads.float() for moe in experts]
        penalty = torch.zeros(())
        if at_end:
            if (text := next(written, None)) is None:
                written = _own_texts(model, experts, ids, options.device)
                text = next(written)
            penalty = _unlikelihood(model, *text, options.device)
        schedule.update(loss + _UNLIKELY * penalty)
        balance = _BALANCE * schedule.decay()
        for moe, load in zip(experts, loads, strict=True):
            moe.gate.e_score_correction_bias += balance * (load.mean() - load).sign()
        if schedule.progress >= report:
            report += 1 / 15
            spread = max(float(load.max() / load.mean()) for load in loads)
            print(
                f"step {step:5} loss {loss:.3f} held-out {held_out_loss(model, held_out):.4f} "
                f"repeating {penalty.item():.3f} fullest expert {spread:.2f} "
                f"{schedule.seconds():.0f} s",
                flush=True,
            )
    losses["held_out_loss_int4"] = held_out_loss(model, held_out)
    _quantize(experts, False)
    losses["held_out_loss_without_int4"] = held_out_loss(model, held_out)
    seen = schedule.done * options.batch * WINDOW
    return {
        "steps": schedule.done, "tokens_seen": seen, "epochs": round(seen / len(ids), 1),
        "model_seconds": round(schedule.seconds()), **losses,
    }  # fmt: skip


def _own_texts(
    model: Kimi, experts: list[MoE], ids: Tensor, device: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """What the model writes now, greedily, and which of its tokens complete a repeated n-gram."""
    on_grid = copy.deepcopy(model).eval()
    for moe in on_grid.modules():
        if isinstance(moe, MoE):
            for weight in (moe.gate_proj, moe.up_proj, moe.down_proj):
                weight.data = dequantize(*quantize(weight))
            moe.quantized = False
    count, length = _TEXTS * _RENEW // 2, int(torch.randint(16, 64, ()))
    at = torch.randint(len(ids) - length, (count, 1))
    with _autocast(device):
        texts = on_grid.generate(ids[at + torch.arange(length)].to(device), 128).cpu()
    repeats = torch.zeros_like(texts, dtype=torch.bool)
    for row, tokens in enumerate(texts.tolist()):
        seen = set()
        for i in range(_GRAM, len(tokens) + 1):
            gram = tuple(tokens[i - _GRAM : i])
            repeats[row, i - 1] = gram in seen and i > length
            seen.add(gram)
    for _ in range(2):
        yield from zip(texts.split(_TEXTS), repeats.split(_TEXTS), strict=True)


def _unlikelihood(model: Kimi, text: Tensor, repeats: Tensor, device: str) -> Tensor:
    """Sequence-level unlikelihood (Welleck et al., 2019): −log(1 − p) of the repeating tokens."""
    text, repeats = text.to(device), repeats[:, 1:].to(device).float()
    with _autocast(device):
        logits = model.logits(model(text[:, :-1])[-1])
    p = logits.softmax(-1).gather(-1, text[:, 1:].unsqueeze(-1)).squeeze(-1)
    return -((1 - p).clamp_min(1e-4).log() * repeats).sum() / repeats.numel() * 4


def train_drafter(
    drafter: Drafter, model: Kimi, ids: Tensor, options: argparse.Namespace
) -> dict[str, Any]:
    """Cross-entropy of every slot of random blocks against what the model itself wrote there."""
    began = time.monotonic()
    model.requires_grad_(False)
    texts, starts = _continuations(model, ids, options)
    print(f"{texts.numel()} tokens of continuations {time.monotonic() - began:.0f} s", flush=True)
    with torch.no_grad(), _autocast(options.device):
        parts = (drafter.features(model(part.to(options.device))) for part in texts.split(64))
        features = torch.cat([part.bfloat16() for part in parts])
    print(f"their hidden states {time.monotonic() - began:.0f} s", flush=True)
    slots = torch.arange(1, drafter.c.block_size, device=options.device)
    weights = torch.exp((1 - slots) / _FADE)
    schedule = Schedule(drafter, options.draft_lr, options.draft_steps, options.draft_limit)
    rng = torch.Generator().manual_seed(SEED)
    report = 0.0
    for step in schedule:
        rows = torch.randint(len(texts), (options.draft_batch,), generator=rng)
        text, start = texts[rows].to(options.device), starts[rows].unsqueeze(1)
        free = _DRAFT_LENGTH - len(slots) - start
        anchors = start + (torch.rand(len(rows), _ANCHORS, generator=rng) * free).long()
        anchors = anchors.to(options.device)
        with _autocast(options.device):
            first = text.gather(1, anchors)
            seen = features[rows.to(features.device)]
            hidden = drafter(seen, anchors, first, model.embed_tokens)
            logits = model.lm_head(hidden).float()
        wanted = text.gather(1, (anchors.unsqueeze(-1) + slots).flatten(1)).view(logits.shape[:-1])
        loss = F.cross_entropy(logits.flatten(0, 2), wanted.flatten(), reduction="none")
        loss = loss.view(wanted.shape)
        schedule.update((loss * weights).mean() / weights.mean())
        if schedule.progress >= report:
            report += 1 / 15
            right = (logits.argmax(-1) == wanted).float()
            chain = float(right.cumprod(-1).sum(-1).mean() + 1)
            print(
                f"draft step {step:5} loss {loss.mean():.3f} committed {chain:.3f} "
                f"{schedule.seconds():.0f} s",
                flush=True,
            )
    return {
        "steps": schedule.done, "texts": len(texts),
        "blocks": schedule.done * options.draft_batch * _ANCHORS,
        "seconds": round(time.monotonic() - began),
    }  # fmt: skip


class Schedule:
    """Muon (AdamW for tables, router, norms) over `steps` steps: warm-up, plateau, linear decay.

    Where the machine is slow, `limit` seconds end it sooner; the log says after how many steps.
    """

    def __init__(self, module: nn.Module, lr: float, steps: int, limit: float) -> None:
        self.module, self.lr, self.steps, self.limit = module, lr, steps, limit
        matrices = [p for n, p in module.named_parameters() if _is_hidden_matrix(n, p)]
        chosen = {id(p) for p in matrices}
        rest = [p for p in module.parameters() if id(p) not in chosen]
        adam = torch.optim.AdamW(rest, lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
        self.optimizers = [Muon(matrices, lr), adam]
        self.began, self.done, self.progress = time.monotonic(), 0, 0.0

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def decay(self) -> float:
        return min(1.0, (1 - self.progress) / (1 - _DECAY_FROM) + 0.01)

    def __iter__(self) -> Iterator[int]:
        while self.progress < 1:
            for group in (g for optimizer in self.optimizers for g in optimizer.param_groups):
                group["lr"] = self.lr * min(1.0, (self.done + 1) / 100) * self.decay()
            yield self.done
            self.done += 1
            spent = self.seconds() / self.limit if self.limit else 0
            self.progress = max(self.done / self.steps, spent)

    def update(self, loss: Tensor) -> None:
        loss.backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def _is_hidden_matrix(name: str, p: Tensor) -> bool:
    return p.ndim > 1 and not name.startswith(("embed", "lm_head")) and "gate.weight" not in name


def _windows(ids: Tensor, batch: int, device: str) -> Iterator[Tensor]:
    """Batches of windows, each epoch from another offset and in another order."""
    rng = torch.Generator().manual_seed(SEED)
    while True:
        offset = int(torch.randint(WINDOW, (1,), generator=rng))
        count = (len(ids) - offset - 1) // WINDOW
        starts = offset + WINDOW * torch.randperm(count, generator=rng)
        for part in starts.split(batch):
            if len(part) == batch:
                yield ids[part[:, None] + torch.arange(WINDOW + 1)].to(device)


@torch.no_grad()
def _continuations(model: Kimi, ids: Tensor, options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Texts that the model wrote after prompts from the training text, and where its part starts.

    Three in four greedily, one in four sampled.
    """
    rng = random.Random(SEED + options.draft_round)
    texts, starts = [], []
    for part in range(options.drafts // options.draft_part):
        length = rng.randint(24, 72)
        at = torch.tensor([rng.randrange(len(ids) - length) for _ in range(options.draft_part)])
        prompts = ids[at[:, None] + torch.arange(length)].to(options.device)
        with _autocast(options.device):
            temperature = 0.7 if part % 4 == 3 else 0.0
            texts.append(model.generate(prompts, _DRAFT_LENGTH - length, temperature).cpu())
        starts += [length] * len(at)
    return torch.cat(texts), torch.tensor(starts)


def _quantize(experts: list[MoE], on: bool) -> None:
    for moe in experts:
        moe.quantized = on


def _autocast(device: str) -> AbstractContextManager[Any]:
    return torch.autocast(device, torch.bfloat16)


def _device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--out", type=Path, default=HERE, help="where model, drafter and prompts are written")
    add("--work", type=Path, default=WORK, help="the text is fetched to here")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--threads", type=int, default=0)
    add("--steps", type=int, default=5000)
    add("--batch", type=int, default=16, help="windows of 256 tokens")
    add("--lr", type=float, default=4e-3)
    add("--limit", type=float, default=0, help="at most about so many seconds for the model")
    add("--drafter-only", action="store_true", help="with the model that is in --out")
    add("--draft-round", type=int, default=0, help="above 0: train the drafter in --out further")
    add("--drafts", type=int, default=2048, help="continuations to train the drafter on")
    add("--draft-part", type=int, default=256, help="continuations written at once")
    add("--draft-steps", type=int, default=3000)
    add("--draft-batch", type=int, default=16)
    add("--draft-lr", type=float, default=3e-3)
    add("--draft-limit", type=float, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
