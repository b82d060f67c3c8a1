"""What families with grouped-query attention share: each states its own part of it."""

from abc import abstractmethod
from typing import Any

from kconvert.layouts.errors import CheckpointError
from kconvert.layouts.families.family import Family, Stated, mlp_modules, mtp_modules
from kconvert.layouts.fields import CONFIG_NAME, flag, natural, positive
from kconvert.layouts.sharding import MOST, ModelDims


class StandardFamily(Family):
    """Attention of q, k, v and o; experts beside a router, maybe shared ones; dense layers."""

    _width = "moe_intermediate_size"  # the key of an expert's intermediate size

    def _read(self, config: dict[str, Any]) -> ModelDims:
        self.config = config
        self.heads = positive(config, "num_attention_heads")
        self.kv_heads = natural(config, "num_key_value_heads", self.heads) or self.heads
        self.hidden, self.vocabulary = (positive(config, k) for k in ("hidden_size", "vocab_size"))
        self.head_dim = natural(config, "head_dim", 0) or self.hidden // self.heads
        self.tied = flag(config, "tie_word_embeddings", False)
        first, dense = self._dense()
        return ModelDims(
            layers=positive(config, "num_hidden_layers", MOST),
            mtp_layers=natural(config, "num_nextn_predict_layers", 0, MOST),
            first_moe=first,
            experts=self._experts(),
            hidden=self.hidden,
            intermediate=positive(config, self._width),
            quantization=self.format.quantization,
            dense=dense,
        )

    @abstractmethod
    def _experts(self) -> int:
        """How many routed experts a layer has."""

    def _dense(self) -> tuple[int, frozenset[int]]:
        """The first MoE layer (those below are dense), and the other layers that are dense."""
        return 0, frozenset()

    def _attention(self) -> dict[str, Stated]:
        """Projections without biases or norms."""
        return self._projections(qkv_bias=False, o_bias=False)

    @abstractmethod
    def _router(self, block: str) -> dict[str, Stated]:
        """The router of a layer's experts, and the shared experts."""

    def stated(self, layer: int | None, block: str) -> dict[str, Stated]:
        table, norm = (self.vocabulary, self.hidden), Stated((self.hidden,))
        if layer is None:
            return {
                "model.embed_tokens": Stated(table),
                "model.norm": norm,
                "lm_head": Stated(table, optional=self.tied),
            }
        modules = {"input_layernorm": norm, "post_attention_layernorm": norm, **self._attention()}
        if self.dims.is_moe(layer):
            modules |= self._router(block)
        else:
            size = positive(self.config, "intermediate_size")
            modules |= mlp_modules("mlp", size, self.hidden)
        return modules | (mtp_modules(*table) if layer >= self.dims.layers else {})

    def _projections(self, *, qkv_bias: bool, o_bias: bool) -> dict[str, Stated]:
        q, kv, hidden = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden
        with_bias = {False: ("weight",), True: ("weight", "bias")}
        return {
            "self_attn.q_proj": Stated((q, hidden), with_bias[qkv_bias]),
            "self_attn.k_proj": Stated((kv, hidden), with_bias[qkv_bias]),
            "self_attn.v_proj": Stated((kv, hidden), with_bias[qkv_bias]),
            "self_attn.o_proj": Stated((hidden, q), with_bias[o_bias]),
        }

    def _norms(self, q: int, k: int) -> dict[str, Stated]:
        return {"self_attn.q_norm": Stated((q,)), "self_attn.k_norm": Stated((k,))}


def count(config: dict[str, Any], *keys: str) -> int:
    """The number of experts, from whichever of `keys` is there; if several are, they must agree."""
    said = {key: positive(config, key, MOST) for key in keys if config.get(key) is not None}
    if not said:
        raise CheckpointError(f"{CONFIG_NAME} has no {' nor '.join(keys)}.")
    if len(set(said.values())) > 1:
        values = ", ".join(f"{key} is {value}" for key, value in said.items())
        raise CheckpointError(f"{CONFIG_NAME}: {values}: one of them is wrong.")
    return next(iter(said.values()))
