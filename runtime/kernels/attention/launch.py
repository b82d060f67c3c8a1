"""The launches of MLA over the latent cache."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kconvert.runtime.kernels.gpu import launch
from kconvert.runtime.kernels.linear.launch import linear_heads

KEYS = 64  # of a part; the boundaries of the prefix's splits are multiples of it
_WORKSPACE = 640 << 20  # bytes of parts at once
_BLOCKS = 512  # of attend that are worth having


@dataclass(frozen=True)
class AttentionShape:
    """A rank's attention: `heads` of it, q_lora (0: none), kv_lora, nope, rope and value sizes."""

    heads: int
    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    value: int

    def __post_init__(self) -> None:
        width = self.kv_lora + self.rope
        if self.kv_lora % 64 or width % 16 or self.nope % 32 or self.q_lora % 8 or self.value % 8:
            raise ValueError(
                f"kv_lora {self.kv_lora}, rope {self.rope}, nope {self.nope}, value {self.value},"
                f" q_lora {self.q_lora}: the kernels want multiples of 64, 16 with kv_lora, 32, 8"
                " and 8"
            )

    @property
    def macros(self) -> dict[str, dict[str, int]]:
        """Of each kernel."""
        heads, c, r = self.heads, self.kv_lora, self.rope
        return {
            "store": {"Q": self.q_lora, "C": c, "R": r},
            "queries": {"HEADS": heads, "NOPE": self.nope, "VALUE": self.value, "C": c, "R": r},
            "attend": {"HEADS": heads, "C": c, "R": r},
            "merge": {"HEADS": heads, "C": c},
        }

    @property
    def shared(self) -> int:
        """Dynamic shared memory of a block of attend, in bytes."""
        line = (self.kv_lora + self.rope) * 2 + 16
        queries_or_weights = max(16 * line, 2 * 16 * (KEYS * 2 + 16))
        return KEYS * line + queries_or_weights + 16 * (KEYS + 4) * 4


def store(
    low: Tensor,
    q_weight: Tensor | None,
    c_weight: Tensor,
    epsilon: float,
    positions: Tensor,
    slots: Tensor,
    tables: tuple[Tensor, Tensor],
    keys: Tensor,
    shape: AttentionShape,
) -> Tensor:
    """low bf16 [T, Q + C + R] → normed queries bf16 [T, Q]; latents and keys into keys [slots, C +
    R]."""
    q_low = torch.empty(len(low), shape.q_lora, dtype=torch.bfloat16, device=low.device)
    args = (low, q_weight, c_weight, epsilon, positions, slots, *tables, q_low, keys)
    launch("attention/store", shape.macros["store"], (len(low), 2), 128, args)
    return q_low


def queries(
    q: Tensor, kv_b: Tensor, positions: Tensor, tables: tuple[Tensor, Tensor], shape: AttentionShape
) -> Tensor:
    """q bf16 [T, H (nope + R)] → bf16 [T, H, C + R]."""
    rows, width = len(q), shape.kv_lora + shape.rope
    out = torch.empty(rows, shape.heads, width, dtype=torch.bfloat16, device=q.device)
    grid = shape.heads, -(-rows // 40), shape.kv_lora // 64
    args = (q, kv_b, rows, positions, *tables, out)
    launch("attention/queries", shape.macros["queries"], grid, 128, args)
    return out


def attend(
    queries: Tensor,
    keys: Tensor,
    positions: Tensor,
    prefix: Tensor,
    counts: Tensor,
    windows: Tensor,
    parts: int,
    scale: float,
    shape: AttentionShape,
) -> Tensor:
    """queries bf16 [T, H, C + R] over keys → bf16 [T, H, C]; at most `parts` parts of 64 keys."""
    heads, c = shape.heads, shape.kv_lora
    out = torch.empty(len(queries), heads, c, dtype=torch.bfloat16, device=queries.device)
    at_once = max(1, _WORKSPACE // (parts * heads * c * 4))
    for begin in range(0, len(queries), at_once):
        part = slice(begin, begin + at_once)
        rows = len(queries[part])
        sums = torch.empty(rows, parts, heads, c, device=queries.device)
        scales = torch.empty(rows, parts, heads, 2, device=queries.device)
        launch(
            "attention/attend", shape.macros["attend"], (parts, rows, -(-heads // 16)),
            256,
            (queries[part], keys, positions[part], prefix[part], counts[part], windows[part],
             windows.shape[1], scale, parts, rows, sharing(rows, parts), sums, scales),
            shared=shape.shared,
        )  # fmt: skip
        warps = 4 if parts <= 40 else 16
        launch(
            "attention/merge", shape.macros["merge"] | {"WARPS": warps},
            (heads, rows, -(-c // 64)), 32 * warps,
            (positions[part], counts[part], sums, scales, parts, out[part]),
        )  # fmt: skip
    return out


def sharing(rows: int, parts: int) -> int:
    """Rows whose keys a block loads once: two are one MMA's, more where blocks are many."""
    group = 2
    while group < 32 and rows * parts > group * _BLOCKS:
        group *= 2
    return group


def expand(context: Tensor, kv_b: Tensor, shape: AttentionShape) -> Tensor:
    """context bf16 [T, H, C] → bf16 [T, H v]: a product a head."""
    rows, size = len(context), shape.heads * shape.value
    out = torch.empty(rows, size, dtype=torch.bfloat16, device=context.device)
    each = kv_b.view(shape.heads, shape.nope + shape.value, shape.kv_lora)
    linear_heads(context, each, shape.nope, out.view(rows, shape.heads, shape.value))
    return out
