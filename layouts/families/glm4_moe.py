"""GLM-4.5, 4.6, 4.7: DeepSeek's MoE and MTP layer over grouped-query attention."""

from kconvert.layouts.families.family import Stated, mlp_modules
from kconvert.layouts.families.standard import StandardFamily, count
from kconvert.layouts.fields import flag, natural
from kconvert.layouts.sharding import MOST


class Glm4Moe(StandardFamily):
    """GLM-4.x-MoE, Air too."""

    architectures = ("Glm4MoeForCausalLM",)
    model_types = ("glm4_moe",)

    def _experts(self) -> int:
        return count(self.config, "n_routed_experts")

    def _dense(self) -> tuple[int, frozenset[int]]:
        return natural(self.config, "first_k_dense_replace", 0, MOST), frozenset()

    def _attention(self) -> dict[str, Stated]:
        bias = flag(self.config, "attention_bias", False)
        modules = self._projections(qkv_bias=bias, o_bias=False)
        if flag(self.config, "use_qk_norm", False):
            modules |= self._norms(self.head_dim, self.head_dim)
        return modules

    def _router(self, block: str) -> dict[str, Stated]:
        parameters = ("weight", "e_score_correction_bias")
        modules = {f"{block}.gate": Stated((self.dims.experts, self.hidden), parameters)}
        shared = natural(self.config, "n_shared_experts", 0)
        if shared:
            size = shared * self.dims.intermediate
            modules |= mlp_modules(f"{block}.shared_experts", size, self.hidden)
        return modules
