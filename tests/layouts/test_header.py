"""The safetensors container: what the library writes is read, what is damaged is named."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from kconvert.layouts.errors import CheckpointError, TruncatedFileError
from kconvert.layouts.header import file_order, parse_header, read_header, shard_header

A = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
B = {"dtype": "I32", "shape": [1], "data_offsets": [4, 8]}


def parsed(table: object, data: int = 8, text: str | None = None):
    raw = (json.dumps(table) if text is None else text).encode()
    return parse_header(len(raw).to_bytes(8, "little") + raw, 8 + len(raw) + data, "x.safetensors")


def test_what_the_library_writes_is_read_and_written_alike(tmp_path: Path) -> None:
    arrays = {
        "b.wide": np.arange(6, dtype=np.int64).reshape(2, 3), "c": np.zeros((0, 5), np.float32),
        "a": np.ones(3, np.uint8), "none": np.full((), 2, np.float16),
    }  # fmt: skip
    save_file(arrays, tmp_path / "x.safetensors")
    header, raw = read_header(tmp_path / "x.safetensors"), (tmp_path / "x.safetensors").read_bytes()
    assert header.tensors.keys() == arrays.keys() and raw.startswith(header.raw)
    for name, tensor in header.tensors.items():
        assert tensor.shape == arrays[name].shape
        assert raw[tensor.start : tensor.start + tensor.nbytes] == arrays[name].tobytes()
    assert shard_header(file_order(header.tensors.values())) == header.raw


def test_tensors_tile_the_data_in_the_order_of_their_offsets() -> None:
    found = parsed({"__metadata__": {"format": "pt"}, "b": B, "a": A})
    assert [*found.tensors] == ["a", "b"] and found.metadata == {"format": "pt"}
    assert found.tensors["b"].start == found.data_start + 4


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ([], "not a JSON object"),
        ({"__metadata__": {"a": 1}}, "map of strings to strings"),
        ({"a": A, "b": {**B, "data_offsets": [5, 9]}}, "a hole before tensor b"),
        ({"a": A, "b": {**B, "data_offsets": [3, 7]}}, "an overlap before tensor b"),
        ({"a": {**A, "dtype": "F4"}}, "dtype 'F4' is not one of"),
        ({"a": {**A, "shape": [True, 4]}}, "is not a list of sizes"),
        ({"a": {**A, "shape": [2]}}, "takes 2 bytes, its data_offsets give 4"),
        ({"a": {**A, "data_offsets": [4]}}, "are not two byte offsets"),
        ({"a": {"dtype": "U8", "shape": [4]}}, "expected the keys dtype, shape and data_offsets"),
        ({"a": 1}, "found int"),
    ],
)
def test_a_header_that_is_wrong_is_named(table: object, words: str) -> None:
    with pytest.raises(CheckpointError, match=r"x\.safetensors") as raised:
        parsed(table)
    assert words in str(raised.value)


def test_a_key_that_stands_there_twice() -> None:
    with pytest.raises(CheckpointError, match="key 'a' stands there twice"):
        parsed(None, text=f'{{"a": {json.dumps(A)}, "a": {json.dumps(A)}}}')


@pytest.mark.parametrize(("data", "kind"), [(7, TruncatedFileError), (9, CheckpointError)])
def test_a_file_of_another_length(data: int, kind: type[CheckpointError]) -> None:
    with pytest.raises(kind, match=r"is (truncated|too long)") as raised:
        parsed({"a": A, "b": B}, data)
    assert type(raised.value) is kind


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"), (b"1234567", "is truncated: 7 bytes"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "is no safetensors file: its header claims"),
        ((1 << 20).to_bytes(8, "little") + b"{}", "truncated: 10 bytes found, 1,048,584 expected"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_safetensors(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        read_header(tmp_path / "x")


def test_a_pipe_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_header(tmp_path / "x")
