"""Into the memory of a GPU, through pinned buffers: the same bytes as into the host's."""

import pytest
import torch

from kconvert.layouts.experts import STACKED
from kconvert.layouts.sharding import Parallelism, RankSlice, rank_slice
from kconvert.layouts.stored.output import Output
from kconvert.layouts.w4a16 import W4A16
from kconvert.runtime.filling import filler
from kconvert.runtime.filling.filler import Filler
from kconvert.runtime.plugins.device import memory_of, place
from kconvert.runtime.plugins.loading import ExpertLayer, fill


def load(output: Output, wanted: RankSlice, device: str, transposed: bool) -> list[torch.Tensor]:
    """The parameters of layer 1 as an engine on `device` would have them."""
    parameters = {}
    for tensor in STACKED:
        cut = tensor.cut(wanted.rows, output.dims.hidden)
        shape = W4A16(output.dims.quantization).shape(tensor.role, cut.n, cut.k)
        shape = (len(wanted.experts), *(shape[::-1] if transposed else shape))
        dtype = torch.int32 if tensor.role == "code" else torch.bfloat16
        parameters[tensor.name] = torch.zeros(shape, dtype=dtype, device=device)
    layer = ExpertLayer("model.layers.1.mlp.experts", wanted, parameters, transposed)
    with Filler(memory_of([layer])) as filler:
        fill(filler, output, layer, lambda *where: place(output.layout, layer, *where))
        filler.wait()
    return [tensor.cpu() for tensor in parameters.values()]


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("layout", ["marlin", "w4a16"])
def test_the_same_on_a_gpu(converted, monkeypatch, layout: str, transposed: bool) -> None:
    monkeypatch.setattr(filler, "CHUNK_BYTES", 50_000)  # several turns of a thread's buffers
    for stored, want in [((1, 1), (1, 1)), ((1, 1), (4, 1)), ((2, 1), (1, 1)), ((2, 2), (2, 1))]:
        output = Output(converted(layout, *stored))
        parallel = Parallelism(*want)
        wanted = rank_slice(output.dims, parallel, parallel.tp - 1)
        on_host = load(output, wanted, "cpu", transposed)
        on_gpu = load(output, wanted, "cuda", transposed)
        assert all(torch.equal(a, b) for a, b in zip(on_host, on_gpu, strict=True))
