"""Blobs: what was changed after the conversion, or cannot be computed with, is refused by name."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from kit import KIMI_MINI, change_json, copy_mini, load, tree, write

from kconvert.convert import convert
from kconvert.layouts.blob import read_blob
from kconvert.layouts.errors import CheckpointError, UnsupportedError
from kconvert.runtime.engine import Engine
from kconvert.runtime.ranks import Ranks
from kconvert.runtime.weights import Blobs

TEXT = np.random.default_rng(2).integers(0, 512, 150).tolist()  # needs every expert of every layer
EXPERTS = "model.layers.1.mlp.experts."
LAYER1 = "layer-00001.safetensors"
ONE = f"rank-00000-of-00001/{LAYER1}"
AGAIN = "delete the file and run the same `kconvert convert` command again"


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("blobs")
    for layout in ("marlin", "w4a16"):
        convert(KIMI_MINI, root / layout, layout=layout)
    return {layout: root / layout for layout in ("marlin", "w4a16")}


@pytest.fixture
def blobs(request, originals, tmp_path: Path) -> Path:
    """A copy to be damaged; of marlin, if not asked for another."""
    return Path(shutil.copytree(originals[getattr(request, "param", "marlin")], tmp_path / "out"))


def flip(path: Path, name: str, expert: int | None = None) -> str:
    """Change one bit of a tensor or of a local expert in the middle; the tensor's whole name."""
    header, _ = read_blob(path)
    full = next(full for full in header.tensors if full.endswith(name))
    tensor = header.tensors[full]
    size = tensor.nbytes // (tensor.shape[0] if expert is not None else 1)
    flip_byte(path, tensor.start + size * (expert or 0) + size // 2)
    return full


def flip_byte(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("blobs", ["marlin", "w4a16"], indirect=True)
@pytest.mark.parametrize(
    ("file", "name", "expert"),
    [
        (f"common/{LAYER1}", "self_attn.o_proj.weight", None),
        (f"common/{LAYER1}", "mlp.gate.e_score_correction_bias", None),
        ("common/outer.safetensors", "model.embed_tokens.weight", None),
        (ONE, "w13_weight_packed", 0),
        (ONE, "w13_weight_scale", 7),
        (ONE, "w2_weight_packed", 7),
        (ONE, "w2_weight_scale", 3),
    ],
)
def test_a_flipped_bit_is_no_token(file, name, expert, blobs: Path) -> None:
    full = flip(blobs / file, name, expert)
    engine = Engine.open(blobs)  # reads no data
    where = f"{blobs / file}, tensor {full}" + ("" if expert is None else f", expert {expert}")
    for _ in range(2):  # and the second time is no better
        with pytest.raises(CheckpointError, match=f"^{re.escape(where)}: .*{AGAIN}"):
            engine.logits(TEXT)


@pytest.mark.parametrize("blobs", ["marlin", "w4a16"], indirect=True)
@pytest.mark.parametrize("part", ["w13_weight_packed", "w2_weight_scale"])
def test_an_expert_is_read_when_it_is_used(part, blobs: Path, originals) -> None:
    sound = Blobs(originals[blobs_layout(blobs)], Ranks())
    flip(blobs / ONE, part, 5)
    opened = Blobs(blobs, Ranks())
    for expert in (0, 4, 6, 7):
        found = opened.expert(EXPERTS + part, expert)
        assert np.array_equal(found, sound.expert(EXPERTS + part, expert))
    with pytest.raises(CheckpointError, match=f"{part}, expert 5: its data is not"):
        opened.expert(EXPERTS + part, 5)


def blobs_layout(folder: Path) -> str:
    return read_blob(folder / ONE)[1].layout


def test_an_expert_is_named_as_in_the_model(tmp_path: Path) -> None:
    """Of 8 experts over two groups of ranks, the last rank's number 1 is the model's 5."""
    convert(KIMI_MINI, tmp_path / "out", tp=2, ep=2)
    flip(tmp_path / "out/rank-00001-of-00002" / LAYER1, "w2_weight_packed", 1)
    Blobs(tmp_path / "out", Ranks(0, 2)).expert(f"{EXPERTS}w2_weight_packed", 1)
    with pytest.raises(CheckpointError, match=r"rank-00001.*w2_weight_packed, expert 5: "):
        Blobs(tmp_path / "out", Ranks(1, 2)).expert(f"{EXPERTS}w2_weight_packed", 1)


def test_a_tensor_is_hashed_once_and_not_copied(originals, monkeypatch) -> None:
    from kconvert.runtime import weights

    opened, hashed, real = Blobs(originals["marlin"], Ranks()), [], weights.digest
    monkeypatch.setattr(weights, "digest", lambda data: hashed.append(data) or real(data))
    for _ in range(2):
        array = opened.get("model.norm.weight", (256,))
    assert len(hashed) == 1
    assert np.shares_memory(array, np.asarray(hashed[0]))


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tiktoken.model", "chat_template.jinja"]
)
def test_a_changed_small_file(name, tmp_path: Path) -> None:
    source = copy_mini(tmp_path / "source")
    for small in ("tiktoken.model", "chat_template.jinja", "LICENSE"):
        (source / small).write_text("as it was")
    out = tmp_path / "out"
    convert(source, out)
    before = tree(out)
    flip_byte(out / "LICENSE", 3)  # nothing is generated by it
    Engine.open(out)
    flip_byte(out / name, 3)
    with pytest.raises(CheckpointError, match=f"^{out / name} is not what was converted: {AGAIN}"):
        Engine.open(out)
    for small in (name, "LICENSE"):
        (out / small).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        Engine.open(out)
    convert(source, out)
    assert tree(out) == before


def test_an_edited_config(blobs: Path) -> None:
    change_json(blobs / "config.json", lambda c: c["text_config"].update(routed_scaling_factor=2.0))
    with pytest.raises(CheckpointError, match=r"config\.json is missing or was changed"):
        Engine.open(blobs)


@pytest.mark.parametrize("file", [ONE, f"common/{LAYER1}", "common/vision.safetensors"])
def test_a_changed_header(file, blobs: Path) -> None:
    path = blobs / file
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b'"digests', b'"digestz', 1))
    with pytest.raises(CheckpointError, match=f"^{path} has a damaged header: {AGAIN}"):
        Engine.open(blobs)
    at = raw.index(b'"fingerprint') + 20
    path.write_bytes(raw[:at] + (b"1" if raw[at : at + 1] == b"0" else b"0") + raw[at + 1 :])
    with pytest.raises(CheckpointError, match=f"^{path} has another header than was written"):
        Engine.open(blobs)


def test_what_the_sentence_advises(blobs: Path, originals) -> None:
    for file, name in ((ONE, "w2_weight_scale"), (f"common/{LAYER1}", "o_proj.weight")):
        flip(blobs / file, name)
        convert(KIMI_MINI, blobs)
        assert tree(blobs) != tree(originals["marlin"])  # what is there is kept
        (blobs / file).unlink()
        convert(KIMI_MINI, blobs)
    assert tree(blobs) == tree(originals["marlin"])


@pytest.mark.parametrize("layout", ["marlin", "w4a16"])
@pytest.mark.parametrize(
    ("tensors", "file"),
    [
        (r"experts\..*weight_scale", ONE),
        (r"model\.embed_tokens\.weight", "common/outer.safetensors"),
        (r"lm_head\.weight", "common/outer.safetensors"),
        (r"layers\.1\.mlp\.gate\.weight", f"common/{LAYER1}"),
    ],
)
def test_f16_is_refused(tensors, file, layout, tmp_path: Path) -> None:
    convert(in_f16(tmp_path / "source", tensors), tmp_path / "out", layout=layout)
    words = rf"^{tmp_path / 'out' / file}, tensor \S*{tensors}\S*: F16 found, .* BF16 or F32"
    with pytest.raises(UnsupportedError, match=words):
        Engine.open(tmp_path / "out")


def test_a_vision_tower_may_be_f16(tmp_path: Path, originals) -> None:
    convert(in_f16(tmp_path / "source", r"vision_tower\."), tmp_path / "out")
    found = Engine.open(tmp_path / "out").logits(TEXT[:4])
    assert np.array_equal(found, Engine.open(originals["marlin"]).logits(TEXT[:4]))


def in_f16(folder: Path, tensors: str) -> Path:
    """kimi-mini with the bf16 tensors whose names match said to be F16."""
    copy_mini(folder)
    changed = 0
    for path in folder.glob("*.safetensors"):
        content = load(path)
        for name, tensor in content.items():
            if re.search(tensors, name) and tensor.dtype == "BF16":
                content[name] = tensor._replace(dtype="F16")
                changed += 1
        write(path, content, metadata={"format": "pt"})
    assert changed
    return folder


def test_a_bias_is_refused(tmp_path: Path) -> None:
    """The engine has no place for one: without it the text would be another."""
    copy_mini(tmp_path / "source")
    old, new = "model.layers.0.self_attn.o_proj.weight", "model.layers.0.self_attn.o_proj.bias"
    index = tmp_path / "source/model.safetensors.index.json"
    index.write_text(index.read_text().replace(old, new))
    for path in (tmp_path / "source").glob("*.safetensors"):
        content = {name.replace(old, new): tensor for name, tensor in load(path).items()}
        write(path, content, metadata={"format": "pt"})
    convert(tmp_path / "source", tmp_path / "out")
    with pytest.raises(
        UnsupportedError, match=r"layer-00000\S+, tensor \S+o_proj\.bias: the engine"
    ):
        Engine.open(tmp_path / "out")


def test_absent_and_misshapen(originals) -> None:
    opened = Blobs(originals["w4a16"], Ranks())
    with pytest.raises(CheckpointError, match=r"model\.none\.weight is in no blob of rank 0"):
        opened.get("model.none.weight", (1,))
    with pytest.raises(CheckpointError, match=r"outer.*model\.norm\.weight: expected \[1\] from"):
        opened.get("model.norm.weight", (1,))
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts\.\S+ is in no blob"):
        opened.expert("model.layers.0.mlp.experts.w2_weight_scale", 0)
