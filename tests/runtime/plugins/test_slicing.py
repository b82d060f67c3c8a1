"""Blobs cut and joined for another tp and ep, against a conversion that was made for them."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from engines import checkpoints

from kconvert.convert import convert
from kconvert.layouts.errors import UnsupportedError
from kconvert.layouts.experts import STACKED
from kconvert.layouts.quantization import Quantization
from kconvert.layouts.reader import NUMPY_BITS
from kconvert.layouts.sharding import ModelDims, Parallelism, RankSlice, rank_slice
from kconvert.layouts.stored.output import Output
from kconvert.layouts.stored.slicing import refuse_uncuttable
from kconvert.layouts.w4a16 import W4A16
from kconvert.runtime.filling.filler import Filler, HostMemory
from kconvert.runtime.plugins.loading import ExpertLayer, fill

PARALLEL = [Parallelism(tp, ep) for tp in (1, 2, 4, 8) for ep in (1, 2, 4, 8) if ep <= tp]
FEW = [Parallelism(1, 1), Parallelism(2, 1), Parallelism(4, 2), Parallelism(4, 4)]
LAYOUTS = ("marlin", "w4a16")
DTYPES = {"I32": torch.int32, "BF16": torch.bfloat16}
ONE_LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "moe_intermediate_size": 512}


class Loaded(NamedTuple):
    tensors: dict[str, np.ndarray]
    bytes_read: int


def load(output: Output, wanted: RankSlice, check: bool = True) -> Loaded:
    """What a rank of an engine would hold of layer 0, in the blobs' layout."""
    targets, parameters = {}, {}
    for tensor in STACKED:
        cut = tensor.cut(wanted.rows, output.dims.hidden)
        shape = W4A16(output.dims.quantization).shape(tensor.role, cut.n, cut.k)
        dtype = DTYPES["I32" if tensor.role == "code" else "BF16"]
        parameters[tensor.name] = torch.empty(
            (len(wanted.experts), *shape), dtype=dtype, device="meta"
        )

    def place(name: str, shape: tuple[int, ...]) -> np.ndarray:
        bits = NUMPY_BITS["I32" if "packed" in name else "BF16"]
        targets[name] = np.full(shape, 77, bits)
        return targets[name]

    layer = ExpertLayer("model.layers.0.mlp.experts", wanted, parameters, transposed=False)
    with Filler(HostMemory(), check) as filler:
        fill(filler, output, layer, place)
        filler.wait()
        return Loaded(targets, filler.bytes_read)


def stored(output: Output, rank: int) -> dict[str, np.ndarray]:
    """A rank's tensors as they lie in its blob."""
    blob = output.experts(0, rank)
    raw = np.fromfile(blob.path, np.uint8)
    found = {}
    for tensor in STACKED:
        entry = blob.stacked(tensor)
        data = raw[entry.start : entry.start + entry.nbytes]
        found[tensor.name] = data.view(NUMPY_BITS[entry.dtype]).reshape(entry.shape)
    return found


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory):
    """One MoE layer of 8 experts, 512 rows: the conversion for a layout, tp and ep."""
    root = tmp_path_factory.mktemp("sliced")

    @cache
    def source(group_size: int | None) -> Path:
        return checkpoints.write(root / f"source-{group_size}", group_size=group_size, **ONE_LAYER)

    @cache
    def output(layout: str, parallel: Parallelism, group_size: int | None = 32) -> Output:
        folder = root / f"{layout}-{parallel.tp}-{parallel.ep}-{group_size}"
        convert(str(source(group_size)), folder, layout=layout, tp=parallel.tp, ep=parallel.ep)
        return Output(folder)

    return output


def assert_cut_as_converted(have: Output, want: Output) -> None:
    for rank in range(want.stored.tp):
        wanted = rank_slice(want.dims, want.stored, rank)
        found = load(have, wanted).tensors
        for name, expected in stored(want, rank).items():
            assert found[name].shape == expected.shape
            assert np.array_equal(found[name], expected), (name, rank)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("have", PARALLEL)
def test_every_tp_and_ep(outputs, layout: str, have: Parallelism) -> None:
    for want in PARALLEL:
        assert_cut_as_converted(outputs(layout, have), outputs(layout, want))


@pytest.mark.parametrize("group_size", [None, 64, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_groups(outputs, layout: str, group_size: int | None) -> None:
    for have in FEW:
        for want in FEW:
            assert_cut_as_converted(
                outputs(layout, have, group_size), outputs(layout, want, group_size)
            )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_uneven_split_of_experts(outputs, layout: str) -> None:
    """As vLLM splits where the ranks do not divide the experts."""
    have, whole = outputs(layout, Parallelism(4, 4)), outputs(layout, Parallelism(1, 1))
    found = load(have, RankSlice(range(3, 6), range(512))).tensors
    for name, expected in stored(whole, 0).items():
        assert np.array_equal(found[name], expected[3:6])


def test_what_is_read(outputs) -> None:
    """The bytes of the slice; whole experts where they are cut, as a digest is of a whole one."""
    size = sum(array.nbytes for array in stored(outputs("marlin", Parallelism(1, 1)), 0).values())
    for have, want, share in [
        (Parallelism(2, 1), Parallelism(2, 1), 2),  # its own
        (Parallelism(1, 1), Parallelism(8, 8), 8),  # whole experts of it
        (Parallelism(4, 1), Parallelism(2, 1), 2),  # joined
        (Parallelism(1, 1), Parallelism(4, 1), 1),  # cut
        (Parallelism(4, 2), Parallelism(4, 4), 4),  # joined rows of a part of the experts
    ]:
        output = outputs("marlin", have)
        loaded = load(output, rank_slice(output.dims, want, want.tp - 1))
        assert loaded.bytes_read == size // share


DIMS = ModelDims(1, 0, 0, 8, 256, 512, Quantization(64))


@pytest.mark.parametrize(
    ("layout", "have", "rows", "words"),
    [
        ("marlin", Parallelism(1), range(32, 64), ["only at multiples of 64", "--tp 16"]),
        ("marlin", Parallelism(1), range(64, 128), ["single group", "--layout marlin --tp 8"]),
        ("marlin", Parallelism(8), range(512), ["single group", "--tp 1"]),
        ("w4a16", Parallelism(1), range(32), ["only at multiples of 64"]),
        ("humming", Parallelism(1), range(512), ["'humming'"]),
    ],
)
def test_refused_with_the_command(layout, have, rows, words) -> None:
    with pytest.raises(UnsupportedError) as error:
        refuse_uncuttable(DIMS, layout, have, RankSlice(range(8), rows))
    for word in words:
        assert word in str(error.value)
