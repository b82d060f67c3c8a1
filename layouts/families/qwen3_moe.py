"""Qwen3-MoE: dense layers by a list and a step; transformers 5 says num_local_experts where the
published files say num_experts."""

from kconvert.layouts.errors import CheckpointError
from kconvert.layouts.families.family import Stated
from kconvert.layouts.families.standard import StandardFamily, count
from kconvert.layouts.fields import CONFIG_NAME, flag, natural, positive
from kconvert.layouts.sharding import MOST


class Qwen3Moe(StandardFamily):
    """Qwen3-30B-A3B, Qwen3-235B-A22B."""

    architectures = ("Qwen3MoeForCausalLM",)
    model_types = ("qwen3_moe",)

    def _experts(self) -> int:
        return count(self.config, "num_experts", "num_local_experts")

    def _dense(self) -> tuple[int, frozenset[int]]:
        only, layers = (
            self.config.get("mlp_only_layers") or [],
            range(positive(self.config, "num_hidden_layers", MOST)),
        )
        step = natural(self.config, "decoder_sparse_step", 1) or 1
        if not isinstance(only, list) or any(layer not in layers for layer in only):
            raise CheckpointError(
                f"{CONFIG_NAME}: mlp_only_layers is {only!r:.60}, expected a list of layers."
            )
        return 0, frozenset({*only, *(layer for layer in layers if (layer + 1) % step)})

    def _attention(self) -> dict[str, Stated]:
        bias = flag(self.config, "attention_bias", False)
        return self._projections(qkv_bias=bias, o_bias=bias) | self._norms(
            self.head_dim, self.head_dim
        )

    def _router(self, block: str) -> dict[str, Stated]:
        return {f"{block}.gate": Stated((self.dims.experts, self.hidden))}
