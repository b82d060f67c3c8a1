"""What the runtime's tests share: golden tensors, seeded layers, and the skip without a GPU."""

from pathlib import Path

import pytest
import torch
from kit import DATA, KIMI_MINI
from safetensors.torch import load_file

from kconvert.convert import convert
from kconvert.runtime.backends import device

_NO_GPU = device._no_gpu

torch.set_num_threads(1)  # small tensors: threads that wait for one another cost more than they do


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0):
        return
    skip = pytest.mark.skip(reason="no NVIDIA GPU of compute capability 9.0 or later here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.hookimpl(tryfirst=True)  # before any fixture opens an engine
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test without the mark is of the CPU, also where there is a GPU."""
    if torch.cuda.is_available():
        on_cpu = item.get_closest_marker("gpu") is None
        device._no_gpu = (lambda: "this test is of the CPU") if on_cpu else _NO_GPU


@pytest.fixture(scope="session")
def golden() -> dict[str, torch.Tensor]:
    """vLLM's Marlin tensors."""
    return load_file(DATA / "marlin_cases.safetensors")


@pytest.fixture(scope="session")
def mini(tmp_path_factory) -> dict[str, Path]:
    """kimi-mini converted, by layout; to be read only."""
    root = tmp_path_factory.mktemp("mini")
    for layout in ("marlin", "w4a16"):
        convert(KIMI_MINI, root / layout, layout=layout)
    return {layout: root / layout for layout in ("marlin", "w4a16")}
