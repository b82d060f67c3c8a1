"""An engine's parameters as targets of `filling`. Only the engines' loaders import this, as it
imports torch."""

from collections.abc import Iterable
from typing import Any

import torch

from kconvert.layouts.errors import UnsupportedError
from kconvert.layouts.sharding import ModelDims
from kconvert.runtime.filling.device import bits_of, memory_on
from kconvert.runtime.filling.filler import Memory
from kconvert.runtime.plugins.loading import ExpertLayer


def memory_of(layers: Iterable[ExpertLayer]) -> Memory:
    """The memory that holds the parameters of these layers, for a `Filler`.

    Raises UnsupportedError if they are not all on one device, or on a device of another kind.
    """
    devices = {p.device for layer in layers for p in layer.parameters.values()}
    if len(devices) > 1:
        raise UnsupportedError(
            "the engine keeps some experts in host memory and some on the GPU: start it without"
            " options that offload weights."
        )
    device = devices.pop() if devices else torch.device("cpu")
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"experts on device {device} are not supported, only cpu and cuda.")
    return memory_on(device)


def place(layout: str, layer: ExpertLayer, name: str, shape: tuple[int, ...]) -> Any:
    """A layer's parameter as a target in the blob's layout and shape, for `loading.fill`.

    `marlin` has as many bytes as the checkpoint's order: the parameter gets its final shape here.
    """
    parameter = layer.parameters[name]
    if layout == "marlin":
        parameter.data = parameter.data.view(shape)
    tensor = parameter.detach()
    if layout != "marlin" and layer.transposed:
        tensor = tensor.transpose(1, 2)
    return bits_of(tensor)


def data_of(tensor: torch.Tensor) -> memoryview:
    """A CPU tensor's bytes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def fill_shapes(module: torch.nn.Module, dims: ModelDims) -> None:
    """Give a layer the `weight_shape` companions, which blobs drop: [n, k] of each source matrix.
    Nobody reads them, but they should be what the engine's own loader would have left."""
    n, k = dims.intermediate, dims.hidden
    for name, shape in (("w13_weight_shape", (n, k)), ("w2_weight_shape", (k, n))):
        module.get_parameter(name).data.copy_(torch.tensor(shape))
