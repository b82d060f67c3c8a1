"""What a blob says of itself: versions, keys of later writers, what all conversions share."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from kit import KIMI_MINI, tree

from kconvert.convert import convert
from kconvert.layouts.blob import BlobInfo, blob_info, encode_header, read_blob
from kconvert.layouts.errors import OutputError
from kconvert.layouts.header import parse_header
from kconvert.layouts.manifest import encode_manifest, read_manifest

RANK = "rank-00001-of-00002/layer-00001.safetensors"
COMMON = "common/layer-00001.safetensors"


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("blob") / "out"
    convert(KIMI_MINI, folder, tp=2)
    return folder


def written(info: BlobInfo) -> BlobInfo:
    """`info` as a reader of the header gets it."""
    raw = encode_header([], info)
    return blob_info(parse_header(raw, len(raw), "a.safetensors"), "a.safetensors")


def test_a_ranks_blob_says_how_it_was_made(out: Path) -> None:
    _, info = read_blob(out / RANK)
    table = json.loads(info.encode())
    assert table["quantization"] == {
        "scheme": "int", "bits": 4, "group_size": 32, "zero_point": False, "scale_dtype": "BF16",
    }  # fmt: skip
    assert (table["layout"], table["rank"], table["tp"], table["ep"]) == ("marlin", 1, 2, 1)
    assert table["w13_rows"] == "gate_up" and table["padding"] is None
    assert table["dropped"] == {"weight_shape": "I32"}
    assert len(bytes.fromhex(table["content"])) == len(bytes.fromhex(table["fingerprint"])) == 16


def test_common_blobs_are_the_same_for_every_layout_and_parallelism(tmp_path: Path) -> None:
    kinds = [{"tp": 1}, {"tp": 4, "ep": 2}, {"tp": 2, "layout": "w4a16"}]
    outputs = []
    for i, options in enumerate(kinds):
        convert(KIMI_MINI, tmp_path / f"{i}", **options)
        files = tree(tmp_path / f"{i}").items()
        outputs.append({name: data for name, data in files if name.startswith("common/")})
    assert len(outputs[0]) == 5 and outputs[0] == outputs[1] == outputs[2]


def test_a_common_blob_says_nothing_of_layout_and_parallelism(out: Path) -> None:
    _, info = read_blob(out / COMMON)
    assert info.sharding is None
    assert json.loads(info.encode()).keys() == {
        "format", "repo", "commit", "content", "fingerprint", "digests", "expert_digests",
    }  # fmt: skip


@pytest.mark.parametrize("name", [RANK, COMMON])
def test_keys_of_a_later_writer_are_kept(name: str, out: Path) -> None:
    _, info = read_blob(out / name)
    later = replace(info, unknown={"flavour": [1, {"a": None}]})
    assert written(info) == info and written(later) == later


def test_a_later_format_is_refused_and_an_earlier_one_read(out: Path) -> None:
    _, info = read_blob(out / RANK)
    with pytest.raises(OutputError, match="has format 2, this version reads up to 1"):
        written(replace(info, format=2))
    with pytest.raises(OutputError, match="metadata is not readable"):
        written(replace(info, format=0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"w13_rows": "interleaved"}, "w13_rows 'interleaved'"),
        ({"padding": {"rows": 64}}, "padding {'rows': 64}"),
        ({"tp": 3, "ep": 2}, "not readable"),
        ({"rank": 2}, "not readable"),
        ({"layout": None}, "not readable"),
    ],
)
def test_what_this_version_does_not_know_is_refused(change: dict, words: str, out: Path) -> None:
    _, info = read_blob(out / RANK)
    with pytest.raises(OutputError, match=words):
        written(replace(info, sharding=replace(info.sharding, **change)))


def test_another_quantization_is_refused_when_it_is_read(out: Path) -> None:
    _, info = read_blob(out / RANK)
    for change in ({"scheme": "nvfp4"}, {"codebook": 3}):
        other = replace(info.sharding, quantization=info.sharding.quantization | change)
        with pytest.raises(OutputError, match="quantization is"):
            other.read_quantization(Path("a.safetensors"))


def test_a_manifest_keeps_what_it_does_not_know(out: Path, tmp_path: Path) -> None:
    manifest = read_manifest(out)
    entry = replace(manifest.files[RANK], unknown={"mirror": "x"})
    later = replace(manifest, files=manifest.files | {RANK: entry}, unknown={"signature": "y"})
    (tmp_path / "kconvert.json").write_bytes(encode_manifest(later))
    assert read_manifest(tmp_path) == later
    assert b'"mirror"' in encode_manifest(read_manifest(tmp_path))
    (tmp_path / "kconvert.json").write_bytes(encode_manifest(replace(later, format=2)))
    with pytest.raises(OutputError, match="has format 2, this version reads up to 1"):
        read_manifest(tmp_path)
