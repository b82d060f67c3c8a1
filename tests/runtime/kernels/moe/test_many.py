"""The index maps of moe/many.cuh: which word a lane multiplies, and how sums leave."""

import numpy as np
import torch

from kconvert.runtime.kernels.moe.reference import unpack_marlin

WARPS, LANES = np.arange(4)[:, None], np.arange(32)[None]
A, B = LANES // 4, LANES % 4  # a lane's row and column pair in an MMA fragment
FRAGMENT = (WARPS + A // 2) % 4  # many.cuh: the fragment of the run that a lane's word is of


def mma_a_operand(words: np.ndarray) -> np.ndarray:
    """What the warpgroup's registers hold of one k-tile's words [4, 32]: nibbles [64 rows, 16 k].

    PTX's layout of A: register 2 h + i of lane (a, b) has row 8 i + a, k 8 h + 2 b and the next.
    """
    operand = np.zeros((64, 16), dtype=np.uint8)
    for nibble in range(8):  # marlin_stream.cuh: k half p & 1, n half p >> 1 & 1, k parity p >> 2
        half, i, parity = nibble & 1, nibble >> 1 & 1, nibble >> 2
        row = WARPS * 16 + 8 * i + A
        operand[row, np.broadcast_to(8 * half + 2 * B + parity, row.shape)] = (
            words >> 4 * nibble & 15
        )
    return operand


def column(row: np.ndarray) -> np.ndarray:
    """The column of the run of 64 that an MMA row stands for."""
    warp, half, a = row // 16, row // 8 % 2, row % 8
    return 16 * ((warp + a // 2) % 4) + 8 * half + a


def test_an_mma_row_is_a_column_of_the_run():
    packed = torch.randint(-(2**31), 2**31, (1, 128), dtype=torch.int64).int()
    words = packed.numpy().view(np.uint32)[0][LANES * 4 + FRAGMENT]
    run = unpack_marlin(packed).numpy()  # [64 columns, 16 k]
    rows = np.arange(64)
    assert sorted(column(rows)) == rows.tolist()
    assert np.array_equal(mma_a_operand(words), run[column(rows)])


def test_no_two_lanes_of_a_warp_meet_in_a_bank():
    for banks in (LANES * 4 + FRAGMENT) % 32:
        assert len(set(banks)) == 32
    scales = A * 4 + FRAGMENT  # four lanes share a word
    assert all(len(set(banks)) == 8 for banks in scales % 32)


def test_rows_leave_with_columns_in_order():
    """leave_run and load_piece: 16 rows x 64 columns, a value saying where it belongs."""
    shared = np.full((16, 64), -1)  # [row, place of a bf16 in its 128 bytes]
    for warp in range(4):
        for lane in range(32):  # stmatrix: lane l addresses row l % 8 of matrix l / 8, 16 bytes
            tile, half, row = lane >> 4, lane >> 3 & 1, lane & 7
            piece = (2 * warp + half) ^ row
            values = (tile * 8 + row) * 64 + column(warp * 16 + half * 8 + np.arange(8))
            shared[tile * 8 + row, piece * 8 : piece * 8 + 8] = values
    for first in range(0, 16, 4):  # a warp reads four rows, eight lanes each
        own = np.zeros((32, 4, 2), dtype=int)
        for lane in range(32):
            row, piece = first + (lane >> 3), lane & 7
            own[lane] = shared[row].reshape(8, 4, 2)[piece ^ (row & 7)]
        for lane in range(32):
            piece = lane & 7
            got = [own[(lane & 25) | ((piece - 2 * j) & 6), j] for j in (1, 2, 3)]
            got = np.concatenate([own[lane, 0], *got])
            row = first + (lane >> 3)
            assert np.array_equal(got, row * 64 + piece * 8 + np.arange(8))
