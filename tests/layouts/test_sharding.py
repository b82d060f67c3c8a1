"""Who owns what: every expert row to one rank, every name to one place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import KIMI_MINI

from kconvert.layouts.checkpoint import read_json
from kconvert.layouts.errors import UnsupportedError
from kconvert.layouts.families.family import Location
from kconvert.layouts.families.known import read_family
from kconvert.layouts.quantization import Quantization
from kconvert.layouts.sharding import ModelDims, Parallelism, rank_slice

LAYER = "language_model.model.layers."
locate = read_family(read_json(KIMI_MINI / "config.json")).locate


@given(
    ep=st.integers(1, 12), moe_tp=st.integers(1, 12),
    experts=st.integers(1, 8), rows=st.integers(1, 8),
)  # fmt: skip
def test_ranks_hold_everything_once(ep: int, moe_tp: int, experts: int, rows: int) -> None:
    dims = ModelDims(2, 0, 1, experts * ep, 64, rows * moe_tp, Quantization(32))
    held = [rank_slice(dims, Parallelism(ep * moe_tp, ep), r) for r in range(ep * moe_tp)]
    cells = [(e, row) for one in held for e in one.experts for row in one.rows]
    assert len(cells) == len(set(cells)) == dims.experts * dims.intermediate
    # FORMAT.md: ep_rank = r div moe_tp, moe_tp_rank = r mod moe_tp.
    for r, one in enumerate(held):
        assert one.experts.start == r // moe_tp * experts
        assert one.rows.start == r % moe_tp * rows


@pytest.mark.parametrize(
    ("name", "group", "layer", "expert"),
    [
        (f"{LAYER}60.mlp.experts.383.down_proj.weight_scale", "expert", 60, 383),
        ("model.layers.0.mlp.gate_proj.weight", "layer", 0, -1),
        (f"{LAYER}3.mlp.gate.e_score_correction_bias", "layer", 3, -1),
        (f"{LAYER}3.self_attn.kv_a_proj_with_mqa.weight", "layer", 3, -1),
        ("language_model.lm_head.weight", "outer", -1, -1),
        ("model.embed_tokens.weight", "outer", -1, -1),
        ("vision_tower.patch_embed.proj.bias", "vision", -1, -1),
        ("mm_projector.proj.0.weight", "vision", -1, -1),
    ],
)
def test_places(name: str, group: str, layer: int, expert: int) -> None:
    found = locate(name)
    assert (found.group, found.layer, found.expert) == (group, layer, expert)


@pytest.mark.parametrize(
    "name",
    ["", "lm_head", "model.layers.1.weight", "model.layers.01.input_layernorm.weight",
     "model.layers.٢.input_layernorm.weight", "model.layers.123456.input_layernorm.weight",
     f"{LAYER}1.mlp.experts.00.gate_proj.weight_packed",
     f"{LAYER}1.mlp.experts.gate_up_proj", "language_model.language_model.lm_head.weight"],
)  # fmt: skip
def test_names_without_a_place(name: str) -> None:
    with pytest.raises(UnsupportedError, match="no sharding rule"):
        locate(name)


def test_reading_order_is_the_forward_pass() -> None:
    names = ["input_layernorm", "self_attn.q_a_proj", "self_attn.o_proj",
             "post_attention_layernorm", "mlp.gate", "mlp.shared_experts.down_proj"]  # fmt: skip
    orders = [locate(f"{LAYER}1.{name}.weight").order for name in names]
    assert orders == sorted(orders) and isinstance(locate(f"{LAYER}1.mlp.gate.weight"), Location)
