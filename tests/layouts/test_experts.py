"""The stacked tensors: every code and scale of a source matrix lies in one place of one rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kconvert.layouts.experts import STACKED, stacked, stacked_by_name
from kconvert.layouts.quantization import Quantization


def test_names_and_order_are_the_formats() -> None:
    """What FORMAT.md says, in the order a forward pass reads them."""
    assert [(t.name, t.matrix, t.role, t.projections) for t in STACKED] == [
        ("w13_weight_packed", "w13", "code", ("gate", "up")),
        ("w13_weight_scale", "w13", "scale", ("gate", "up")),
        ("w2_weight_packed", "w2", "code", ("down",)),
        ("w2_weight_scale", "w2", "scale", ("down",)),
    ]
    for tensor in STACKED:
        assert stacked(tensor.matrix, tensor.role) is tensor
        assert stacked_by_name(f"model.layers.3.mlp.experts.{tensor.name}") is tensor
    with pytest.raises(KeyError):
        stacked_by_name("model.layers.3.mlp.experts.w13_weight_shape")


@given(parts=st.integers(1, 6), rows=st.integers(1, 5), hidden=st.integers(1, 7))
def test_cuts_cover_every_matrix_once(parts: int, rows: int, hidden: int) -> None:
    shapes = {"gate": (parts * rows, hidden), "up": (parts * rows, hidden)}
    shapes["down"] = (hidden, parts * rows)
    for tensor in STACKED:
        cells = []
        for part in range(parts):
            cut = tensor.cut(range(part * rows, (part + 1) * rows), hidden)
            taken = [
                (source.at + i, j)
                for source in cut.parts
                for i in range(len(source.rows))
                for j in range(len(source.columns))
            ]
            assert len(set(taken)) == len(taken) == cut.n * cut.k
            assert max(taken) == (cut.n - 1, cut.k - 1)
            cells += [(s.projection, r, c) for s in cut.parts for r in s.rows for c in s.columns]
        whole = {
            (projection, r, c)
            for projection in tensor.projections
            for r in range(shapes[projection][0])
            for c in range(shapes[projection][1])
        }
        assert len(cells) == len(set(cells)) and set(cells) == whole


def test_only_channelwise_scales_of_w2_lie_on_several_ranks() -> None:
    for tensor in STACKED:
        assert tensor.copies(Quantization(32), 4) == 1
        assert tensor.copies(Quantization(None), 4) == (4 if tensor is STACKED[3] else 1)
