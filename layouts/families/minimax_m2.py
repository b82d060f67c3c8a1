"""MiniMax-M2: Mixtral's names; queries and keys normed whole; the router's bias beside the gate."""

from kconvert.layouts.families.family import Stated
from kconvert.layouts.families.standard import StandardFamily, count


class MiniMaxM2(StandardFamily):
    """MiniMax-M2."""

    architectures = ("MiniMaxM2ForCausalLM",)
    model_types = ("minimax_m2",)
    _width = "intermediate_size"

    def _experts(self) -> int:
        return count(self.config, "num_local_experts")

    def _attention(self) -> dict[str, Stated]:
        norms = self._norms(self.heads * self.head_dim, self.kv_heads * self.head_dim)
        return self._projections(qkv_bias=False, o_bias=False) | norms

    def _router(self, block: str) -> dict[str, Stated]:
        experts = self.dims.experts
        return {
            f"{block}.gate": Stated((experts, self.hidden)),
            block: Stated((experts,), ("e_score_correction_bias",)),
        }
