"""The launches of drafts and choices, and what they leave on the device between steps."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kconvert.runtime.backends.protocol import REACH
from kconvert.runtime.kernels.gpu import launch

SPLIT = 64
WINDOW = SPLIT + REACH
NODES = 64  # of a tree, at most
LEVELS = 16  # of a draft, at most
ROWS = 128  # of a step with choices, at most
TOP_CHUNK, PICK_CHUNK = 4096, 4096  # logits a block
START, TOKEN, BEFORE, ACCEPTED, COUNT, STEPS, WRONG, STATE = range(8)  # state.cuh
KEPT, PROMISED, ACCEPTED_SUM, NOW, PAYS, LEARNT = range(6)
HEADER = 8  # of a ring's entry, before its tokens


@dataclass(frozen=True)
class StepRows:
    """A step's rows, int32: fields of step.py's Step. `parts` bounds the parts of attention.

    A row past the tree has token −1, slot −1 and count 0: it reads no key and writes nothing.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    prefix: Tensor
    counts: Tensor
    parents: Tensor
    windows: Tensor  # [T, WINDOW]
    parts: int


def empty_rows(rows: int, parts: int, device: torch.device) -> StepRows:
    """Room for a step that `grow` writes."""
    fields = torch.empty(6, rows, dtype=torch.int32, device=device)
    tokens, positions, slots, prefix, counts, parents = fields
    windows = torch.zeros(rows, WINDOW, dtype=torch.int32, device=device)
    return StepRows(tokens, positions, slots, prefix, counts, parents, windows, parts)


def top_k(logits: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Each chunk's keys int64 [L, chunks, NODES] and normalizers float64 [L, chunks, 2] of logits
    float32 [L, n], whose columns are the tokens from `first` on."""
    levels, size = logits.shape
    chunks = -(-size // TOP_CHUNK)
    keys = torch.empty(levels, chunks, NODES, dtype=torch.int64, device=logits.device)
    sums = torch.empty(levels, chunks, 2, dtype=torch.float64, device=logits.device)
    args = (logits, size, first, keys, sums)
    launch("tree/top_k", {}, (chunks, levels), 512, args)
    return keys, sums


def grow(
    keys: Tensor, sums: Tensor, options: Tensor, seconds: Tensor, state: Tensor, step: StepRows
) -> None:
    """The tree and its rows into `step`, from all ranks' keys [ranks, L, chunks, NODES]."""
    ranks, levels, chunks, _ = keys.shape
    macros = {"LEVELS": levels, "CHUNKS": ranks * chunks}
    warps = levels * (4 if levels <= 8 else 2)
    fields = (step.tokens, step.positions, step.slots, step.prefix, step.counts, step.parents)
    args = (keys, sums, chunks, options, seconds, len(step.tokens), state, *fields, step.windows)
    launch("tree/grow", macros, (1,), 32 * warps, args)


def pick(logits: Tensor, first: int, positions: Tensor, sampling: Tensor) -> tuple[Tensor, Tensor]:
    """Each chunk's best value float64 [T, chunks] and token int32 of logits float32 [T, n]."""
    rows, size = logits.shape
    chunks = -(-size // PICK_CHUNK)
    values = torch.empty(rows, chunks, dtype=torch.float64, device=logits.device)
    tokens = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    args = (logits, size, first, positions, sampling, values, tokens)
    launch("tree/pick", {}, (chunks, rows), 256, args)
    return values, tokens


def walk(
    values: Tensor,
    tokens: Tensor,
    step: StepRows,
    state: Tensor,
    accepted: Tensor,
    chosen: Tensor,
    learnt: Tensor | None,
    ring: Tensor,
) -> None:
    """From all ranks' values and tokens [ranks, T, chunks]: chosen int32 [T], the accepted rows
    int32 [T], the next state, and an entry of the ring int32 [entries, ROWS + HEADER]."""
    ranks, rows, chunks = values.shape
    args = (
        values, tokens, ranks, rows, chunks, step.tokens, step.parents, state, accepted, chosen,
        learnt, ring, len(ring),
    )  # fmt: skip
    launch("tree/walk", {}, (1,), 1024, args)


def compact(state: Tensor, accepted: Tensor, keys: Tensor) -> None:
    """In keys bf16 [layers, slots, width] accepted rows move up, the others become NaN."""
    layers, slots, width = keys.shape
    grid = layers, -(-width // 256)
    launch("tree/compact", {}, grid, 128, (state, accepted, keys, slots, width // 2))


def gather(state: Tensor, accepted: Tensor, rows: Tensor, column: int, out: Tensor) -> None:
    """The accepted ones of rows bf16 [T, D] into out bf16 [most, F], from `column` on."""
    size = rows.shape[1]
    args = (state, accepted, rows, size, column, out.shape[1], out)
    launch("tree/gather", {}, (len(out),), 128, args)
