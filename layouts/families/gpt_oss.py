"""gpt-oss: experts fused into one tensor a projection, biases everywhere, attention with sinks."""

from kconvert.layouts.families.family import Stated
from kconvert.layouts.families.standard import StandardFamily, count
from kconvert.layouts.fields import flag


class GptOss(StandardFamily):
    """gpt-oss 20b, 120b."""

    architectures = ("GptOssForCausalLM",)
    model_types = ("gpt_oss",)
    fused = True
    _width = "intermediate_size"

    def _experts(self) -> int:
        return count(self.config, "num_local_experts")

    def _attention(self) -> dict[str, Stated]:
        bias = flag(self.config, "attention_bias", True)
        sinks = {"self_attn": Stated((self.heads,), ("sinks",))}
        return self._projections(qkv_bias=bias, o_bias=bias) | sinks

    def _router(self, block: str) -> dict[str, Stated]:
        return {f"{block}.router": Stated((self.dims.experts, self.hidden), ("weight", "bias"))}
