"""Kimi K3: experts that see `routed_expert_hidden_size` columns, not `hidden_size`.

The rest of a layer (linear attention, residual gates, projections into and out of the experts'
width) is not stated here: it is kept whole, as it is.
"""

from typing import Any

from kconvert.layouts.families.family import Family, Stated
from kconvert.layouts.fields import natural, positive
from kconvert.layouts.sharding import MOST, ModelDims


class KimiK3(Family):
    """Kimi K3 (kimi_k3 around kimi_linear)."""

    architectures = ("KimiK3ForConditionalGeneration", "KimiLinearForCausalLM")
    model_types = ("kimi_k3", "kimi_linear")
    complete = False

    def _read(self, config: dict[str, Any]) -> ModelDims:
        hidden = "routed_expert_hidden_size"
        return ModelDims(
            layers=positive(config, "num_hidden_layers", MOST),
            mtp_layers=natural(config, "num_nextn_predict_layers", 0, MOST),
            first_moe=natural(config, "first_k_dense_replace", 0, MOST),
            experts=positive(config, "num_experts", MOST),
            hidden=positive(config, hidden if config.get(hidden) is not None else "hidden_size"),
            intermediate=positive(config, "moe_intermediate_size"),
            quantization=self.format.quantization,
        )

    def stated(self, layer: int | None, block: str) -> dict[str, Stated]:
        return {}
