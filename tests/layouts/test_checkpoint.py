"""A checkpoint's inventory, from its index and headers alone."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from kit import KIMI_MINI, LAYER1, SHARD, change_json

from kconvert.layouts.checkpoint import (
    INDEX_NAME,
    read_checkpoint,
    read_json,
    take_inventory,
)
from kconvert.layouts.errors import CheckpointError, MissingFileError
from kconvert.layouts.header import Header, TensorEntry

A, B = (TensorEntry(name, "U8", (2,), 8 + i, 2) for i, name in enumerate("ab"))


def header(*entries: TensorEntry) -> Header:
    return Header({}, {entry.name: entry for entry in entries}, 8, b"")


def test_everything_in_the_folder_is_accounted_for(mini: Path) -> None:
    (mini / "other.bin").write_bytes(b"x")
    (mini / "other.index.json").write_text("{}")
    (mini / "sub").mkdir()
    (mini / ".gitattributes").touch()
    found = read_checkpoint(mini)
    sound = read_checkpoint(KIMI_MINI)
    assert replace(found, ignored=()) == replace(sound, ignored=())
    assert {text.partition(":")[0] for text in found.ignored} - {
        text.partition(":")[0] for text in sound.ignored
    } == {"other.bin", "other.index.json", "sub"}
    names = {*found.shards, *found.small_files, INDEX_NAME}
    assert names == {path.name for path in KIMI_MINI.iterdir()}


def test_a_tensor_is_where_its_header_says(mini: Path) -> None:
    tensor = read_checkpoint(mini).tensors[f"{LAYER1}input_layernorm.weight"]
    raw = (mini / tensor.shard).read_bytes()
    assert tensor.shard == SHARD and len(raw) >= tensor.start + tensor.nbytes
    stacked = tensor._replace(shape=(2, tensor.nbytes // 4))
    second = stacked.part(1)
    assert (second.start, second.nbytes) == (tensor.start + tensor.nbytes // 2, tensor.nbytes // 2)


def test_index_and_headers_are_joined() -> None:
    tensors, absent, unindexed = take_inventory({"a": "1", "gone": "2"}, {"1": header(A, B)})
    assert tensors["a"] == ("a", "U8", (2,), "1", 8, 2)
    assert absent == {"gone": "2"} and unindexed == {"b": "1"}
    assert take_inventory(None, {"1": header(A, B)})[0].keys() == {"a", "b"}
    with pytest.raises(CheckpointError, match="1 lacks tensor c, which the index places there"):
        take_inventory({"c": "1"}, {"1": header(A)})


@pytest.mark.parametrize("shard", ["../x", "/etc/passwd", "", "..", 7, "a\\b"])
def test_a_shard_is_a_file_of_the_folder(shard: object, mini: Path) -> None:
    change_json(mini / INDEX_NAME, lambda index: index["weight_map"].update({"x": shard}))
    with pytest.raises(CheckpointError, match="expected the name of a file in the same folder"):
        read_checkpoint(mini)


def test_one_file_needs_no_index(mini: Path) -> None:
    (mini / INDEX_NAME).unlink()
    with pytest.raises(CheckpointError, match="without an index exactly one is expected"):
        read_checkpoint(mini)
    for path in mini.glob("*.safetensors"):
        if path.name != SHARD:
            path.unlink()
    assert {tensor.shard for tensor in read_checkpoint(mini).tensors.values()} == {SHARD}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"[1]", "is not a JSON object"), (b"{", "is not readable as JSON"),
        (b"\xff", "is not readable as JSON"), (b"[" * 100_000, "is not readable as JSON"),
        (b"version https://git-lfs.github.com/spec/v1", "is a Git LFS pointer"),
    ],
)  # fmt: skip
def test_json_that_is_damaged(raw: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(raw)
    with pytest.raises(CheckpointError, match=words):
        read_json(tmp_path / "config.json")


def test_json_that_is_missing_or_sound(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="is missing"):
        read_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text(json.dumps({"a": 1}))
    assert read_json(tmp_path / "config.json") == {"a": 1}
