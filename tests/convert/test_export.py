"""An output turned back into a checkpoint: every tensor's bytes, and converting it again."""

import json
import shutil
from pathlib import Path

import pytest
from engines import checkpoints
from formats_kit import CHECKPOINTS, FORMATS
from kit import KIMI_MINI, load, tree

from kconvert.convert import convert
from kconvert.convert.export import prepare_export, run_export
from kconvert.convert.inspect import inspect
from kconvert.layouts.blob import read_blob
from kconvert.layouts.errors import UnsupportedError

INDEX = "model.safetensors.index.json"
RESTORED = [name for name in CHECKPOINTS if "gptq" not in name and "gpt-oss" not in name]


def export(output: Path, folder: Path) -> None:
    run_export(prepare_export(output, folder))


def tensors(folder: Path) -> dict:
    return {name: t for path in folder.glob("*.safetensors") for name, t in load(path).items()}


@pytest.mark.parametrize(
    ("layout", "tp", "ep"), [("marlin", 1, 1), ("marlin", 4, 2), ("w4a16", 8, 1), ("marlin", 8, 8)]
)
def test_kimi_mini_comes_back_file_by_file(layout: str, tp: int, ep: int, tmp_path: Path) -> None:
    """Its shards are split and named as K2.6's are."""
    convert(KIMI_MINI, tmp_path / "out", layout=layout, tp=tp, ep=ep)
    export(tmp_path / "out", tmp_path / "back")
    want, found = tree(KIMI_MINI), tree(tmp_path / "back")
    assert json.loads(found.pop(INDEX)) == json.loads(want.pop(INDEX))
    assert found == want
    assert inspect(tmp_path / "back")["kind"] == "checkpoint"
    convert(tmp_path / "back", tmp_path / "again", layout=layout, tp=tp, ep=ep)
    assert tree(tmp_path / "again") == tree(tmp_path / "out")


@pytest.mark.parametrize("name", RESTORED)
def test_other_formats(name: str, tmp_path: Path) -> None:
    """In shards of our own, the same tensors; and from them the same blobs."""
    convert(FORMATS / name, tmp_path / "out", tp=2)
    export(tmp_path / "out", tmp_path / "back")
    assert tensors(tmp_path / "back") == tensors(FORMATS / name)
    convert(tmp_path / "back", tmp_path / "again", tp=2)
    for path in (tmp_path / "out").rglob("*.safetensors"):
        _, info = read_blob(path)
        _, again = read_blob(tmp_path / "again" / path.relative_to(tmp_path / "out"))
        assert (info.digests, info.sharding) == (again.digests, again.sharding)


@pytest.mark.parametrize("name", sorted({*CHECKPOINTS} - {*RESTORED}))
def test_what_blobs_do_not_keep_is_refused(name: str, tmp_path: Path) -> None:
    convert(FORMATS / name, tmp_path / "out", layout="w4a16")
    with pytest.raises(UnsupportedError, match="blobs do not keep every byte"):
        prepare_export(tmp_path / "out", tmp_path / "back")


def test_dtypes_are_the_sources(tmp_path: Path) -> None:
    """weight_shape is int64 where compressed-tensors wrote it; scales may be channelwise."""
    source = checkpoints.write(tmp_path / "source", group_size=None)
    convert(source, tmp_path / "out", layout="w4a16", tp=4)
    export(tmp_path / "out", tmp_path / "back")
    assert tensors(tmp_path / "back") == tensors(source)


def test_scales_that_were_cast_are_refused(tmp_path: Path) -> None:
    name = next(name for name in CHECKPOINTS if "gptq" in name)
    convert(FORMATS / name, tmp_path / "out", scale_dtype="bfloat16")
    with pytest.raises(UnsupportedError, match="cast when it was converted"):
        prepare_export(tmp_path / "out", tmp_path / "back")


def test_only_an_empty_folder_or_its_own(tmp_path: Path, kconvert) -> None:
    convert(KIMI_MINI, tmp_path / "out")
    shutil.copytree(KIMI_MINI, tmp_path / "other")
    back = tmp_path / "back"
    assert kconvert("export", tmp_path / "out", back).code == 0
    before = {path: path.stat().st_mtime_ns for path in back.iterdir() if path.is_file()}
    again = kconvert("export", tmp_path / "out", back)
    assert again.code == 0 and "0 written, 0 B; 6 were there already" in again.out
    assert {path: path.stat().st_mtime_ns for path in before} == before
    (back / "mine.txt").touch()
    for folder, words in [(back, "mine.txt is not of this export"), (tmp_path / "other", "not of")]:
        outcome = kconvert("export", tmp_path / "out", folder)
        assert outcome.code == 2 and words in outcome.err
    assert kconvert("export", tmp_path / "out", tmp_path / "out/x").code == 2
