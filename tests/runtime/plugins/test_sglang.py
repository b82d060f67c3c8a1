"""The SGLang plugin against stand-ins of its oldest and newest version; the real ones generate in
tests/engines."""

import shutil
from types import SimpleNamespace

import pytest
import torch

from kconvert.layouts.errors import CheckpointError, UnsupportedError
from kconvert.layouts.sharding import Parallelism

TP1, TP2, TP4, EP2 = (Parallelism(*p) for p in ((1, 1), (2, 1), (4, 1), (2, 2)))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(torch.int32 if tensor.dtype == torch.int32 else torch.int16)


@pytest.mark.parametrize(("stored", "wanted"), [(TP1, TP1), (TP1, TP2), (TP4, TP2), (TP1, EP2)])
@pytest.mark.parametrize("layout", ["marlin", "w4a16"])
def test_each_rank_gets_its_experts(sglang, converted, held, layout, stored, wanted) -> None:
    for rank in range(wanted.tp):
        model = sglang.model(wanted, rank)
        sglang.load(converted(layout, *stored), model)
        for name, expected in held(layout, wanted, rank).items():
            found = getattr(model.moe[0], name)
            found = found if layout == "marlin" else found.transpose(1, 2)
            assert torch.equal(bits(found), bits(expected))
    assert sglang.repacks == (0 if layout == "marlin" else 2 * wanted.tp)


def test_a_layer_is_left_as_sglang_leaves_it(sglang, converted) -> None:
    model = sglang.model()
    sglang.load(converted(), model)
    for layer in model.moe:
        assert layer.is_marlin_converted
        assert layer.workspace.shape == (4,)
        assert layer.w13_weight_g_idx.shape == layer.w2_g_idx_sort_indices.shape == (8, 0)
        assert layer.w2_weight_g_idx.dtype == torch.int32
    assert "model.norm.weight" in model.loaded
    assert not any(".mlp.experts." in name for name in model.loaded)


def test_other_folders_are_sglangs(sglang, converted) -> None:
    assert sglang.loader(converted().parent / "source") == "theirs"


def test_updates_are_refused(sglang, converted) -> None:
    model = sglang.model()
    loader = sglang.load(converted(), model)
    with pytest.raises(UnsupportedError, match="restart the server"):
        loader._get_weights_iterator(str(converted()))
    with pytest.raises(UnsupportedError, match="restart the server"):
        loader.load_weights_and_postprocess(model, iter(()), torch.device("cpu"))


@pytest.mark.parametrize("layout", ["marlin", "w4a16"])
def test_reading_that_stops_early_is_seen(sglang, converted, layout: str) -> None:
    model = sglang.model()
    model.load_weights = lambda weights: next(iter(weights))
    with pytest.raises(UnsupportedError, match="before the experts were loaded"):
        sglang.load(converted(layout), model)


def test_other_formats_are_sglangs(sglang, converted) -> None:
    """--load-format dummy, say; with the others it finds no weights, and says so."""
    config = SimpleNamespace(load_format=sglang.format.PT, model_loader_extra_config={})
    sglang.loader(converted())
    (choose,) = sglang.hooks.values()
    folder = SimpleNamespace(model_path=str(converted()))
    assert choose(lambda *_: "theirs", config, folder) == "theirs"


def _fused(sglang, model) -> None:
    for layer in model.moe:
        layer.num_fused_shared_experts = 1


def _triton(sglang, model) -> None:
    for layer in model.moe:
        layer.scheme = type("CompressedTensorsWNA16TritonMoE", (), {})()


def _lora(sglang, model) -> None:
    sglang.arguments.enable_lora = True


def _redundant(sglang, model) -> None:
    sglang.arguments.ep_num_redundant_experts = 8


def _location(sglang, model) -> None:
    sglang.arguments.init_expert_location = "experts.json"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_fused, "--disable-shared-experts-fusion"),
        (_triton, "--moe-runner-backend marlin"),
        (_lora, "--enable-lora"),
        (_redundant, "--ep-num-redundant-experts"),
        (_location, "--init-expert-location"),
    ],
)
def test_refused(sglang, converted, change, words) -> None:
    model = sglang.model()
    change(sglang, model)
    with pytest.raises(UnsupportedError, match=words):
        sglang.load(converted(), model)


def test_damage_is_seen(sglang, converted, tmp_path) -> None:
    output = shutil.copytree(converted(), tmp_path / "damaged")
    with open(output / "rank-00000-of-00001/layer-00001.safetensors", "r+b") as blob:
        blob.seek(-1, 2)
        blob.write(b"\x55")
    with pytest.raises(CheckpointError, match="bytes were changed"):
        sglang.load(output, sglang.model())
    sglang.load(output, sglang.model(), kconvert_digests=False)


def test_the_format_of_a_user_is_not_needed(sglang, converted) -> None:
    loader = sglang.loader(converted())
    assert loader.load_config.load_format == sglang.format.AUTO
