"""The torch twin against golden outputs and against definitions written out."""

import pytest
import torch

from kconvert.runtime.kernels.moe import reference
from kconvert.runtime.kernels.moe.shape import MoeShape

LAYOUTS = {
    "marlin": ("w13_marlin", "w13_scale_marlin", "w2_marlin", "w2_scale_marlin"),
    "w4a16": ("w13_weight_packed", "w13_weight_scale", "w2_weight_packed", "w2_weight_scale"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 5, 33])
def test_moe_agrees_with_float64(golden, layout, tokens):
    case = {name: golden[f"moe.0.M{tokens}.{name}"] for name in ("x", "topk_ids", "topk_weights")}
    blobs = [golden[f"moe.0.{name}"] for name in LAYOUTS[layout]]
    shape = MoeShape(hidden=256, intermediate=128, experts=8, top_k=4)
    out = reference.moe(*case.values(), *blobs, shape, layout)
    expected = golden[f"moe.0.M{tokens}.reference_f64"]
    assert (out - expected).norm() / expected.norm() <= 6e-3


def test_both_layouts_hold_the_same_weights(golden):
    for name in ("w13", "w2"):
        for expert in range(8):
            marlin = reference.marlin_weight(
                golden[f"moe.0.{name}_marlin"][expert], golden[f"moe.0.{name}_scale_marlin"][expert]
            )
            source = reference.w4a16_weight(
                golden[f"moe.0.{name}_weight_packed"][expert],
                golden[f"moe.0.{name}_weight_scale"][expert],
            )
            assert torch.equal(marlin, source)


def test_experts_of_other_ranks_add_nothing(golden):
    """Two ranks of four experts, summed in rank order, are the whole but for fp32 rounding."""
    case = [golden[f"moe.0.M33.{name}"] for name in ("x", "topk_ids", "topk_weights")]
    blobs = [golden[f"moe.0.{name}"] for name in LAYOUTS["marlin"]]
    whole = reference.moe(*case, *blobs, MoeShape(256, 128, experts=8, top_k=4))
    parts = torch.zeros_like(whole)
    for first in (0, 4):
        shape = MoeShape(256, 128, 4, 4, total_experts=8, first_expert=first)
        parts += reference.moe(*case, *(b[first : first + 4] for b in blobs), shape)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-5 * whole.abs().max().item())


def test_router_takes_the_lowest_id_of_a_tie_and_weighs_without_the_bias():
    logits = torch.tensor([[0.0, 1.0, 1.0, -1.0, 1.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 5.0, 0.0])
    ids, weights = reference.router(logits, bias, 3, 2.0)
    assert ids.tolist() == [[3, 1, 2]]
    scores = torch.tensor([-1.0, 1.0, 1.0]).sigmoid()
    torch.testing.assert_close(weights[0], 2 * scores / scores.sum())


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        ({"hidden": 96}, "hidden 96"),
        ({"group": 256}, "group size 256"),
        ({"intermediate": 64, "group": 64}, "intermediate 64"),
        ({"experts": 2000}, "2000 experts"),
        ({"first_expert": 1, "total_experts": 8}, "not among"),
    ],
)
def test_a_shape_that_cannot_be_cut_is_refused(wrong, sentence):
    sizes = {"hidden": 256, "intermediate": 128, "experts": 8, "top_k": 2}
    with pytest.raises(ValueError, match=sentence):
        MoeShape(**(sizes | wrong))
