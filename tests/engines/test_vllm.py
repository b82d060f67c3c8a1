"""vLLM serves converted folders: the real engine generates, on a CPU (cpu_shim.py).

`stock` is always vLLM's own loader on the source checkpoint. What is compared: the digest of every
parameter and buffer after loading, on every rank; tokens; the bits of the logprobs.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kit
import numpy as np
import pytest
from engines import checkpoints, launch
from engines.comparing import assert_refused, assert_same

from kconvert.convert import convert

ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
MARLIN = {"moe_backend": "marlin"}
OURS = {**MARLIN, "load_format": "kconvert"}
TP2 = {"tensor_parallel_size": 2}
EP2 = {**TP2, "enable_expert_parallel": True}


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., launch.Run]:
    def run(model: Path, **arguments: Any) -> launch.Run:
        several = arguments.get("tensor_parallel_size", 1) > 1
        wrapped = model.name.startswith("k26")  # fails in one process, also without us
        environment = TWO_RANKS if several else {} if wrapped else ONE_PROCESS
        if wrapped:
            arguments["language_model_only"] = True
        return launch.run(
            "vllm_case.py", tmp_path_factory.mktemp("run"), {"model": str(model), **arguments},
            **environment,
        )  # fmt: skip

    return run


@pytest.fixture(scope="session")
def stock(serve, folders) -> Callable[..., dict[str, Any]]:
    done: dict[str, dict[str, Any]] = {}

    def run(name: str, **arguments: Any) -> dict[str, Any]:
        key = json.dumps([name, arguments])
        if key not in done:
            outcome = serve(folders.source(name), **MARLIN, **arguments)
            assert outcome.result is not None, outcome.log[-4000:]
            assert all(rank["repacks"] == 4 for rank in outcome.result["ranks"])  # it counts
            done[key] = outcome.result
        return done[key]

    return run


@pytest.mark.parametrize(
    ("parallel", "layout", "tp", "ep"),
    [
        ({}, "marlin", 1, 1),
        ({}, "marlin", 4, 2),  # joined from four ranks' blobs
        ({}, "w4a16", 1, 1),
        ({}, "w4a16", 2, 1),
        (TP2, "marlin", 2, 1),
        (TP2, "marlin", 1, 1),  # cut
        (TP2, "w4a16", 1, 1),
        (EP2, "marlin", 2, 2),
        (EP2, "marlin", 1, 1),
        (EP2, "w4a16", 4, 1),
    ],
)
def test_the_same_as_stock(serve, stock, folders, parallel, layout, tp, ep) -> None:
    ours = serve(folders.converted("plain", layout, tp, ep), **OURS, **parallel)
    assert_same(ours, stock("plain", **parallel), repacks=0 if layout == "marlin" else 4)


@pytest.mark.parametrize("layout", ["marlin", "w4a16"])
def test_k26_names(serve, stock, folders, layout) -> None:
    ours = serve(folders.converted("k26", layout), **OURS)
    assert_same(ours, stock("k26"), repacks=0 if layout == "marlin" else 4)


def _flip_a_nibble(tensors: dict[str, kit.Tensor]) -> None:
    for name, tensor in tensors.items():  # of every expert of a layer: some are surely used
        if ".layers.1.mlp.experts." in name and name.endswith("gate_proj.weight_packed"):
            tensors[name] = tensor._replace(data=bytes([tensor.data[0] ^ 8]) + tensor.data[1:])


def _swap(one: str, other: str) -> Callable[[dict[str, kit.Tensor]], None]:
    def change(tensors: dict[str, kit.Tensor]) -> None:
        for name in [n for n in tensors if ".layers.1.mlp.experts." in n and one in n]:
            twin = name.replace(one, other)
            tensors[name], tensors[twin] = tensors[twin], tensors[name]

    return change


@pytest.mark.parametrize(
    ("change", "tokens_too"),
    [
        (_flip_a_nibble, False),
        (_swap("experts.0.", "experts.1."), True),
        (_swap("gate_proj", "up_proj"), True),
    ],
    ids=["nibble", "experts", "gate and up"],
)
def test_what_is_changed_is_seen(serve, stock, folders, tmp_path, change, tokens_too) -> None:
    """Otherwise the comparisons above would prove nothing."""
    source = shutil.copytree(folders.source("plain"), tmp_path / "source")
    tensors = kit.load(source / kit.SHARD)
    change(tensors)
    kit.write(source / kit.SHARD, tensors, metadata={"format": "pt"})
    convert(str(source), tmp_path / "plain-changed")
    result = serve(tmp_path / "plain-changed", **OURS).result
    assert result["logprobs"] != stock("plain")["logprobs"]
    if tokens_too:
        assert result["tokens"] != stock("plain")["tokens"]


def test_a_damaged_blob(serve, folders, tmp_path) -> None:
    output = shutil.copytree(folders.converted("plain", "marlin"), tmp_path / "plain-damaged")
    blob = output / "rank-00000-of-00001/layer-00002.safetensors"
    data = np.memmap(blob, np.uint8, "r+")
    data[len(data) // 2] ^= 16
    data.flush()
    assert_refused(serve(output, **OURS), "layer-00002.safetensors", "its bytes were changed")
    unchecked = serve(output, **OURS, model_loader_extra_config={"kconvert_digests": False})
    assert unchecked.result is not None
    assert "digests are not checked" in unchecked.log


def test_a_damaged_common_blob(serve, folders, tmp_path) -> None:
    output = shutil.copytree(folders.converted("plain", "marlin"), tmp_path / "plain-damaged")
    blob = output / "common/layer-00000.safetensors"
    data = np.memmap(blob, np.uint8, "r+")
    data[len(data) // 2] ^= 16
    data.flush()
    assert_refused(serve(output, **OURS), "common/layer-00000.safetensors", "the digest disagrees")


def test_without_the_plugin_it_is_refused(serve, folders) -> None:
    run = serve(folders.converted("plain", "marlin"), **MARLIN)
    assert_refused(run, "Cannot find any model weights")


def test_lora_is_refused(serve, folders) -> None:
    run = serve(folders.converted("plain", "marlin"), **OURS, enable_lora=True)
    assert_refused(run, "--enable-lora")


def test_a_folder_that_is_no_output_is_refused(serve, folders) -> None:
    assert_refused(serve(folders.source("plain"), **OURS), "has no kconvert.json")


def test_a_draft_model_is_vllms(serve, stock, folders, tmp_path) -> None:
    draft = checkpoints.write_draft(tmp_path / "draft")
    speculative = {"model": str(draft), "method": "draft_model", "num_speculative_tokens": 2}
    ours = serve(folders.converted("plain", "marlin"), **OURS, speculative_config=speculative)
    assert_same(ours, stock("plain", speculative_config=speculative), repacks=0)
    assert "vLLM's own loader reads it" in ours.log


def test_a_reload_is_refused(serve, folders) -> None:
    run = serve(folders.converted("plain", "marlin"), **OURS, then="reload_weights")
    assert_refused(run, "restart the server")
