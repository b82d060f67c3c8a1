"""SGLang serves converted folders: as test_vllm.py. The folder alone says that it is one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import launch
from engines.comparing import assert_refused, assert_same

TP2 = {"tp_size": 2}


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., launch.Run]:
    def run(model: Path, environment: dict[str, str] | None = None, **arguments: Any) -> launch.Run:
        several = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if "tp_size" in arguments else {}
        return launch.run(
            "sglang_case.py",
            tmp_path_factory.mktemp("run"),
            {"model_path": str(model), **arguments},
            **several,
            **(environment or {}),
        )

    return run


@pytest.fixture(scope="session")
def stock(serve, folders) -> Callable[..., dict[str, Any]]:
    done: dict[str, dict[str, Any]] = {}

    def run(**arguments: Any) -> dict[str, Any]:
        key = json.dumps(arguments)
        if key not in done:
            outcome = serve(folders.source("plain"), **arguments)
            assert outcome.result is not None, outcome.log[-4000:]
            assert all(rank["repacks"] == 4 for rank in outcome.result["ranks"])  # it counts
            done[key] = outcome.result
        return done[key]

    return run


@pytest.mark.parametrize(
    ("parallel", "layout", "tp"),
    [
        ({}, "marlin", 1),
        ({}, "marlin", 2),  # joined
        ({}, "w4a16", 1),
        (TP2, "marlin", 2),
        (TP2, "marlin", 1),  # cut
        (TP2, "w4a16", 1),
    ],
)
def test_the_same_as_stock(serve, stock, folders, parallel, layout, tp) -> None:
    ours = serve(folders.converted("plain", layout, tp), **parallel)
    assert_same(ours, stock(**parallel), repacks=0 if layout == "marlin" else 4)


def test_a_damaged_blob(serve, folders, tmp_path) -> None:
    output = shutil.copytree(folders.converted("plain", "marlin"), tmp_path / "damaged")
    with open(output / "rank-00000-of-00001/layer-00002.safetensors", "r+b") as blob:
        blob.seek(-1, 2)
        blob.write(b"\x55")
    assert_refused(serve(output), "layer-00002.safetensors", "its bytes were changed")


def test_without_the_plugin_it_is_refused(serve, folders) -> None:
    run = serve(folders.converted("plain", "marlin"), {"SGLANG_PLUGINS": "cpu_shim"})
    assert_refused(run, "Cannot find any model weights")


def test_moved_experts_are_refused(serve, folders) -> None:
    run = serve(folders.converted("plain", "marlin"), ep_num_redundant_experts=8)
    assert_refused(run, "--ep-num-redundant-experts does not work")
