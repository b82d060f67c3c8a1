"""A converted folder as it is opened again: what is missing, foreign or changed is named."""

import shutil
from pathlib import Path

import pytest
from kit import KIMI_MINI

from kconvert.convert import convert
from kconvert.layouts.errors import CheckpointError, KconvertError, OutputError
from kconvert.layouts.stored.output import Output, is_output

BLOB = "rank-00000-of-00001/layer-00001.safetensors"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("stored") / "output"
    convert(KIMI_MINI, output)
    return output


@pytest.fixture
def folder(converted: Path, tmp_path: Path) -> Path:
    return shutil.copytree(converted, tmp_path / "output")


def test_what_it_holds(folder: Path) -> None:
    output = Output(folder)
    assert is_output(folder) and not is_output(folder.parent)
    assert output.layout == "marlin"
    assert output.moe_layers() == {1, 2}
    assert [b.path.stem for b in output.common([1], vision=False)] == ["layer-00001", "outer"]
    assert output.experts(2, 0).info.sharding.rank == 0


def test_a_part_is_refused(tmp_path: Path) -> None:
    convert(KIMI_MINI, tmp_path / "part", layers=[1])
    with pytest.raises(KconvertError, match="without --layers"):
        Output(tmp_path / "part")


def test_no_output_is_refused() -> None:
    with pytest.raises(OutputError, match="kconvert convert"):
        Output(KIMI_MINI)


def _remove(folder: Path, _: Path) -> None:
    (folder / BLOB).unlink()


def _cut(folder: Path, _: Path) -> None:
    data = (folder / BLOB).read_bytes()
    (folder / BLOB).write_bytes(data[:-1])


def _header(folder: Path, _: Path) -> None:
    data = bytearray((folder / BLOB).read_bytes())
    data[9:12] = b"\0\0\0"
    (folder / BLOB).write_bytes(data)


def _foreign(folder: Path, other: Path) -> None:
    shutil.copy(other / BLOB, folder / BLOB)


def _other_rank(folder: Path, _: Path) -> None:
    shutil.copy(folder / BLOB.replace("00001.s", "00002.s"), folder / BLOB)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_remove, "is missing"),
        (_cut, "bytes were written"),
        (_header, "damaged header"),
        (_foreign, "written|another conversion"),
        (_other_rank, "another conversion"),
    ],
)
def test_a_blob_that_is_not_the_manifests(folder, tmp_path: Path, change, words) -> None:
    if change is _foreign:
        convert(KIMI_MINI, tmp_path / "other", layout="w4a16", layers=[1])
    change(folder, tmp_path / "other")
    with pytest.raises(CheckpointError, match=words) as error:
        Output(folder).experts(1, 0)
    assert "layer-00001.safetensors" in str(error.value)


def test_a_changed_config_is_refused(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(
        config.read_text().replace('"num_experts_per_tok": 2', '"num_experts_per_tok": 4')
    )
    with pytest.raises(CheckpointError, match="not the one that was converted"):
        Output(folder)
