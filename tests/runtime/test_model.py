"""A rank's part of a model, and its forward pass, whatever steps a text is run in."""

from pathlib import Path

import numpy as np
import pytest
import torch
from kit import KIMI_MINI
from torch import Tensor

from kconvert.convert import convert
from kconvert.layouts.errors import UnsupportedError
from kconvert.runtime.backends.torch_twins import TwinBackend
from kconvert.runtime.config import read_config
from kconvert.runtime.distributed import Ranks
from kconvert.runtime.model import Model
from kconvert.runtime.weights import Blobs

TEXT_TOKENS = np.random.default_rng(0).integers(0, 512, 16).tolist()


class Part(TwinBackend):
    """The twins, as one of several ranks."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        super().__init__(read_config(folder), "float32")
        self.ranks = ranks


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[int, list[Model]]:
    """Every rank's model, by tp."""
    made = {}
    for tp in (1, 2):
        folder = tmp_path_factory.mktemp("model") / str(tp)
        convert(KIMI_MINI, folder, tp=tp)
        all_ranks = [Ranks(rank, tp) for rank in range(tp)]
        made[tp] = [
            Model(read_config(folder), Blobs(folder, ranks), Part(folder, ranks))
            for ranks in all_ranks
        ]
    return made


def test_the_parts_of_two_ranks_are_the_whole(models: dict[int, list[Model]]) -> None:
    whole, parts = models[1][0].weights, [model.weights for model in models[2]]
    size = whole.layers[0].mlp.down.shape[1]

    def joined(name: str, layer: int, axis: int) -> Tensor:
        return torch.cat([getattr(part.layers[layer], name) for part in parts], dim=axis)

    assert torch.equal(torch.cat([part.head for part in parts]), whole.head)
    for number, layer in enumerate(whole.layers):
        assert torch.equal(joined("queries", number, 0), layer.queries)  # heads
        assert torch.equal(joined("kv_b", number, 0), layer.kv_b)
        assert torch.equal(joined("output", number, 1), layer.output)
        assert all(torch.equal(part.layers[number].low, layer.low) for part in parts)  # all of it
        assert (layer.moe is None) == (number < models[1][0].config.first_moe)
    down = torch.cat([part.layers[0].mlp.down for part in parts], dim=1)
    assert torch.equal(down, whole.layers[0].mlp.down)
    half = size // 2
    gate_up = whole.layers[0].mlp.gate_up
    for rank, part in enumerate(parts):  # rows of gate, then the same rows of up
        rows = [*range(rank * half, (rank + 1) * half)]
        rows += [size + row for row in rows]
        assert torch.equal(part.layers[0].mlp.gate_up, gate_up[rows])


@pytest.mark.parametrize("cuts", [[1] * 9, [4, 5], [8, 1]])
def test_a_text_may_be_run_in_any_steps(cuts: list[int], models) -> None:
    model = models[1][0]
    tokens = np.array(TEXT_TOKENS[:9])

    def run(parts: list[int]) -> tuple[Tensor, Tensor]:
        cache, rows, outputs, start = model.new_cache(16), [], [], 0
        for count in parts:
            step = model.backend.sequence(tokens[start : start + count], start)
            hidden, aux = model.forward(step, cache, (0, 2))
            rows.append(model.head(hidden))
            outputs.append(torch.cat(aux, dim=1))
            start += count
        return torch.cat(rows), torch.cat(outputs)

    for found, wanted in zip(run(cuts), run([9]), strict=True):
        assert found.shape[0] == 9 and torch.allclose(found, wanted, atol=1e-5)


def test_outputs_are_those_of_the_layers_asked_for(models) -> None:
    model = models[1][0]
    step = model.backend.sequence(np.array(TEXT_TOKENS[:3]), 0)
    hidden, outputs = model.forward(step, model.new_cache(4), range(model.config.layers))
    assert len(outputs) == model.config.layers
    normed = model.backend.add_norm(outputs[-1], None, model.weights.norm)[1]
    assert torch.equal(normed, hidden)


def test_what_does_not_divide_is_refused(models) -> None:
    model = models[1][0]
    with pytest.raises(UnsupportedError, match=r"\d+ heads do not divide over 7 ranks"):
        Model(model.config, model.blobs, Part(model.blobs._folder, Ranks(0, 7)))
