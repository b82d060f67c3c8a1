"""Odd but sound checkpoints: each converts to the same blobs, bit for bit."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from kit import EXPERT0, SHARD, Tensor, change_json, copy_mini, load, tree, write

from kconvert.convert import convert
from kconvert.convert.run import Conversion
from kconvert.validate import validate

INDEX = "model.safetensors.index.json"


def weights(folder: Path) -> dict[str, bytes]:
    """The data of every blob: headers hold a fingerprint of the source's headers."""
    blobs = {}
    for name, raw in tree(folder).items():
        if name.endswith(".safetensors"):
            blobs[name] = raw[8 + int.from_bytes(raw[:8], "little") :]
    return blobs


def deep_links(source: Path) -> Path:
    """A Hub cache: snapshots/commit/file → blobs/hash → a store elsewhere."""
    snapshot, blobs = (source.parent / name for name in ("hub/snapshots/abc", "hub/blobs"))
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, path in enumerate(sorted(source.iterdir())):
        (blobs / f"{i:064x}").symlink_to(path)
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"{i:064x}")
    return snapshot


def metadata(value: object) -> Callable[[Path], Path]:
    def apply(source: Path) -> Path:
        write(source / SHARD, load(source / SHARD), metadata=value)
        return source

    return apply


def unaligned(source: Path) -> Path:
    size = int.from_bytes((source / SHARD).read_bytes()[:8], "little")
    write(source / SHARD, load(source / SHARD), pad=1 - size % 8)
    raw = (source / SHARD).read_bytes()
    assert (8 + int.from_bytes(raw[:8], "little")) % 2 == 1
    return source


def reversed_order(source: Path) -> Path:
    for path in source.glob("*.safetensors"):
        write(path, dict(reversed(load(path).items())))
    change_json(
        source / INDEX, lambda i: i.update(weight_map=dict(sorted(i["weight_map"].items())))
    )
    return source


def companions_elsewhere(source: Path) -> Path:
    """Scales and shapes of layer 1 in the shards of layer 2 and of the vision tower."""
    layer, other, far = (source / f"model-0000{i}-of-000006.safetensors" for i in (2, 3, 6))
    tensors = load(layer)
    scales = {n: t for n, t in tensors.items() if n.endswith("weight_scale")}
    shapes = {n: t for n, t in tensors.items() if n.endswith("weight_shape")}
    write(layer, {n: t for n, t in tensors.items() if n not in {*scales, *shapes}})
    write(other, {**load(other), **scales})
    write(far, {**load(far), **shapes})

    def move(index: dict) -> None:
        index["weight_map"] |= dict.fromkeys(scales, other.name) | dict.fromkeys(shapes, far.name)

    change_json(source / INDEX, move)
    return source


def one_file(source: Path) -> Path:
    """No shards and no index."""
    everything: dict[str, Tensor] = {}
    for path in sorted(source.glob("*.safetensors")):
        everything |= load(path)
        path.unlink()
    (source / INDEX).unlink()
    write(source / "model.safetensors", everything)
    return source


def non_ascii(source: Path) -> Path:
    return source.rename(source.with_name("Gewichte – 重み €"))


def long_shapes(source: Path) -> Path:
    """weight_shape as I64, as llm-compressor writes it."""
    for path in source.glob("*.safetensors"):
        tensors = load(path)
        for name, tensor in tensors.items():
            if name.endswith("weight_shape"):
                wide = b"".join(tensor.data[i : i + 4] + bytes(4) for i in (0, 4))
                tensors[name] = Tensor("I64", (2,), wide)
        write(path, tensors)
    return source


def quantization_config_at(*places: str) -> Callable[[Path], Path]:
    def apply(source: Path) -> Path:
        def move(config: dict) -> None:
            table = config["text_config"].pop("quantization_config")
            for place in places:
                config[place] = table

        change_json(source / "config.json", move)
        return source

    return apply


def actorder(value: object) -> Callable[[Path], Path]:
    def apply(source: Path) -> Path:
        def change(config: dict) -> None:
            table = config["text_config"]["quantization_config"]
            table["config_groups"]["group_0"]["weights"]["actorder"] = value

        change_json(source / "config.json", change)
        return source

    return apply


SAME = {
    "two-deep links": deep_links,
    "metadata null": metadata(None),
    "metadata empty": metadata({}),
    "metadata of strings": metadata({"format": "pt", "a": "b"}),
    "unaligned data": unaligned,
    "any order": reversed_order,
    "companions in other shards": companions_elsewhere,
    "one file without an index": one_file,
    "non-ASCII path": non_ascii,
    "weight_shape I64": long_shapes,
    "quantization_config at the top": quantization_config_at("quantization_config"),
    "compression_config": quantization_config_at("compression_config"),
    "actorder static": actorder("static"),
    "actorder weight": actorder("weight"),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("reference")
    source = copy_mini(folder / "source")
    convert(source, folder / "out", tp=2)
    return weights(folder / "out")


def converted(source: Path, output: Path, **options: object) -> Conversion:
    result = convert(source, output, **{"tp": 2, **options})
    assert result.complete
    checked = validate(output, source)
    assert checked.findings == []
    return result


@pytest.mark.parametrize("name", SAME)
def test_same_bits(name: str, mini: Path, tmp_path: Path, reference: dict[str, bytes]) -> None:
    source = SAME[name](mini)
    converted(source, tmp_path / "aus – 出力")
    assert weights(tmp_path / "aus – 出力") == reference


def test_zero_size_tensors(mini: Path, tmp_path: Path, reference: dict[str, bytes]) -> None:
    """First, between and last in their shard; they are kept."""
    tower = "vision_tower.nothing"
    empty = Tensor("BF16", (0, 7), b"")
    for shard, first, last in [
        ("1", {}, {f"{tower}.1": empty}),
        ("6", {f"{tower}.0": empty}, {tower: empty}),
    ]:
        path = mini / f"model-0000{shard}-of-000006.safetensors"
        (name, tensor), *others = load(path).items()
        names = {**first, **last}
        write(path, {**first, name: tensor, **last, **dict(others)})

        def add(index: dict, names=names, path=path) -> None:
            index["weight_map"] |= dict.fromkeys(names, path.name)

        change_json(mini / INDEX, add)
    converted(mini, tmp_path / "out")
    assert weights(tmp_path / "out") == reference
    out = load(tmp_path / "out/common/vision.safetensors")
    assert out[tower] == out[f"{tower}.0"] == out[f"{tower}.1"] == empty


def test_unindexed_tensors_and_stale_files(
    mini: Path, tmp_path: Path, reference: dict[str, bytes]
) -> None:
    stray = Tensor("F32", (2,), b"\1" * 8)
    write(mini / SHARD, {"stray": stray, **load(mini / SHARD), f"{EXPERT0}old": stray})
    write(mini / "consolidated.safetensors", {"stale": stray})
    (mini / "pytorch_model.bin").write_bytes(b"old weights")
    (mini / "assets").mkdir()
    result = converted(mini, tmp_path / "out")
    assert weights(tmp_path / "out") == reference
    reported = "\n".join(result.ignored)
    assert f"{SHARD}: 2 tensor(s) not in the index, stray, {EXPERT0}old" in reported
    assert "consolidated.safetensors: weights the index does not name" in reported
    assert "pytorch_model.bin: weights" in reported
    assert "assets: not a file" in reported


def test_read_only_source(mini: Path, tmp_path: Path, reference: dict[str, bytes]) -> None:
    """Nothing is created, changed or touched there."""

    def state() -> dict[str, tuple[int, int]]:
        paths = [mini, *mini.iterdir()]
        return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in paths}

    for path in mini.iterdir():
        path.chmod(0o444)
    mini.chmod(0o555)
    before = state()
    try:
        converted(mini, tmp_path / "out")
        assert state() == before
    finally:
        mini.chmod(0o755)
    assert weights(tmp_path / "out") == reference


def test_names_without_a_prefix(mini: Path, tmp_path: Path, reference: dict[str, bytes]) -> None:
    """K2-Thinking and DeepSeek-V3: no `language_model.`, no vision, a flat config."""
    prefix = "language_model."
    table = json.loads((mini / INDEX).read_text())["weight_map"]
    for path in mini.glob("*.safetensors"):
        text = {n.removeprefix(prefix): t for n, t in load(path).items() if n.startswith(prefix)}
        write(path, text) if text else path.unlink()
    (mini / INDEX).write_text(
        json.dumps({"weight_map": {
            n.removeprefix(prefix): shard for n, shard in table.items() if n.startswith(prefix)
        }})
    )  # fmt: skip
    config = json.loads((mini / "config.json").read_text())["text_config"]
    (mini / "config.json").write_text(json.dumps(config))
    converted(mini, tmp_path / "out")
    expected = {n: data for n, data in reference.items() if "vision" not in n}
    assert weights(tmp_path / "out") == expected
    names = load(tmp_path / "out/rank-00001-of-00002/layer-00002.safetensors")
    assert all(name.startswith("model.layers.2.mlp.experts.w") for name in names)


def test_mtp_layer(mini: Path, tmp_path: Path) -> None:
    """DeepSeek's multi-token-prediction layer comes along as one more layer."""
    base = "language_model.model.layers."
    tensors = load(mini / "model-00003-of-000006.safetensors")
    mtp = {n.replace(f"{base}2.", f"{base}3."): t for n, t in tensors.items()}
    norm = tensors[f"{base}2.input_layernorm.weight"]
    mtp |= {f"{base}3.{n}.weight": norm for n in ("enorm", "hnorm", "shared_head.norm")}
    mtp[f"{base}3.eh_proj.weight"] = Tensor("BF16", (256, 512), bytes(2 * 256 * 512))
    write(mini / "mtp.safetensors", mtp)
    change_json(
        mini / INDEX, lambda i: i["weight_map"].update(dict.fromkeys(mtp, "mtp.safetensors"))
    )
    change_json(mini / "config.json", lambda c: c["text_config"].update(num_nextn_predict_layers=1))
    converted(mini, tmp_path / "out")
    assert f"{base}3.enorm.weight" in load(tmp_path / "out/common/layer-00003.safetensors")
    assert (tmp_path / "out/rank-00000-of-00002/layer-00003.safetensors").is_file()


@pytest.mark.parametrize("layout", ["marlin", "w4a16"])
@pytest.mark.parametrize("group", [64, 128, None])
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_other_groups_and_scale_dtypes(layout, group, dtype, mini: Path, tmp_path: Path) -> None:
    """Scales of 64, 128 and whole rows; at tp 2 w2 has one group of 128 a rank."""
    for path in mini.glob("*.safetensors"):
        tensors = load(path)
        for name, tensor in tensors.items():
            if name.endswith("weight_scale"):
                rows, groups = tensor.shape[0], 256 // group if group else 1
                width = 4 if dtype == "F32" else 2
                bits = np.frombuffer(os.urandom(rows * groups * width), f"<u{width}")
                finite = bits & ~bits.dtype.type(1 << (8 * width - 2))  # a bit of the exponent
                tensors[name] = Tensor(dtype, (rows, groups), finite.tobytes())
        write(path, tensors)

    def change(config: dict) -> None:
        table = config["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"]
        table |= {"group_size": group or -1, "strategy": "group" if group else "channel"}

    change_json(mini / "config.json", change)
    converted(mini, tmp_path / "out", layout=layout)


@pytest.mark.parametrize(
    ("layout", "tp", "ep"),
    [("marlin", 1, 1), ("marlin", 4, 1), ("marlin", 8, 2), ("marlin", 8, 8), ("marlin", 4, 2),
     ("w4a16", 1, 1), ("w4a16", 8, 1), ("w4a16", 16, 4), ("w4a16", 2, 2)],
)  # fmt: skip
def test_every_parallelism_holds_the_source(layout, tp, ep, mini: Path, tmp_path: Path) -> None:
    converted(mini, tmp_path / "out", layout=layout, tp=tp, ep=ep)
    assert len(list((tmp_path / "out").glob("rank-*"))) == tp
