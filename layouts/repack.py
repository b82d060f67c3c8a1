"""The fast CPU kernels: weights into Marlin tiles, scales and zero points into Marlin's order.

How a Marlin tile of 4-bit codes (16 k × 64 n) is made. Within a tile, row n = 16d + 8h + a of the
source holds 16 nibbles: two words, for k < 8 and k ≥ 8. The 16 output words for one `a` lie side by
side and draw on the 8 rows (d, h). So for 8 rows × 8 k-tiles, one 64-byte line a row:

1. transpose the 8×8 block of 64-bit elements: one vector a k-tile, lane 2d + h = row (d, h);
2. in each lane fold the second word's nibbles in beside the first's: byte b of the low half then
   holds k = 2b (and 2b + 8), from the low nibbles in one vector and the high ones in another;
3. one byte shuffle of those two vectors gives the output line, words ordered (b, d).

With 8-bit codes row n holds 16 bytes and one `a` has two lines, of b < 2 and of b ≥ 2. 8 rows × 4
k-tiles are transposed the same way, into two vectors a k-tile, of k < 8 and of k ≥ 8; one byte
shuffle of the two makes each line, words ordered (b, d, h).

That is few vector instructions a line beside the transpose, far above what memory delivers, so the
loop is arranged for memory: a source line is read once and prefetched one block ahead (its rows
are too far apart for the hardware to see the pattern), an output line is written whole.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kconvert.layouts.numba_jit import jit

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_LANES = ir.VectorType(_I64, 8)
_BYTES = ir.VectorType(_I8, 64)

TILE_K, TILE_N = 16, 64
_BLOCK_WORDS = 16  # of every source row a step: 64 bytes, one cache line
_MOST_K_TILES = 8  # a step, of 4-bit codes
_MOST_TILE_WORDS = 256  # of 8-bit codes


def _indices(values: list[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(_I32, len(values)), [ir.Constant(_I32, v) for v in values])


def _everywhere(value: int) -> ir.Constant:
    return ir.Constant(_LANES, [ir.Constant(_I64, value)] * 8)


def _transpose(builder: ir.IRBuilder, rows: list[Any]) -> list[Any]:
    """8 vectors of 8 lanes, transposed in three rounds of pairwise lane swaps."""
    for step in (1, 2, 4):
        low = [lane if not lane & step else 8 + (lane ^ step) for lane in range(8)]
        high = [lane | step if not lane & step else 8 + lane for lane in range(8)]
        swapped = list(rows)
        for i in range(8):
            if not i & step:
                pair = rows[i], rows[i | step]
                swapped[i] = builder.shuffle_vector(*pair, _indices(low))
                swapped[i | step] = builder.shuffle_vector(*pair, _indices(high))
        rows = swapped
    return rows


# Output byte 4·(4b + d) + q is byte b of lane 2d + (q & 1): of the low nibbles for q < 2, of the
# high ones (the second operand of the shuffle, 64 bytes on) for q ≥ 2.
_TILE_LINE = [
    64 * (q >> 1) + 8 * (2 * d + (q & 1)) + b for b in range(4) for d in range(4) for q in range(4)
]


# The line j of 8-bit codes: byte 4·(8c + r) + q is byte 4j + 2c + (q div 2) of lane r, of the first
# vector (k < 8) for an even q and of the second for an odd one.
_BYTE_LINES = [
    [64 * (q & 1) + 8 * r + 4 * j + 2 * c + (q >> 1) for c in range(2) for r in range(8)
     for q in range(4)]
    for j in range(2)
]  # fmt: skip


def _line(builder: ir.IRBuilder, base: Any, stride: Any, index: int, vector: ir.Type) -> Any:
    """The pointer to line `index` of those that lie `stride` bytes apart from `base` on."""
    address = builder.add(base, builder.mul(stride, ir.Constant(_I64, index)))
    return builder.inttoptr(address, vector.as_pointer())


def _columns(builder: ir.IRBuilder, source: Any, stride: Any) -> list[Any]:
    """8 source lines as 8 vectors of their first, second, … 64 bits."""
    rows = [builder.load(_line(builder, source, stride, i, _LANES), align=4) for i in range(8)]
    return _transpose(builder, rows)


@intrinsic
def _pack_lines(typingctx, source, source_stride, out, out_stride):  # type: ignore[no-untyped-def]
    """8 source lines (64 bytes each, `source_stride` bytes apart) of 4-bit codes → 8 output lines,
    by address."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        source, source_stride, out, out_stride = arguments
        nibbles = _everywhere(0x0F0F0F0F0F0F0F0F)
        for k_tile, words in enumerate(_columns(builder, source, source_stride)):
            low = builder.and_(words, nibbles)
            high = builder.and_(builder.lshr(words, _everywhere(4)), nibbles)
            # Bits 32… are the second word; shifted by 28 its nibbles land above the first's.
            low = builder.or_(low, builder.lshr(low, _everywhere(28)))
            high = builder.or_(high, builder.lshr(high, _everywhere(28)))
            tile_line = builder.shuffle_vector(
                builder.bitcast(low, _BYTES), builder.bitcast(high, _BYTES), _indices(_TILE_LINE)
            )
            builder.store(tile_line, _line(builder, out, out_stride, k_tile, _BYTES), align=4)
        return context.get_dummy_value()

    return types.void(*[types.uintp] * 4), codegen


@intrinsic
def _pack_byte_lines(typingctx, source, source_stride, out, out_stride):  # type: ignore[no-untyped-def]
    """8 source lines of 8-bit codes → 4 × 2 output lines, by address."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        source, source_stride, out, out_stride = arguments
        columns = _columns(builder, source, source_stride)
        for k_tile in range(4):
            pair = [builder.bitcast(column, _BYTES) for column in columns[2 * k_tile :][:2]]
            here = builder.add(out, builder.mul(out_stride, ir.Constant(_I64, k_tile)))
            for j, order in enumerate(_BYTE_LINES):
                tile_line = builder.shuffle_vector(*pair, _indices(order))
                at = _line(builder, here, ir.Constant(_I64, 64), j, _BYTES)
                builder.store(tile_line, at, align=4)
        return context.get_dummy_value()

    return types.void(*[types.uintp] * 4), codegen


@intrinsic
def _prefetch(typingctx, address):  # type: ignore[no-untyped-def]
    """Ask for the cache line at `address` to be brought in; no effect on any value."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        byte = _I8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        read, keep, data = (ir.Constant(_I32, value) for value in (0, 3, 1))
        builder.call(function, [builder.inttoptr(arguments[0], byte), read, keep, data])
        return context.get_dummy_value()

    return types.void(types.uintp), codegen


@jit
def _pack_block(source, source_stride, out, out_stride, following, bits):  # type: ignore[no-untyped-def]
    """64 rows × 64 bytes; `following` is the address of the block to prefetch meanwhile."""
    for a in range(8):
        for row in range(8):
            _prefetch(following + (8 * row + a) * source_stride)
        if bits == 4:
            _pack_lines(source + a * source_stride, 8 * source_stride, out + 64 * a, out_stride)
        else:
            _pack_byte_lines(
                source + a * source_stride, 8 * source_stride, out + 128 * a, out_stride
            )


@jit
def repack_marlin(source, row, rows, word, words, out, out_word, bits):  # type: ignore[no-untyped-def]
    """Pack rows [row, row + rows) and words [word, word + words) of `source` into Marlin tiles.

    source int32 [N, K·bits/32] C-contiguous (plain order); out int32 [words/(bits/2), …]
    C-contiguous, of which the columns [out_word, out_word + rows·bits/2) are written.
    rows % 64 == 0, words % (bits/2) == 0, bits 4 or 8; nothing is checked here (see
    `marlin.Marlin`).
    """
    a_row = bits // 2  # words of a row in a k-tile
    tile_words, block_k_tiles = TILE_N * a_row, _BLOCK_WORDS // a_row
    source_stride, out_stride = source.strides[0], out.strides[0]
    origin = source.ctypes.data + row * source_stride + 4 * word
    target = out.ctypes.data + 4 * out_word
    across = words // _BLOCK_WORDS
    blocks = (rows // TILE_N) * across
    for block in range(blocks):
        n_tile = block // across
        k_block = block - n_tile * across
        ahead = min(block + 1, blocks - 1)
        n_ahead = ahead // across
        k_ahead = ahead - n_ahead * across
        _pack_block(
            origin + TILE_N * n_tile * source_stride + 4 * _BLOCK_WORDS * k_block,
            source_stride,
            target + block_k_tiles * k_block * out_stride + 4 * tile_words * n_tile,
            out_stride,
            origin + TILE_N * n_ahead * source_stride + 4 * _BLOCK_WORDS * k_ahead,
            bits,
        )
    rest = words - across * _BLOCK_WORDS
    if rest == 0:
        return
    # Less than a block is left: pad it to one, so that no line is read past its row.
    padded = np.zeros((TILE_N, _BLOCK_WORDS), np.int32)
    tiles = np.empty((_MOST_K_TILES, _MOST_TILE_WORDS), np.int32)
    first = word + across * _BLOCK_WORDS
    for n_tile in range(rows // TILE_N):
        for i in range(TILE_N):
            for j in range(rest):
                padded[i, j] = source[row + TILE_N * n_tile + i, first + j]
        _pack_block(
            padded.ctypes.data, padded.strides[0], tiles.ctypes.data, tiles.strides[0],
            padded.ctypes.data, bits,
        )  # fmt: skip
        for k_tile in range(rest // a_row):
            for j in range(tile_words):
                at = out_word + tile_words * n_tile + j
                out[across * block_k_tiles + k_tile, at] = tiles[k_tile, j]


@jit
def repack_zero_points(source, word, words, group, out, out_word):  # type: ignore[no-untyped-def]
    """Zero points of 8·words rows and out.shape[0] groups into Marlin's order.

    source int32 [N/8, G] (plain: a word is 8 rows'), out int32 [G', …]; words % 8 == 0.
    The 8 words of a group over 64 rows are an 8 × 8 matrix of nibbles: row 8j + i is nibble i of
    source word j, and nibble (j div 2) + 4·(j mod 2) of output word i.
    """
    for tile in range(words // 8):
        for g in range(out.shape[0]):
            for i in range(8):
                packed = np.uint32(0)
                for j in range(8):
                    nibble = np.uint32(source[word + 8 * tile + j, group + g]) >> np.uint32(4 * i)
                    packed |= (nibble & np.uint32(15)) << np.uint32(4 * (j // 2 + 4 * (j % 2)))
                out[g, out_word + 8 * tile + i] = np.int32(packed)


def _transposer(width: int, order: tuple[int, ...]):  # type: ignore[no-untyped-def]
    """8 × 8 elements of `width` bits: 8 lines, `source_stride` bytes apart, to 8 lines `out_stride`
    apart, by address. Element p of an output line is of source line order[p]."""
    line_type = ir.VectorType(ir.IntType(width), 8)
    turned = [8 * order[p] + g for g in range(8) for p in range(8)]

    @intrinsic
    def transpose(typingctx, source, source_stride, out, out_stride):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            source, source_stride, out, out_stride = arguments
            lines = [
                builder.load(_line(builder, source, source_stride, i, line_type), align=1)
                for i in range(8)
            ]
            while len(lines) > 1:  # join neighbours
                size = range(2 * lines[0].type.count)
                lines = [
                    builder.shuffle_vector(a, b, _indices([*size]))
                    for a, b in zip(lines[::2], lines[1::2], strict=True)
                ]
            block = builder.shuffle_vector(lines[0], lines[0], _indices(turned))
            for g in range(8):
                part = builder.shuffle_vector(block, block, _indices([*range(8 * g, 8 * g + 8)]))
                builder.store(part, _line(builder, out, out_stride, g, line_type), align=1)
            return context.get_dummy_value()

        return types.void(*[types.uintp] * 4), codegen

    return transpose


_transpose_e8m0 = _transposer(8, (0, 2, 1, 3, 4, 6, 5, 7))
_transpose_16_bits = _transposer(16, tuple(range(8)))


@jit
def transpose_eights(source, row, rows, group, out, out_column):  # type: ignore[no-untyped-def]
    """As `transpose_scales` with the order of more than one group, or MXFP4's if the elements
    are bytes; out.shape[0] ≥ 8 and rows % 64 == 0.

    Rows 8 apart, out of 64, come to lie side by side: 8 × 8 elements at a time. The last 8 groups
    overlap those before them if 8 does not divide the number.
    """
    groups = out.shape[0]
    source_stride, out_stride, size = source.strides[0], out.strides[0], source.itemsize
    for block in range(0, groups + 7 >> 3):
        start = min(8 * block, groups - 8)
        for tile in range(rows // 64):
            for a in range(8):
                line = source.ctypes.data + (row + 64 * tile + a) * source_stride
                at = out.ctypes.data + start * out_stride
                at += (out_column + 64 * tile + 8 * a) * size
                if size == 1:
                    _transpose_e8m0(
                        line + (group + start) * size, 8 * source_stride, at, out_stride
                    )
                else:
                    _transpose_16_bits(
                        line + (group + start) * size, 8 * source_stride, at, out_stride
                    )


@jit
def restore_eights(packed, out):  # type: ignore[no-untyped-def]
    """What `transpose_eights` made of 16-bit elements, back: packed [G, N] → out [N, G], both
    C-contiguous; G ≥ 8, N % 64 == 0."""
    groups, stride, out_stride = packed.shape[0], packed.strides[0], out.strides[0]
    for tile in range(packed.shape[1] // 64):
        for block in range(0, groups + 7 >> 3):
            start = min(8 * block, groups - 8)
            for a in range(8):
                at = packed.ctypes.data + start * stride + 2 * (64 * tile + 8 * a)
                line = out.ctypes.data + (64 * tile + a) * out_stride + 2 * start
                _transpose_16_bits(at, stride, line, 8 * out_stride)


@jit
def transpose_scales(source, row, group, out, out_column, order):  # type: ignore[no-untyped-def]
    """out[g, out_column + i] = source[row + order[i], group + g], for all g and i.

    source [N, G] and out [G', …] C-contiguous of one unsigned dtype; order int64 [rows].
    Blocked by 32 groups × 64 rows: the lines being written stay in the first-level cache. Indices
    are made unsigned, which spares numba's test for negative ones (3.5 × as fast).
    """
    groups = out.shape[0]
    for start in range(0, groups, 32):
        stop = min(start + 32, groups)
        for block in range(0, order.size, 64):
            for i in range(block, min(block + 64, order.size)):
                line, column = np.uint64(row + order[i]), np.uint64(out_column + i)
                for g in range(start, stop):
                    out[np.uint64(g), column] = source[line, np.uint64(group + g)]


# The way back: byte b of lane 2d + h is byte 4·(4b + d) + h of a tile line, and of the high nibbles
# two further on; a lane's upper half (of the second operand, zeros) is empty.
_LANE_BYTES = [
    [4 * (4 * b + d) + h + high if b < 4 else 64 for d in range(4) for h in range(2)
     for b in range(8)]
    for high in (0, 2)
]  # fmt: skip


@intrinsic
def _unpack_lines(typingctx, packed, packed_stride, out, out_stride):  # type: ignore[no-untyped-def]
    """What `_pack_lines` made of 8 lines, back, by address."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        packed, packed_stride, out, out_stride = arguments
        first, second = _everywhere(0x0F0F0F0F), _everywhere(0xF0F0F0F0)
        zeros, columns = ir.Constant(_BYTES, [ir.Constant(_I8, 0)] * 64), []
        for k_tile in range(8):
            at = _line(builder, packed, packed_stride, k_tile, _BYTES)
            line = builder.load(at, align=4)
            low, high = (
                builder.bitcast(builder.shuffle_vector(line, zeros, _indices(order)), _LANES)
                for order in _LANE_BYTES
            )
            words = builder.and_(low, first)
            for nibbles, mask, shift in ((low, second, 28), (high, first, 4), (high, second, 32)):
                moved = builder.shl(builder.and_(nibbles, mask), _everywhere(shift))
                words = builder.or_(words, moved)
            columns.append(words)
        for i, row in enumerate(_transpose(builder, columns)):
            builder.store(row, _line(builder, out, out_stride, i, _LANES), align=4)
        return context.get_dummy_value()

    return types.void(*[types.uintp] * 4), codegen


@jit
def unpack_marlin(packed, out):  # type: ignore[no-untyped-def]
    """Marlin tiles int32 [K/16, 2N] of 4-bit codes → plain int32 [N, K/8], both C-contiguous;
    N % 64 == 0; nothing is checked here (see `marlin.Marlin`)."""
    k_tiles, n_tiles = packed.shape[0], packed.shape[1] // 128
    across = k_tiles // 8
    rest = k_tiles - 8 * across
    tiles = np.zeros((8, 128), np.int32)
    rows = np.empty((TILE_N, _BLOCK_WORDS), np.int32)
    for n_tile in range(n_tiles):
        for k_block in range(across):
            source = packed.ctypes.data + 8 * k_block * packed.strides[0] + 512 * n_tile
            target = out.ctypes.data + TILE_N * n_tile * out.strides[0] + 64 * k_block
            for a in range(8):
                _unpack_lines(
                    source + 64 * a, packed.strides[0],
                    target + a * out.strides[0], 8 * out.strides[0],
                )  # fmt: skip
        if rest:
            for k_tile in range(rest):
                for j in range(128):
                    tiles[k_tile, j] = packed[8 * across + k_tile, 128 * n_tile + j]
            for a in range(8):
                _unpack_lines(
                    tiles.ctypes.data + 64 * a, tiles.strides[0],
                    rows.ctypes.data + a * rows.strides[0], 8 * rows.strides[0],
                )  # fmt: skip
            for i in range(TILE_N):
                for j in range(2 * rest):
                    out[TILE_N * n_tile + i, _BLOCK_WORDS * across + j] = rows[i, j]
