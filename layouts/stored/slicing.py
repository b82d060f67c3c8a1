"""Which parts of which blobs make up what one rank of another tp and ep holds of a layer. Pure.

A rank needs some experts, and some intermediate rows of each; a blob holds other experts and rows
if the folder was converted for another tp or ep. Both layouts can be cut and joined along the
intermediate axis, between whole tiles and groups (facts and formulas: FORMAT.md).
"""

from typing import NamedTuple

from kconvert.layouts.errors import UnsupportedError
from kconvert.layouts.experts import StackedTensor, stacked_tensors
from kconvert.layouts.quantization import Quantization
from kconvert.layouts.sharding import ModelDims, Parallelism, RankSlice, rank_slice

# Intermediate rows that lie together: a Marlin tile has 64, a word of w4a16 holds 8.
_TILE = {"marlin": 64, "w4a16": 8}


class Piece(NamedTuple):
    """What a blob has of what is wanted."""

    rank: int  # whose blob
    experts: range  # as the blob counts them
    rows: range
    all_rows: int  # of an expert in that blob
    expert_at: int  # the first of `experts`, as what is wanted counts them
    row_at: int


class Span(NamedTuple):
    """Elements along the cut axis: those of a stored tensor that go to those of the target."""

    stored: slice
    target: slice


def pieces(dims: ModelDims, stored: Parallelism, wanted: RankSlice) -> tuple[Piece, ...]:
    """The pieces of the blobs of a conversion for `stored` that make up `wanted`, each once."""
    found = (meeting(rank, rank_slice(dims, stored, rank), wanted) for rank in range(stored.tp))
    return tuple(piece for piece in found if piece is not None)


def meeting(rank: int, have: RankSlice, wanted: RankSlice) -> Piece | None:
    """The part of `wanted` that `rank` has, which holds `have`; None if it has none."""
    experts, rows = _common(have.experts, wanted.experts), _common(have.rows, wanted.rows)
    if not (experts and rows):
        return None
    return Piece(
        rank=rank,
        experts=_from(experts, have.experts.start),
        rows=_from(rows, have.rows.start),
        all_rows=len(have.rows),
        expert_at=experts.start - wanted.experts.start,
        row_at=rows.start - wanted.rows.start,
    )


def cut_axis(layout: str, tensor: StackedTensor) -> int:
    """The axis of a stored tensor [experts, …, …] that the intermediate rows lie along: w13's rows
    and w2's columns. `marlin` stores a matrix's columns first, `w4a16` its rows."""
    if tensor.role == "bias":
        return 1
    return 1 if (tensor.matrix == "w13") == (layout == "w4a16") else 2


def spans(
    tensor: StackedTensor, quantization: Quantization, piece: Piece, length: int, rows: int
) -> tuple[Span, ...]:
    """Which elements of a stored tensor go where, along `cut_axis`. w13 has the rows of gate, then
    those of up: two spans, or one if they join on both sides.

    `length`: that of the stored tensor's axis; `rows`: intermediate rows of an expert in the
    target.
    """
    if tensor.copies(quantization, 2) == 2:  # one scale a row of down: nothing to cut
        return (Span(slice(0, length), slice(0, length)),) if piece.row_at == 0 else ()
    halves = len(tensor.projections)
    half = length // halves  # elements for `all_rows` rows

    def elements(count: int) -> int:
        return count * half // piece.all_rows

    size = elements(len(piece.rows))
    if size == half and len(piece.rows) == rows:
        return (Span(slice(0, length), slice(0, length)),)
    starts = [i * half + elements(piece.rows.start) for i in range(halves)]
    places = [i * elements(rows) + elements(piece.row_at) for i in range(halves)]
    return tuple(
        Span(slice(start, start + size), slice(at, at + size))
        for start, at in zip(starts, places, strict=True)
    )


def target_shape(
    tensor: StackedTensor,
    quantization: Quantization,
    axis: int,
    stored: tuple[int, ...],
    all_rows: int,
    wanted: RankSlice,
) -> tuple[int, ...]:
    """The shape that `wanted` has in the blobs' layout, if a tensor's shape is `stored` for
    `all_rows` rows."""
    shape = [len(wanted.experts), *stored[1:]]
    if tensor.copies(quantization, 2) == 1:
        shape[axis] = shape[axis] * len(wanted.rows) // all_rows
    return tuple(shape)


def reordered(
    layout: str, tensor: StackedTensor, quantization: Quantization, have: int, want: int
) -> bool:
    """Whether a rank with `have` intermediate rows holds a tensor in another order than a rank with
    `want` rows, so that it cannot be cut and joined: marlin decides by the number of groups."""
    cut_scale = tensor.role == "scale" and tensor.axis == "columns"
    group = quantization.group_size if quantization.scheme == "int" else None
    return layout == "marlin" and cut_scale and bool(group) and (have == group) != (want == group)


def refuse_uncuttable(dims: ModelDims, layout: str, stored: Parallelism, wanted: RankSlice) -> None:
    """Raise UnsupportedError if `wanted` cannot be cut and joined from these blobs alone."""
    if layout not in _TILE:
        raise UnsupportedError(
            f"the blobs have layout {layout!r:.40}, this version reads {' and '.join(_TILE)}."
        )
    have, want, group = (
        dims.intermediate // stored.moe_tp, len(wanted.rows), dims.quantization.group_size
    )  # fmt: skip
    if want == have:
        return
    tile = max(_TILE[layout], group or 1)  # both are powers of two
    reason = None
    if wanted.rows.start % tile or wanted.rows.stop % tile:
        reason = f"{layout} cannot be cut there, only at multiples of {tile}"
    elif any(
        reordered(layout, tensor, dims.quantization, have, want)
        for tensor in stacked_tensors(dims.quantization)
    ):
        reason = "marlin orders the scales of w2 differently if a rank has a single group"
    if reason:
        ep = max(1, dims.experts // len(wanted.experts))
        raise UnsupportedError(
            f"an expert's rows are {have} in the blobs (--tp {stored.tp} --ep {stored.ep}) and"
            f" {wanted.rows.start} to {wanted.rows.stop - 1} on this rank of the engine, and"
            f" {reason}: convert again with --layout {layout} --tp"
            f" {dims.intermediate // want * ep} --ep {ep}, or with --layout w4a16."
        )


def _common(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))


def _from(numbers: range, start: int) -> range:
    return range(numbers.start - start, numbers.stop - start)
