"""The launches of MLA over the latent cache."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kconvert.runtime.kernels.gpu import Gpu, gpu, launch
from kconvert.runtime.kernels.linear.launch import linear_heads

KEYS = 64  # of a tile; a prefix's boundary is a multiple of it
SPANS = 64  # of a row's prefix at most: a span is as few tiles as that takes
TAILS = 2  # parts of a row's window
GROUP = 8  # parts that a warp of merge adds
_WORKSPACE = 640 << 20  # bytes of parts at once


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
        """Each kernel's macros."""
        heads, c, r = self.heads, self.kv_lora, self.rope
        return {
            "store": {"Q": self.q_lora, "C": c, "R": r},
            "queries": {"HEADS": heads, "NOPE": self.nope, "VALUE": self.value, "C": c, "R": r},
            "merge": {"HEADS": heads, "C": c, "SPANS": SPANS},
        }


@dataclass(frozen=True)
class Form:
    """How attend is laid out: the lines of a block (a line is a head of a row), and the half tiles
    of keys that it keeps in shared memory. No bit depends on it."""

    lines: int
    halves: int

    def macros(self, shape: AttentionShape) -> dict[str, int]:
        return {
            "HEADS": shape.heads, "C": shape.kv_lora, "R": shape.rope, "SPANS": SPANS,
            "LINES": self.lines, "HALVES": self.halves,
        }  # fmt: skip

    def shared(self, shape: AttentionShape) -> int:
        """Dynamic shared memory of a block, in bytes."""
        line = -(-(shape.kv_lora + shape.rope) * 2 // 128) * 128
        scores = 2 * (KEYS + 4) + 1  # floats a line
        return self.halves * KEYS // 2 * line + self.lines * (line + 4 * scores)

    def grid(self, shape: AttentionShape, rows: int, spans: int) -> int:
        """Blocks: those of so many spans of each row, and those of the windows."""
        windows = rows * TAILS * -(-shape.heads // self.lines)
        return spans * -(-rows * shape.heads // self.lines) + windows


def spans(parts: int) -> int:
    """How many spans a row has, if it has at most `parts` tiles of 64 positions. The last tile is
    never below the row's prefix."""
    return min(SPANS, parts - 1)


def form(shape: AttentionShape, rows: int, parts: int, gpu: Gpu) -> Form:
    """The form that is quickest for a cache that is half full, as measured on an H200.

    Each block reads its keys anew, so it takes as many lines as still leave three blocks for four
    SMs. If there are many blocks of one tile each, two share an SM; else a block asks for its next
    tile ahead, if there is room. Raises ValueError if a tile does not fit the GPU."""
    room, likely = gpu.shared_per_sm - 1024, min(SPANS, (parts - 1) // 2)
    for lines in (64, 32, 16):
        groups = -(-rows * shape.heads // lines)
        ahead = Form(lines, 3 if lines == 64 else 4)
        many = parts - 1 <= SPANS and ahead.grid(shape, rows, likely) > gpu.sms
        forms = [Form(lines, 2)] if many else [ahead, Form(lines, 2)]
        fitting = [made for made in forms if made.shared(shape) <= room]
        wanted = 4 * likely * groups >= 3 * gpu.sms and 2 * rows * shape.heads > lines
        if fitting and (lines == 16 or (wanted and lines <= 32 * shape.heads)):
            return fitting[0]
    raise ValueError(f"a tile of {KEYS} keys of {shape.kv_lora} + {shape.rope} does not fit {gpu}")


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
    """low bf16 [T, Q + C + R] → normed queries bf16 [T, Q]; writes latents and rotated keys into
    keys bf16 [slots, C + R]."""
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
    columns, sms = shape.heads * (shape.kv_lora // 64), gpu(q.device.index).sms
    # As few rows a block as fill each SM with two blocks; a block's rows take turns.
    most = next((n for n in (8, 16, 24, 32) if columns * -(-rows // n) <= 2 * sms), 40)
    grid = shape.heads, -(-rows // most), shape.kv_lora // 64
    args = (q, kv_b, rows, most, positions, *tables, out)
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
    """queries bf16 [T, H, C + R] over keys → bf16 [T, H, C]; rows have at most `parts` tiles of 64
    positions."""
    heads, c = shape.heads, shape.kv_lora
    out = torch.empty(len(queries), heads, c, dtype=torch.bfloat16, device=queries.device)
    most = spans(parts) + TAILS
    at_once = max(1, _WORKSPACE // (most * heads * c * 4))
    for begin in range(0, len(queries), at_once):
        part = slice(begin, begin + at_once)
        rows = len(queries[part])
        sums = torch.empty(rows, most, heads, c, device=queries.device)
        scales = torch.empty(rows, most, heads, 2, device=queries.device)
        made = form(shape, rows, parts, gpu(queries.device.index))
        launch(
            "attention/attend", made.macros(shape), (made.grid(shape, rows, spans(parts)),), 256,
            (queries[part], keys, positions[part], prefix[part], counts[part], windows[part],
             windows.shape[1], scale * math.log2(math.e), most, rows, spans(parts), sums, scales),
            shared=made.shared(shape),
        )  # fmt: skip
        warps = -(-most // GROUP)
        launch(
            "attention/merge", shape.macros["merge"] | {"WARPS": warps},
            (heads, rows, -(-c // 128)), 32 * warps,
            (positions[part], prefix[part], counts[part], sums, scales, most, out[part]),
        )  # fmt: skip
    return out


def expand(context: Tensor, kv_b: Tensor, shape: AttentionShape) -> Tensor:
    """context bf16 [T, H, C] → bf16 [T, H v]: a product a head."""
    rows, size = len(context), shape.heads * shape.value
    out = torch.empty(rows, size, dtype=torch.bfloat16, device=context.device)
    each = kv_b.view(shape.heads, shape.nope + shape.value, shape.kv_lora)
    linear_heads(context, each, shape.nope, out.view(rows, shape.heads, shape.value))
    return out
