"""Complete is complete: every tensor of the family is asked for, by name, shape and dtype."""

import json
import shutil
from pathlib import Path

import pytest
from kit import KIMI_MINI, LAYER1, SHARD, Tensor, change_json, load, write

from kconvert.convert import convert
from kconvert.layouts.checkpoint import read_checkpoint
from kconvert.layouts.errors import CheckpointError
from kconvert.layouts.model import read_model
from kconvert.validate import validate

INDEX = "model.safetensors.index.json"
WEIGHT_MAP = json.loads((KIMI_MINI / INDEX).read_text())["weight_map"]
WHOLE = [name for name in WEIGHT_MAP if ".experts." not in name and "language_model" in name]
ROUTER = f"{LAYER1}mlp.gate.weight"


def test_the_list_below_is_what_the_format_has() -> None:
    assert len(WHOLE) == 3 + 14 * 2 + 12  # outer, MoE layers, the dense layer


@pytest.mark.parametrize("name", WHOLE)
def test_a_tensor_that_the_index_forgets(name: str, mini: Path) -> None:
    """Whichever it is: it lies in its shard still, which the sentence says."""
    change_json(mini / INDEX, lambda index: index["weight_map"].pop(name))
    shard = WEIGHT_MAP[name]
    with pytest.raises(CheckpointError, match=f"^tensor {name} is missing: .*it lies in {shard}"):
        read_model(read_checkpoint(mini))


@pytest.mark.parametrize("name", WHOLE)
def test_a_tensor_of_another_shape_or_dtype(name: str, mini: Path) -> None:
    path = mini / WEIGHT_MAP[name]
    tensors = load(path)
    kind, shape, data = tensors[name]
    size = len(data) // (4 if kind == "F32" else 2)
    for wrong in (
        Tensor(kind, (*shape, 1), data),
        Tensor(kind, (shape[0] * 2, *shape[1:]), data * 2),
        Tensor("I32", shape, bytes(4 * size)),
        Tensor("F8_E4M3", shape, bytes(size)),
    ):
        write(path, tensors | {name: wrong})
        with pytest.raises(CheckpointError, match=f"{path.name}, tensor {name} is {wrong.dtype}"):
            read_model(read_checkpoint(mini))
    write(path, tensors | {name: Tensor("F32", shape, bytes(4 * size))})
    read_model(read_checkpoint(mini))


def test_commands_refuse_by_name(mini: Path, tmp_path: Path, kconvert) -> None:
    """Without lm_head, or with a router of another shape: convert, inspect and validate."""
    convert(mini, tmp_path / "good")
    head = "language_model.lm_head.weight"
    change_json(mini / INDEX, lambda index: index["weight_map"].pop(head))
    for command in (
        ("convert", mini, tmp_path / "out"), ("inspect", mini),
        ("validate", tmp_path / "good", "--source", mini),
    ):  # fmt: skip
        outcome = kconvert(*command)
        assert outcome.code == 2 and f"tensor {head} is missing" in outcome.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"n_shared_experts": None}, "mlp.shared_experts.down_proj.weight is not implied"),
        ({"n_shared_experts": 2}, "mlp.shared_experts.gate_proj.weight"),
        ({"first_k_dense_replace": 0}, "layer-00000 has 0 routed experts"),
        ({"q_lora_rank": None}, "self_attn.q_proj.weight"),
        ({"num_attention_heads": 8}, "self_attn.kv_b_proj.weight"),
        ({"vocab_size": 513}, "embed_tokens.weight"),
        ({"attention_bias": True}, "self_attn.kv_a_proj_with_mqa.bias"),
    ],
)
def test_a_config_that_does_not_fit_the_tensors(changes: dict, name: str, mini: Path) -> None:
    change_json(mini / "config.json", lambda c: c["text_config"].update(changes))
    with pytest.raises(CheckpointError, match=name):
        read_model(read_checkpoint(mini))


def test_a_tied_head_may_be_there_or_not(mini: Path) -> None:
    change_json(mini / "config.json", lambda c: c["text_config"].update(tie_word_embeddings=True))
    read_model(read_checkpoint(mini))
    change_json(mini / INDEX, lambda i: i["weight_map"].pop("language_model.lm_head.weight"))
    read_model(read_checkpoint(mini))


def test_tensors_that_config_does_not_tell_of(mini: Path) -> None:
    bias = f"{LAYER1}self_attn.o_proj.bias"
    tensors = load(mini / SHARD)
    write(mini / SHARD, tensors | {bias: Tensor("BF16", (256,), bytes(512))})
    change_json(mini / INDEX, lambda index: index["weight_map"].update({bias: SHARD}))
    with pytest.raises(CheckpointError, match=f"{SHARD}, tensor {bias} is not implied"):
        read_model(read_checkpoint(mini))


def test_rotary_buffers_are_known_and_skipped(mini: Path, tmp_path: Path, kconvert) -> None:
    convert(KIMI_MINI, tmp_path / "plain")
    buffer = f"{LAYER1}self_attn.rotary_emb.inv_freq"
    write(mini / SHARD, load(mini / SHARD) | {buffer: Tensor("F32", (8,), bytes(32))})
    change_json(mini / INDEX, lambda index: index["weight_map"].update({buffer: SHARD}))
    outcome = kconvert("convert", mini, tmp_path / "out")
    assert outcome.code == 0 and "1 rotary buffers (inv_freq): computed, not read" in outcome.out
    assert validate(tmp_path / "out", mini).ok
    name = "common/layer-00001.safetensors"
    assert load(tmp_path / "out" / name) == load(tmp_path / "plain" / name)


def test_validate_asks_for_every_tensor_of_an_output(tmp_path: Path) -> None:
    """An output whose blobs agree with their digests, and whose config implies more."""
    convert(KIMI_MINI, tmp_path / "out")
    source = shutil.copytree(KIMI_MINI, tmp_path / "source")
    change_json(source / "config.json", lambda c: c["text_config"].update(n_shared_experts=2))
    from kconvert.layouts.blob import digest
    from kconvert.layouts.manifest import encode_manifest, read_manifest

    manifest = read_manifest(tmp_path / "out")
    shutil.copy(source / "config.json", tmp_path / "out/config.json")
    raw = (source / "config.json").read_bytes()
    manifest.files["config.json"] = type(manifest.files["config.json"])(len(raw), digest(raw))
    (tmp_path / "out/kconvert.json").write_bytes(encode_manifest(manifest))
    findings = validate(tmp_path / "out").findings
    assert {finding.file for finding in findings} == {
        "common/layer-00001.safetensors", "common/layer-00002.safetensors",
    }  # fmt: skip
    assert all("shared_experts" in str(finding) for finding in findings) and len(findings) == 6
