"""A checkpoint's tensors sorted by where they belong: every one in a place, whatever its order."""

from dataclasses import replace

import pytest
from kit import KIMI_MINI, LAYER1

from kconvert.layouts.checkpoint import Checkpoint, read_checkpoint
from kconvert.layouts.errors import CheckpointError
from kconvert.layouts.model import groups_text, layer_numbers, ranges, read_model


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return read_checkpoint(KIMI_MINI)


def changed(checkpoint: Checkpoint, **tensors) -> Checkpoint:
    return replace(checkpoint, tensors={**checkpoint.tensors, **tensors})


def test_every_tensor_is_in_one_group(checkpoint: Checkpoint) -> None:
    model = read_model(checkpoint)
    assert [*model.groups][-2:] == ["outer", "vision"]
    assert layer_numbers(model.groups) == [*range(model.dims.layers)]
    names = [tensor.name for group in model.groups.values() for tensor in group.tensors]
    assert sorted(names) == sorted(checkpoint.tensors)
    first = model.groups["layer-00001"]
    assert len(first.experts) == model.dims.experts and first.prefix == f"{LAYER1}mlp.experts."
    assert not model.groups["layer-00000"].experts


def test_the_order_of_the_source_changes_nothing(checkpoint: Checkpoint) -> None:
    turned = replace(checkpoint, tensors=dict(reversed(checkpoint.tensors.items())))
    assert read_model(turned).groups == read_model(checkpoint).groups


def test_a_layer_whose_shard_is_not_here_is_known_by_name(checkpoint: Checkpoint) -> None:
    gone = {name: t.shard for name, t in checkpoint.tensors.items() if name.startswith(LAYER1)}
    here = {name: t for name, t in checkpoint.tensors.items() if name not in gone}
    group = read_model(replace(checkpoint, tensors=here, absent=gone)).groups["layer-00001"]
    assert group.absent == tuple(sorted(set(gone.values()))) and not group.tensors


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{LAYER1}mlp.experts.0.gate_proj.weight_packed", "weight_packed is in no shard"),
        (f"{LAYER1}self_attn.o_proj.weight", "o_proj.weight"),
        (f"{LAYER1}mlp.experts.3.", "routed experts"),
    ],
)
def test_what_is_missing_is_named(name: str, words: str, checkpoint: Checkpoint) -> None:
    left = {n: t for n, t in checkpoint.tensors.items() if not n.startswith(name)}
    with pytest.raises(CheckpointError, match=words):
        read_model(replace(checkpoint, tensors=left))


def test_a_layer_too_many(checkpoint: Checkpoint) -> None:
    one = checkpoint.tensors[f"{LAYER1}input_layernorm.weight"]
    name = one.name.replace("layers.1.", "layers.70.")
    with pytest.raises(CheckpointError, match=r"has layer\(s\) 70"):
        read_model(changed(checkpoint, **{name: one._replace(name=name)}))


def test_numbers_as_a_user_writes_them() -> None:
    assert ranges([0, 1, 2, 3, 60]) == "0-3,60" and ranges([]) == "none" and ranges([5]) == "5"
    assert groups_text(["layer-00000", "layer-00001", "outer"]) == "layers 0-1, outer"
