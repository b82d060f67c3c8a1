"""The vLLM plugin against stand-ins of the two forms that vLLM's MoE parameters have had. The real
engines generate in tests/engines."""

import shutil
from types import SimpleNamespace

import pytest
import torch

from kconvert.layouts.errors import CheckpointError, KconvertError, OutputError, UnsupportedError
from kconvert.layouts.sharding import Parallelism

TP1, TP2, TP4, EP2 = (Parallelism(*p) for p in ((1, 1), (2, 1), (4, 1), (2, 2)))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(torch.int32 if tensor.dtype == torch.int32 else torch.int16)


@pytest.mark.parametrize(
    ("stored", "wanted"), [(TP1, TP1), (TP1, TP4), (TP4, TP2), (TP1, EP2), (EP2, TP2)]
)
@pytest.mark.parametrize("layout", ["marlin", "w4a16"])
def test_each_rank_gets_its_experts(vllm, converted, held, layout, stored, wanted) -> None:
    for rank in range(wanted.tp):
        model = vllm.model(wanted, rank)
        _, processed = vllm.load(converted(layout, *stored), model)
        for name, expected in held(layout, wanted, rank).items():
            found = getattr(model.moe[0], name)
            if layout == "w4a16" and vllm.old:
                found = found.transpose(1, 2)
            assert torch.equal(bits(found), bits(expected))
        if layout == "w4a16":
            assert processed == [None, None] and vllm.repacks == 2 * (rank + 1)
            continue
        assert vllm.repacks == 0
        first, *_ = processed
        assert len(first) == (14 if vllm.old else 10)
        assert first[0] is model.moe[0].w13_weight_packed
        assert first[-6:] == (None,) * 6
        if vllm.old:
            assert all(index.shape == (len(first[0]), 0) for index in first[4:8])


def test_other_tensors_come_by_the_engines_loader(vllm, converted) -> None:
    model = vllm.model()
    vllm.load(converted(), model, enable_multithread_load=True)
    assert "model.embed_tokens.weight" in model.loaded
    assert "model.layers.1.mlp.gate.weight" in model.loaded
    assert not any(".mlp.experts." in name for name in model.loaded)
    assert "experts of 2 layers" in vllm.log[-1]


def test_shapes_are_the_sources(vllm, converted) -> None:
    model = vllm.model(TP2, 1)
    vllm.load(converted(), model)
    assert model.moe[1].w13_weight_shape.tolist() == [[256, 256]] * 8


def test_a_later_update_is_repacked(vllm, converted) -> None:
    """An update in place brings the checkpoint's order: only the first processing is ours."""
    model = vllm.model()
    vllm.load(converted(), model)
    assert vllm.process(model.moe[0]) is None
    assert vllm.repacks == 1


def test_layers_of_others_are_repacked(vllm, converted) -> None:
    vllm.load(converted(), vllm.model())
    vllm.process(vllm.experts(TP1, 0))
    assert vllm.repacks == 1


def test_a_reload_is_refused(vllm, converted) -> None:
    model = vllm.model()
    loader, _ = vllm.load(converted(), model)
    with pytest.raises(UnsupportedError, match="restart the server"):
        loader.get_all_weights(SimpleNamespace(model=str(converted())), model)


def test_a_draft_model_without_blobs(vllm, converted) -> None:
    model = vllm.model()
    source = converted().parent / "source"
    vllm.load(source, model, runner="draft")
    assert "model.layers.1.mlp.experts.0.gate_proj.weight_packed" in model.loaded
    assert vllm.repacks == 2
    with pytest.raises(OutputError, match=r"has no kconvert\.json"):
        vllm.load(source, vllm.model())


def test_a_pipelines_stage(vllm, converted) -> None:
    model = vllm.model()
    del model.model.layers[2], model.moe[1]
    vllm.load(converted(), model)
    assert {name.split(".")[2] for name in model.loaded if ".layers." in name} == {"0", "1"}


def _lora(vllm, model) -> None:
    vllm.config.lora_config = object()


def _eplb(vllm, model) -> None:
    vllm.config.parallel_config.enable_eplb = True


def _humming(vllm, model) -> None:
    vllm.method.wna16_backend = SimpleNamespace(value="HUMMING")


def _eight_bit_activations(vllm, model) -> None:
    setattr(vllm.method, "marlin_input_dtype" if vllm.old else "input_dtype", torch.int8)


def _round_robin(vllm, model) -> None:
    for layer in model.moe:
        layer._expert_map = torch.tensor([0, -1, 1, -1, 2, -1, 3, -1])


def _no_repack(vllm, model) -> None:
    del vllm.module.convert_to_wna16_moe_kernel_format


def _float16(vllm, model) -> None:
    for layer in model.moe:
        layer.w2_weight_scale.data = layer.w2_weight_scale.data.to(torch.float16)


def _more_experts(vllm, model) -> None:
    for layer in model.moe:
        layer.w13_weight_packed.data = layer.w13_weight_packed.data.repeat(2, 1, 1)


def _other_experts(vllm, model) -> None:
    del model.moe[1].w13_weight_packed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_lora, "--enable-lora"),
        (_eplb, "--enable-eplb"),
        (_humming, "HUMMING: start it with --moe-backend marlin"),
        (_eight_bit_activations, "VLLM_MARLIN_INPUT_DTYPE"),
        (_round_robin, "--expert-placement-strategy linear"),
        (_no_repack, "--layout w4a16"),
        (_float16, "--dtype bfloat16"),
        (_more_experts, "is [16, "),
        (_other_experts, "layer 2 has no W4A16 experts"),
    ],
)
def test_refused(vllm, converted, change, words) -> None:
    model = vllm.model()
    change(vllm, model)
    with pytest.raises(UnsupportedError) as error:
        vllm.load(converted(), model)
    assert words in str(error.value)


def test_w4a16_feeds_any_backend(vllm, converted) -> None:
    vllm.method.wna16_backend = SimpleNamespace(value="HUMMING")
    vllm.load(converted("w4a16"), vllm.model())
    assert vllm.repacks == 2


def test_a_vision_tower_that_was_left_out(vllm, converted, tmp_path) -> None:
    from kconvert.convert import convert

    output = tmp_path / "text"
    convert(str(converted().parent / "source"), output, text_only=True)
    model = vllm.model()
    model.vision_tower = torch.nn.Linear(1, 1)
    with pytest.raises(UnsupportedError, match="--language-model-only"):
        vllm.load(output, model)


@pytest.mark.parametrize("file", ["common/outer", "rank-00000-of-00001/layer-00002"])
def test_damage_is_seen(vllm, converted, tmp_path, file: str) -> None:
    output = shutil.copytree(converted(), tmp_path / "damaged")
    with open(output / f"{file}.safetensors", "r+b") as blob:
        blob.seek(-20000, 2)
        byte = blob.read(1)
        blob.seek(-20000, 2)
        blob.write(bytes([byte[0] ^ 1]))
    with pytest.raises(CheckpointError, match="bytes were changed") as error:
        vllm.load(output, vllm.model())
    assert file in str(error.value)
    vllm.log.clear()
    vllm.load(output, vllm.model(), kconvert_digests=False)
    assert "not checked" in vllm.log[0]


def test_the_option_is_checked(vllm, converted) -> None:
    with pytest.raises(KconvertError, match="kconvert_digests"):
        vllm.load(converted(), vllm.model(), kconvert_digests="no")
    with pytest.raises(ValueError, match="Unexpected extra config keys"):
        vllm.load(converted(), vllm.model(), kconvert_digest=False)
