"""K2.6's text model, forward: DeepSeek-V3's MLA and MoE, top to bottom, over a backend.

Shapes: T rows, D hidden, H heads of this rank, C kv_lora, R rope, V vocabulary, n ranks. Every
operation is row-wise (backends/protocol.py), so a row's bits depend on its token, its position and
its history alone. Attention has one form, absorbed, for prompts and decoding.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.experts import Matrix, stacked
from kconvert.layouts.layout import Layout
from kconvert.layouts.quantization import Role, factors, integers
from kconvert.layouts.sharding import Parallelism, rank_experts
from kconvert.runtime.backends.protocol import (
    Array,
    Backend,
    Cache,
    LatentNorms,
    Norm,
    Source,
    Step,
    Weight,
)
from kconvert.runtime.config import ModelConfig
from kconvert.runtime.weights import Blobs

LATENT_EPS = (
    1e-6  # of q_a_layernorm and kv_a_layernorm, in transformers' DeepseekV3; not the config's
)


class Mlp(NamedTuple):
    """A rank's rows of gate and up, stacked, and the same columns of down."""

    gate_up: Weight  # [2N, D]
    down: Weight  # [D, N]


class Moe(NamedTuple):
    """The router with its bias, the routed experts and, if there is one, the shared expert."""

    first: Weight  # [E + 2N, D]: the router, then the shared expert's gate and up
    bias: Weight  # [E]
    experts: Weight
    down: Weight | None  # [D, N], the shared expert's


class Layer(NamedTuple):
    """What a layer reads, looked up and sliced once."""

    input_norm: Norm
    low: Weight  # [q_lora + C + R, D]: q_a and kv_a
    latent_norms: LatentNorms
    queries: Weight  # [H·(nope + R), q_lora or D]
    kv_b: Weight  # [H·(nope + v), C]
    output: Weight  # [D, H·v]
    mlp_norm: Norm
    moe: Moe | None
    mlp: Mlp | None  # a dense layer's


class _MlpWeights(TypedDict):
    """The fields of `Layer` for its MLP or MoE."""

    moe: Moe | None
    mlp: Mlp | None


class Weights(NamedTuple):
    """The whole model's weights, or a rank's part of them."""

    embedding: Weight  # [V, D]
    layers: list[Layer]
    norm: Norm
    head: Weight  # [V / n, D]


class Model:
    """A target model over blobs, or a rank's part of it.

    Each rank has some heads, some of every MLP's intermediate rows, some experts' slices and some
    rows of the head; the rest is replicated. Raises UnsupportedError if that does not divide.
    """

    def __init__(self, config: ModelConfig, blobs: Blobs, backend: Backend) -> None:
        self.config, self.blobs = config, blobs
        self.backend: Any = backend  # callers that need more of it declare which one it is
        ranks = backend.ranks
        self._heads = ranks.rank_slice("heads", config.heads)
        self._vocabulary = ranks.rank_slice("tokens of the vocabulary", config.vocabulary)

    def new_cache(self, slots: int) -> Cache:
        """A cache of so many slots."""
        return self.backend.new_cache(slots)

    def forward(
        self, step: Step, cache: Cache, aux_layers: Sequence[int] = ()
    ) -> tuple[Array, list[Array]]:
        """Run a step's rows, writing their latents into `cache`.

        → hidden rows [T, D], normed, for `head`, and the outputs [T, D] of `aux_layers`.
        """
        c, w, ops = self.config, self.weights, self.backend
        x, sums, outputs = ops.embed(w.embedding, step.tokens), None, []
        for layer, keys in zip(w.layers, cache.layers, strict=True):
            x, h = ops.add_norm(x, sums, layer.input_norm)  # [T, D]
            outputs.append(x)
            low = ops.linear(h, layer.low)  # [T, q_lora + C + R]
            q_low = ops.store_latents(low, layer.latent_norms, step, keys)  # [T, q_lora]
            q = ops.linear(q_low if c.q_lora else h, layer.queries)  # [T, H·(nope + R)]
            queries = ops.queries(q, layer.kv_b, step)  # [T, H, C + R]
            context = ops.attend(queries, step, keys)  # [T, H, C]
            values = ops.expand(context, layer.kv_b)  # [T, H·v]
            x, h = ops.add_norm(x, ops.sums(values, layer.output), layer.mlp_norm)
            if layer.moe:
                sums = self._moe(h, layer.moe, step)  # [T, D]
            elif layer.mlp:
                sums = self._mlp(h, layer.mlp)
        x, h = ops.add_norm(x, sums, w.norm)
        outputs.append(x)  # outputs[i + 1] is layer i's, outputs[0] the embedding
        return h, [outputs[layer + 1] for layer in aux_layers]

    def _mlp(self, h: Array, mlp: Mlp) -> Array:
        """This rank's sums [T, D] for an MLP."""
        ops = self.backend
        return ops.sums(ops.gated(h, mlp.gate_up), mlp.down)

    def _moe(self, h: Array, moe: Moe, step: Step) -> Array:
        """This rank's sums [T, D] for the experts."""
        ops = self.backend
        logits, act = ops.sums_gated(h, moe.first, self.config.experts)  # [T, E], [T, N]
        shared = None if moe.down is None else ops.sums(act, moe.down)
        return ops.experts(h, ops.route(logits, moe.bias, step), moe.experts, shared)

    def head(self, hidden: Array) -> Array:
        """This rank's columns of the float32 logits [T, V / n] of normed hidden rows [T, D]."""
        return self.backend.sums(hidden, self.weights.head)

    @cached_property
    def weights(self) -> Weights:
        """All weights: looked up at the first forward, or before it if they are loaded onto a
        GPU."""
        c, ops = self.config, self.backend
        name = "model.embed_tokens" if c.tied_head else "lm_head"
        rows = self._get(name, c.vocabulary, c.hidden)
        head = ops.matrix(_part(rows, self._vocabulary))  # the largest first: one thread loads each
        return Weights(
            embedding=ops.embedding(self._get("model.embed_tokens", c.vocabulary, c.hidden)),
            layers=[self._layer(number) for number in range(c.layers)],
            norm=self._norm("model.norm", c.hidden, c.norm_eps),
            head=head,
        )

    def _layer(self, number: int) -> Layer:
        c, ops, base = self.config, self.backend, f"model.layers.{number}."
        attention, head = f"{base}self_attn.", c.nope_dim + c.rope_dim
        kv_a = self._get(f"{attention}kv_a_proj_with_mqa", c.kv_lora + c.rope_dim, c.hidden)
        low: tuple[Source, ...]
        if c.q_lora:
            low = (self._get(f"{attention}q_a_proj", c.q_lora, c.hidden), kv_a)
            q_norm = self._norm(f"{attention}q_a_layernorm", c.q_lora, LATENT_EPS)
            queries = self._get(f"{attention}q_b_proj", c.heads * head, c.q_lora)
        else:
            low, q_norm = (kv_a,), None
            queries = self._get(f"{attention}q_proj", c.heads * head, c.hidden)
        kv_b = self._get(f"{attention}kv_b_proj", c.heads * (c.nope_dim + c.value_dim), c.kv_lora)
        output = self.blobs.columns(
            f"{attention}o_proj.weight", (c.hidden, c.heads * c.value_dim),
            _times(self._heads, c.value_dim),
        )  # fmt: skip
        return Layer(
            input_norm=self._norm(f"{base}input_layernorm", c.hidden, c.norm_eps),
            low=ops.matrix(*low),
            latent_norms=LatentNorms(
                q_norm, self._norm(f"{attention}kv_a_layernorm", c.kv_lora, LATENT_EPS)
            ),
            queries=ops.matrix(_part(queries, _times(self._heads, head))),
            kv_b=ops.matrix(_part(kv_b, _times(self._heads, c.nope_dim + c.value_dim))),
            output=ops.matrix(output),
            mlp_norm=self._norm(f"{base}post_attention_layernorm", c.hidden, c.norm_eps),
            **self._mlp_weights(number, f"{base}mlp."),
        )

    def _mlp_weights(self, number: int, base: str) -> _MlpWeights:
        c, ops = self.config, self.backend
        if number < c.first_moe:
            *gate_up, down = self._dense(base, c.dense_intermediate)
            return {"moe": None, "mlp": Mlp(ops.matrix(*gate_up), ops.matrix(down))}
        first, last = [self._get(f"{base}gate", c.experts, c.hidden)], None
        if c.shared_experts:
            size = c.moe_intermediate * c.shared_experts
            *gate_up, down = self._dense(f"{base}shared_experts.", size)
            first, last = first + gate_up, ops.matrix(down)
        moe = Moe(
            first=ops.matrix(*first),
            bias=ops.vector(self.blobs.get(f"{base}gate.e_score_correction_bias", (c.experts,))),
            experts=ops.experts_of(BlobExperts(self.blobs, number, c.experts)),
            down=last,
        )
        return {"moe": moe, "mlp": None}

    def _dense(self, base: str, size: int) -> tuple[Source, Source, Source]:
        """This rank's rows of gate and up, and columns of down."""
        hidden = self.config.hidden
        mine = self.backend.ranks.rank_slice("rows of an MLP", size)
        gate, up = (self._get(f"{base}{name}_proj", size, hidden) for name in ("gate", "up"))
        down = self.blobs.columns(f"{base}down_proj.weight", (hidden, size), mine)
        return _part(gate, mine), _part(up, mine), down

    def _get(self, name: str, n: int, k: int) -> Source:
        return self.blobs.get(f"{name}.weight", (n, k))

    def _norm(self, name: str, size: int, epsilon: float) -> Norm:
        return Norm(self.backend.vector(self.blobs.get(f"{name}.weight", (size,))), epsilon)


class BlobExperts:
    """The protocol's ExpertSource: a layer's routed experts as this rank's blob holds them."""

    def __init__(self, blobs: Blobs, layer: int, experts: int) -> None:
        split = Parallelism(blobs.manifest.tp, blobs.manifest.ep)
        self.blobs, self.layer = blobs, layer
        self.experts = rank_experts(experts, split, blobs.rank)

    def codes(self, matrix: Matrix, expert: int) -> NDArray[np.int8]:
        """See ExpertSource."""
        words = self._layout.unpack("code", self._stored(matrix, "code", expert))
        return integers(self._layout.quantization, words)

    def scales(self, matrix: Matrix, expert: int) -> Source:
        """See ExpertSource: bf16's bits, or float32."""
        scales = self._layout.unpack("scale", self._stored(matrix, "scale", expert))
        return factors(self._layout.quantization, scales)

    def stack(self, matrix: Matrix, role: Role) -> Source:
        """See ExpertSource."""
        return self.blobs.stack(self._name(matrix, role))

    @property
    def _layout(self) -> Layout:
        assert self.blobs.layout is not None  # there are experts
        return self.blobs.layout

    def _stored(self, matrix: Matrix, role: Role, expert: int) -> Source:
        return self.blobs.expert(self._name(matrix, role), expert - self.experts.start)

    def _name(self, matrix: Matrix, role: Role) -> str:
        return f"model.layers.{self.layer}.mlp.experts.{stacked(matrix, role).name}"


def _part(matrix: Source, rows: range) -> Source:
    return matrix[rows.start : rows.stop]


def _times(part: range, size: int) -> range:
    return range(part.start * size, part.stop * size)
