"""Mixtral: no dense layer; experts as block_sparse_moe…w1 or, by some exporters, mlp…gate_proj."""

from kconvert.layouts.families.family import Stated
from kconvert.layouts.families.standard import StandardFamily, count


class Mixtral(StandardFamily):
    """Mixtral 8x7B, 8x22B."""

    architectures = ("MixtralForCausalLM",)
    model_types = ("mixtral",)
    _width = "intermediate_size"

    def _experts(self) -> int:
        return count(self.config, "num_local_experts")

    def _router(self, block: str) -> dict[str, Stated]:
        return {f"{block}.gate": Stated((self.dims.experts, self.hidden))}
