"""Two models compared by what they mean, whatever holds them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from engines import checkpoints
from formats_kit import CHECKPOINTS, FORMATS
from html_kit import checked
from kit import EXPERT0, KIMI_MINI, LAYER1, SHARD, change_json, flip, load, write

from kconvert.convert import convert
from kconvert.validate.diff import Diff, Difference, diff
from kconvert.validate.report.diff import render_diff


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("diff")
    kinds = {"m1": ("marlin", 1, 1), "m4": ("marlin", 4, 2), "w8": ("w4a16", 8, 1)}
    for name, (layout, tp, ep) in kinds.items():
        convert(KIMI_MINI, root / name, layout=layout, tp=tp, ep=ep)
    return {"source": KIMI_MINI} | {name: root / name for name in kinds}


@pytest.fixture
def changed(mini: Path) -> Path:
    """Three codes of an expert, one of its scales, and two values of a norm are others."""
    tensors = load(mini / SHARD)

    def change(name: str, places: dict[int, int]) -> None:
        data = bytearray(tensors[name].data)
        for at, bits in places.items():
            data[at] ^= bits
        tensors[name] = tensors[name]._replace(data=bytes(data))

    change(f"{EXPERT0}gate_proj.weight_packed", {0: 0x11, 777: 0x80})
    change(f"{EXPERT0}down_proj.weight_scale", {40: 1})
    change(f"{LAYER1}input_layernorm.weight", {0: 1, 1: 1, 8: 1})
    write(mini / SHARD, tensors)
    return mini


FOUND = [
    Difference("layer-00001", f"{LAYER1}input_layernorm.weight", None, 2, 256),
    Difference("layer-00001", "codes", 0, 3, 3 * 256 * 256),
    Difference("layer-00001", "scales", 0, 1, 3 * 256 * 8),
]


@pytest.mark.parametrize("a", ["source", "m1", "m4", "w8"])
@pytest.mark.parametrize("b", ["source", "m4", "w8"])
def test_what_is_equal_and_what_is_not(outputs, changed, a: str, b: str, tmp_path: Path) -> None:
    same = diff(outputs[a], outputs[b])
    assert same.equal and (same.groups, same.experts) == (5, 16)
    other = changed
    if b != "source":
        layout, tp, ep = ("marlin", 4, 2) if b == "m4" else ("w4a16", 8, 1)
        other = tmp_path / "other"
        convert(changed, other, layout=layout, tp=tp, ep=ep)
    assert diff(outputs[a], other).differences == FOUND


def test_as_a_command(outputs, changed, kconvert) -> None:
    same = kconvert("diff", outputs["m1"], outputs["w8"])
    assert same.code == 0 and same.out.startswith("equal: ")
    outcome = kconvert("diff", outputs["m4"], changed)
    assert outcome.code == 1
    assert "layer-00001: 1 experts differ (0): in them 3 of 196,608 codes (0.00%)" in outcome.out
    table = json.loads(kconvert("diff", outputs["m4"], changed, "--json").out)
    assert table["equal"] is False and table["layers"]["layer-00001"]["experts"] == [0]
    assert table["layers"]["layer-00001"]["codes"] == {"changed": 3, "of": 196608}


def test_the_page_of_it(outputs, changed, kconvert, tmp_path: Path) -> None:
    target = tmp_path / "diff.html"
    assert kconvert("diff", outputs["m4"], changed, "--report", target).code == 1
    page = checked(target.read_text())
    assert "Different: 1 expert in 1 layer and 1 other difference." in page
    assert "converted: marlin, tp 4, ep 2" in page and "a checkpoint of 6 shards" in page
    assert "2 of 256 values differ (0.781 %)" in page and f"{LAYER1}input_layernorm" in page
    assert "Codes by expert" in page and "0.00153 %" in page
    assert kconvert("diff", outputs["m1"], outputs["w8"], "--report", target).code == 0
    assert "Equal: every code, scale, tensor and file." in checked(target.read_text())
    assert kconvert("diff", outputs["m1"], outputs["w8"], "--report", tmp_path).code == 2


def test_the_page_of_two_whole_models() -> None:
    """Generated: 60 layers of 384 experts, every one changed."""
    random = np.random.default_rng(5)
    result = Diff("a", "b", compared={f"layer-{n:05}": 384 for n in range(1, 61)})
    result.differences = [
        Difference(group, what, expert, int(total * random.uniform(0, 0.5)), total)
        for group in result.compared
        for what, total in (("codes", 44_040_192), ("scales", 1_376_256))
        for expert in range(384)
    ]
    page = checked(render_diff(result, label="Made up, to test this page"))
    assert len(page.encode()) < 1_000_000 and "Different: 23,040 experts in 60 layers." in page


def test_what_one_lacks_or_has_otherwise(outputs, mini: Path, tmp_path: Path) -> None:
    change_json(mini / "generation_config.json", lambda table: table.update(top_p=0.9))
    (mini / "chat_template.jinja").write_text("x")
    convert(mini, tmp_path / "out", text_only=True)
    found = diff(outputs["m4"], tmp_path / "out").differences
    assert [(d.group, d.what, d.text.partition(" /")[0]) for d in found] == [
        ("files", "generation_config.json", "differs"),
        ("files", "chat_template.jinja", "is not in"),
        ("vision", "vision", "is not in"),
    ]


def test_other_sizes_are_said(tmp_path: Path) -> None:
    a = checkpoints.write(tmp_path / "a")
    b = checkpoints.write(tmp_path / "b", group_size=64)
    found = [d for d in diff(a, b).differences if d.what == "experts"]
    assert len(found) == 2 and "group_size 32 against 8 experts of" in found[0].text


@pytest.mark.parametrize("name", CHECKPOINTS[::4])
def test_other_formats(name: str, tmp_path: Path) -> None:
    convert(FORMATS / name, tmp_path / "out", layout="w4a16")
    assert diff(FORMATS / name, tmp_path / "out").equal


def test_damage_is_named_and_not_taken_for_a_difference(outputs, tmp_path: Path, kconvert) -> None:
    out = shutil.copytree(outputs["m4"], tmp_path / "out")
    name = flip(out / "rank-00000-of-00004/layer-00002.safetensors", "w2_weight_scale", 1)
    outcome = kconvert("diff", outputs["m1"], out)
    assert outcome.code == 2 and f"{out}/" in outcome.err  # which of the two it is
    assert f"{name}, expert 1: its bytes were changed" in outcome.err
