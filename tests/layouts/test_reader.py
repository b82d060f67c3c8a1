"""Tensors read together: in as few calls as they lie in runs, whatever a call brings."""

import os
from pathlib import Path

import numpy as np
import pytest

from kconvert.layouts.checkpoint import SourceTensor
from kconvert.layouts.errors import CheckpointError
from kconvert.layouts.reader import Reader

DATA = bytes(range(256)) * 8


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(DATA)
    return Reader(lambda name: tmp_path / name)


def tensor(shard: str, start: int, nbytes: int) -> SourceTensor:
    return SourceTensor(f"{shard}{start}", "U8", (nbytes,), shard, start, nbytes)


@pytest.mark.parametrize("most", [1, 3, 100, 10_000])
def test_neighbours_are_read_in_one_call(most: int, reader: Reader, monkeypatch) -> None:
    """And however little each call brings, every byte lands where it belongs."""
    real, calls = os.preadv, []

    def preadv(fd: int, views: list[memoryview], offset: int) -> int:
        calls.append(offset)
        cut, left = [], most
        for view in views:
            cut.append(view[:left])
            left -= len(cut[-1])
            if left <= 0:
                break
        return real(fd, cut, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    tensors = [
        tensor("a", 700, 30), tensor("b", 5, 20), tensor("a", 10, 100), tensor("a", 110, 0),
        tensor("a", 110, 90), tensor("a", 730, 7),
    ]  # fmt: skip
    outs = [np.zeros(t.nbytes, np.uint8) for t in tensors]
    assert reader.read_together(zip(tensors, outs, strict=True)) == 247 == reader.bytes_read
    for t, out in zip(tensors, outs, strict=True):
        assert out.tobytes() == DATA[t.start : t.start + t.nbytes]
    if most == 10_000:
        assert calls == [10, 700, 5]


def test_a_file_that_ends_early_is_named(reader: Reader) -> None:
    tensors = [tensor("a", 2000, 40), tensor("a", 2040, 100)]
    outs = [np.zeros(t.nbytes, np.uint8) for t in tensors]
    with pytest.raises(CheckpointError, match="a, tensor a2000: the file ended 92 bytes early"):
        reader.read_together(zip(tensors, outs, strict=True))


def test_what_is_expected_is_asked_for(reader: Reader, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *what: asked.append(what))
    reader.expect(tensor("b", 512, 256))
    assert asked == [(512, 256, os.POSIX_FADV_WILLNEED)]
