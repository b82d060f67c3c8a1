"""`inspect` says what any path is."""

import json
import shutil
from pathlib import Path

import pytest
from kit import KIMI_MINI, change_json

from kconvert.convert import convert
from kconvert.convert.inspect import DRAFTER, inspect
from kconvert.convert.synth.write import synth
from kconvert.layouts.checkpoint import read_checkpoint
from kconvert.runtime.drafting.dflash_config import ARCHITECTURE

TINY = Path(__file__).parents[1] / "tiny_kimi"


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("inspect") / "out"
    convert(KIMI_MINI, folder, tp=2)
    return folder


def test_an_output_and_its_parts(out: Path, tmp_path: Path) -> None:
    assert inspect(out)["kind"] == "output of kconvert"
    rank = inspect(out / "rank-00001-of-00002")
    assert rank["kind"] == "one rank's folder of an output of kconvert"
    assert (rank["rank"], rank["tp"], rank["layout"]) == (1, 2, "marlin")
    assert (rank["groups"], rank["output"]) == ("layers 1-2", str(out))
    common = inspect(out / "common")
    assert common["kind"] == "common folder of an output of kconvert"
    assert common["groups"] == "layers 0-2, outer, vision"
    blob = inspect(out / "rank-00001-of-00002/layer-00002.safetensors")
    assert (blob["kind"], blob["rank"], blob["tensors"]) == ("blob of kconvert", 1, 4)
    assert "rank" not in inspect(out / "common/outer.safetensors")
    convert(KIMI_MINI, tmp_path / "part", layers=[1])
    assert inspect(tmp_path / "part")["kind"] == "part of an output of kconvert"


def test_an_unfinished_output(out: Path, tmp_path: Path, kconvert) -> None:
    convert(KIMI_MINI, tmp_path / "part", tp=2, layers=[1])
    (tmp_path / "part/kconvert.json").unlink()
    found = inspect(tmp_path / "part")
    assert found["kind"] == "unfinished output of kconvert"
    assert (found["blobs"], found["tp"]) == ("3 of 9 are here", 2)
    text = kconvert("inspect", tmp_path / "part").out
    assert "to finish: run the same `kconvert convert` again" in text
    (tmp_path / "part/.kconvert/outline.json").unlink()
    assert inspect(tmp_path / "part")["files"] == 3


def test_a_drafter_and_single_files() -> None:
    assert DRAFTER == ARCHITECTURE
    drafter = inspect(TINY / "drafter")
    assert drafter["kind"].startswith("DFlash drafter") and drafter["block_size"] == 8
    assert inspect(TINY / "drafter/model.safetensors")["kind"] == "safetensors file"


def test_a_checkpoint_that_cannot_be_converted(mini: Path, kconvert) -> None:
    """What it is, and on stderr why not."""
    change_json(
        mini / "config.json",
        lambda table: table["text_config"]["quantization_config"].update(format="float-quantized"),
    )
    outcome = kconvert("inspect", mini)
    assert outcome.code == 2
    assert "kind: checkpoint\n" in outcome.out and "shards: 6 of 6 are here\n" in outcome.out
    assert "refused" not in outcome.out
    assert outcome.err.startswith("kconvert: config.json: format is 'float-quantized'")
    assert "float-quantized" in json.loads(kconvert("inspect", mini, "--json").out)["refused"]


def test_what_is_nothing_known(out: Path, tmp_path: Path, kconvert) -> None:
    synth(tmp_path / "models/a", "kimi-mini", layers=[0])
    synth(tmp_path / "models/b", "kimi-mini", layers=[0])
    snapshot = tmp_path / "models--org--name/snapshots/0123"
    shutil.copytree(tmp_path / "models/a", snapshot)
    shutil.copytree(tmp_path / "models/a", tmp_path / "no config")
    (tmp_path / "no config/config.json").unlink()
    (tmp_path / "empty").mkdir()
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/notes.txt").write_text("nothing")
    (tmp_path / "rank-00000-of-00001").mkdir()
    (tmp_path / "rank-00000-of-00001/x").touch()
    for path, words in (
        ("empty", "is an empty folder"),
        ("plain", "is no checkpoint (it has no config.json) and no output of `kconvert convert`"),
        ("rank-00000-of-00001", "is no checkpoint"),
        ("models", "give a folder in it: a or 1 more"),
        ("models--org--name", "give a folder in it: snapshots/0123"),
        ("no config", "it holds weights, and to be a checkpoint lacks its config.json"),
        ("plain/notes.txt", "is no safetensors file: of files, only those can be inspected"),
        ("not/a/thing", "is neither a file or folder here nor the name of a repository on the Hub"),
        ("models/a/config.json", f"is one file of a folder: give {tmp_path}/models/a"),
    ):
        outcome = kconvert("inspect", tmp_path / path)
        assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
        assert words in outcome.err
    assert kconvert("inspect", "").code == 2


def test_an_output_that_lacks_something_says_so(out: Path, tmp_path: Path, kconvert) -> None:
    assert inspect(out)["damaged_files"] == []
    cut = shutil.copytree(out, tmp_path / "cut")
    (cut / "common/outer.safetensors").unlink()
    blob = "rank-00001-of-00002/layer-00002.safetensors"
    with open(cut / blob, "r+b") as file:
        size = file.seek(0, 2)
        file.truncate(size - 1)
    assert inspect(cut)["damaged_files"] == [
        "common/outer.safetensors is missing", f"{blob} has {size - 1:,} bytes, {size:,} expected",
    ]  # fmt: skip
    said = kconvert("inspect", cut).out
    assert "damaged files: common/outer.safetensors is missing" in said


def test_whether_and_for_what_it_can_be_converted(tmp_path: Path) -> None:
    facts = inspect(KIMI_MINI)
    assert facts["can_be_converted"] == (
        "as marlin with --tp 1, 2, 4, 8 (--ep 2, 4, 8), 16 (--ep 4, 8), 32 (--ep 8);"
        " as w4a16 with --tp 1, 2, 4, 8, 16 (--ep 2, 4, 8), 32 (--ep 4, 8)"
    )
    convert(KIMI_MINI, tmp_path / "out")
    assert inspect(tmp_path / "out")["can_be_resharded"] == facts["can_be_converted"]
    shapes = facts["sizes"]["expert_companion_bytes"]
    assert shapes == 2 * 8 * 3 * 8  # of two layers weight_shape, [2] int32
    tensors = read_checkpoint(KIMI_MINI).tensors.values()
    assert sum(facts["sizes"].values()) == sum(tensor.nbytes for tensor in tensors)


def test_tensors_by_a_pattern(tmp_path: Path, kconvert) -> None:
    (found,) = inspect(KIMI_MINI, "*layers.1.mlp.gate.weight")["tensors_found"].values()
    assert found["dtype"] == "BF16" and found["shape"] == [8, 256]
    assert found["file"] == "model-00002-of-000006.safetensors"
    convert(KIMI_MINI, tmp_path / "out", tp=2)
    stacked = inspect(tmp_path / "out", "*layers.1.*w13_weight_packed")["tensors_found"]
    assert {entry["file"] for entry in stacked.values()} == {
        f"rank-0000{rank}-of-00002/layer-00001.safetensors" for rank in range(2)
    }
    assert all(key.startswith(f"{entry['file']}: ") for key, entry in stacked.items())
    anchored = inspect(tmp_path / "out", "language_model.*layers.1.*w13_weight_packed")
    assert anchored["tensors_found"] == stacked  # the pattern is of a tensor's name
    assert kconvert("inspect", KIMI_MINI, "--tensors", "nothing").code == 0
    assert inspect(KIMI_MINI / "model-00006-of-000006.safetensors", "*")["tensors_found"]
