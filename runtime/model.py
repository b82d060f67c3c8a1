"""K2.6's text model, forward: DeepSeek-V3's MLA and MoE, top to bottom.

Shapes: T rows, D hidden, H heads, C kv_lora, R rope, V vocabulary. Every operation is row-wise
(`cpu_ops`), so a row's bits depend on its token, its position, its history and the form of its
attention (`Step.prefill`) alone.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.experts import Matrix, stacked
from kconvert.layouts.formats.compressed_tensors import unpack_codes
from kconvert.layouts.quantization import dequantize
from kconvert.layouts.sharding import Parallelism, rank_experts
from kconvert.runtime import rope
from kconvert.runtime.backends import cpu as ops
from kconvert.runtime.backends.kept import Kept
from kconvert.runtime.cache import LatentCache
from kconvert.runtime.config import ModelConfig
from kconvert.runtime.distributed import Ranks
from kconvert.runtime.step import Step
from kconvert.runtime.weights import Blobs

Array = NDArray[np.float32]
DTYPES = ("float32", "bfloat16")
EXPERT_BYTES = 4 << 30  # of dequantized experts that are kept
LATENT_EPS = (
    1e-6  # of q_a_layernorm and kv_a_layernorm, in transformers' DeepseekV3; not the config's
)


class Model:
    """A target model over mapped blobs, or a rank's part of it. `dtype` is what activations are
    rounded to; sums and logits are float32 in both.

    Each rank has some heads, some of every MLP's intermediate rows, some experts' slices and some
    rows of the head; the rest is replicated. Raises UnsupportedError where that does not divide.
    """

    def __init__(
        self, config: ModelConfig, blobs: Blobs, ranks: Ranks, dtype: str = "float32"
    ) -> None:
        self.config, self.blobs, self.ranks, self.dtype = config, blobs, ranks, dtype
        self._heads = ranks.rank_slice("heads", config.heads)
        self._vocabulary = ranks.rank_slice("tokens of the vocabulary", config.vocabulary)
        split = Parallelism(blobs.manifest.tp, blobs.manifest.ep)
        self._experts_here = rank_experts(config.experts, split, ranks.rank)
        self._experts = Kept(EXPERT_BYTES)

    def new_cache(self, slots: int) -> LatentCache:
        """A cache of so many slots."""
        c = self.config
        return LatentCache(c.layers, slots, c.kv_lora + c.rope_dim)

    def forward(
        self, step: Step, cache: LatentCache, aux_layers: Sequence[int] = ()
    ) -> tuple[Array, Array]:
        """Run the rows of `step`, writing their latents into `cache`.

        → logits float32 [T, V], and the outputs of `aux_layers` side by side [T, n·D].
        """
        c, get = self.config, self.blobs.get
        table = get("model.embed_tokens.weight", (c.vocabulary, c.hidden))
        x = ops.widen(table[step.tokens])  # [T, D]
        aux: dict[int, Array] = {}
        for layer in range(c.layers):
            base = f"model.layers.{layer}."
            h = self._norm(x, f"{base}input_layernorm.weight", c.hidden)
            x = self._round(x + self._attention(h, layer, step, cache))
            h = self._norm(x, f"{base}post_attention_layernorm.weight", c.hidden)
            mlp = self._moe(h, layer) if layer >= c.first_moe else self._dense(h, layer)
            x = self._round(x + mlp)
            if layer in aux_layers:
                aux[layer] = x
        return self.head(self._norm(x, "model.norm.weight", c.hidden)), (
            np.concatenate(
                [np.empty((len(x), 0), np.float32), *(aux[i] for i in aux_layers)], axis=1
            )
        )

    def head(self, hidden: Array) -> Array:
        """Logits float32 [T, V] of normed hidden rows [T, D]."""
        c = self.config
        name = "model.embed_tokens.weight" if c.tied_head else "lm_head.weight"
        rows = self.blobs.get(name, (c.vocabulary, c.hidden))
        return self.ranks.all_gather(ops.linear(hidden, rows[_cut(self._vocabulary)]))

    def embed(self, tokens: NDArray[np.int64]) -> Array:
        """Embedding rows [T, D]."""
        c = self.config
        return ops.widen(
            self.blobs.get("model.embed_tokens.weight", (c.vocabulary, c.hidden))[tokens]
        )

    def _attention(self, h: Array, layer: int, step: Step, cache: LatentCache) -> Array:
        c, rows, base = self.config, len(h), f"model.layers.{layer}.self_attn."
        q = self._query(h, base).reshape(rows, len(self._heads), c.nope_dim + c.rope_dim)
        kv = self._linear(h, f"{base}kv_a_proj_with_mqa.weight", c.kv_lora + c.rope_dim, c.hidden)
        cos, sin = rope.tables(c.rope_dim, c.rope_theta, c.yarn, step.positions)
        latent = self._norm(
            kv[:, : c.kv_lora], f"{base}kv_a_layernorm.weight", c.kv_lora, LATENT_EPS
        )
        k_pe = self._round(ops.rotate(kv[:, None, c.kv_lora :], cos, sin))[:, 0]
        cache.store(layer, step.slots, np.concatenate([latent, k_pe], axis=1))
        keys = cache.keys(layer)
        q_pe = self._round(ops.rotate(q[..., c.nope_dim :], cos, sin))  # [T, H, R]
        kv_b = self.blobs.get(
            f"{base}kv_b_proj.weight", (c.heads * (c.nope_dim + c.value_dim), c.kv_lora)
        ).reshape(c.heads, c.nope_dim + c.value_dim, c.kv_lora)[_cut(self._heads)]
        form = self._plain if step.prefill else self._absorbed
        values = self._round(form(q[..., : c.nope_dim], q_pe, kv_b, step, keys))  # [T, H, v]
        v = c.value_dim
        mine = range(v * self._heads.start, v * self._heads.stop)
        o_proj = self.blobs.columns(f"{base}o_proj.weight", (c.hidden, c.heads * v), mine)
        return self._all_reduce(ops.linear(values.reshape(rows, len(mine)), o_proj))

    def _absorbed(self, q: Array, q_pe: Array, kv_b: Any, step: Step, keys: Array) -> Array:
        """Attention in latent space, for decoding: a key is read once for all heads.

        q [T, H, nope], q_pe [T, H, R], keys [slots, C + R] → values [T, H, v].
        """
        c = self.config
        q_latent = self._round(ops.absorb(q, kv_b))  # [T, H, C]
        context = ops.attend(
            np.concatenate([q_latent, q_pe], axis=2), keys,
            step.prefix, step.windows, step.counts, c.softmax_scale, c.kv_lora,
        )  # [T, H, C]  # fmt: skip
        return ops.expand(self._round(context), kv_b, c.nope_dim)

    def _plain(self, q: Array, q_pe: Array, kv_b: Any, step: Step, keys: Array) -> Array:
        """The same with the latents expanded to each head's keys and values, for the prompt: less
        work a key once many rows share the expansion."""
        c, end = self.config, int(step.positions.max()) + 1
        out = np.empty((*q.shape[:2], c.value_dim), np.float32)
        latents = np.ascontiguousarray(keys[:end, : c.kv_lora])
        for head in range(q.shape[1]):
            expanded = self._round(ops.linear(latents, kv_b[head]))  # [end, nope + v]
            own = np.concatenate(
                [expanded[:, c.nope_dim :], expanded[:, : c.nope_dim], keys[:end, c.kv_lora :]],
                axis=1,
            )  # [end, v + nope + R]: what is attended to comes first
            nothing = np.zeros((len(q), c.value_dim), np.float32)
            query = np.concatenate([nothing, q[:, head], q_pe[:, head]], axis=1)[:, None]
            out[:, head] = ops.attend(
                query, own, step.prefix, step.windows, step.counts, c.softmax_scale, c.value_dim
            )[:, 0]
        return out

    def _query(self, h: Array, base: str) -> Array:
        c = self.config
        dim = c.nope_dim + c.rope_dim
        width, mine = c.heads * dim, range(dim * self._heads.start, dim * self._heads.stop)
        if not c.q_lora:
            return self._linear(h, f"{base}q_proj.weight", width, c.hidden, mine)
        low = self._linear(h, f"{base}q_a_proj.weight", c.q_lora, c.hidden)
        low = self._norm(low, f"{base}q_a_layernorm.weight", c.q_lora, LATENT_EPS)
        return self._linear(low, f"{base}q_b_proj.weight", width, c.q_lora, mine)

    def _dense(self, h: Array, layer: int) -> Array:
        size = self.config.dense_intermediate
        return self._all_reduce(self._mlp(h, f"model.layers.{layer}.mlp.", size))

    def _mlp(self, h: Array, base: str, size: int) -> Array:
        """This rank's partial sum [T, D] of an MLP of `size` intermediate rows, not rounded."""
        hidden, mine = self.config.hidden, self.ranks.rank_slice("rows of an MLP", size)
        gate = self._linear(h, f"{base}gate_proj.weight", size, hidden, mine)
        up = self._linear(h, f"{base}up_proj.weight", size, hidden, mine)
        act = self._round(ops.silu_mul(gate, up))
        down = self.blobs.columns(f"{base}down_proj.weight", (hidden, size), mine)
        return ops.linear(act, down)

    def _moe(self, h: Array, layer: int) -> Array:
        c, base = self.config, f"model.layers.{layer}.mlp."
        gate = self.blobs.get(f"{base}gate.weight", (c.experts, c.hidden))
        bias = self.blobs.get(f"{base}gate.e_score_correction_bias", (c.experts,))
        ids, weights = ops.route(
            ops.linear(h, gate), ops.widen(bias), c.top_k, c.norm_topk, c.routed_scale
        )
        y = np.zeros((*ids.shape, c.hidden), np.float32)  # [T, top_k, D]
        for expert in np.unique(ids):
            if expert not in self._experts_here:
                continue
            rows, slots = np.nonzero(ids == expert)
            w13, w2 = self._expert(layer, int(expert))
            gate_up = ops.linear(h[rows], w13)  # [rows, 2N]
            half = gate_up.shape[1] // 2
            act = ops.silu_mul(gate_up[:, :half].copy(), gate_up[:, half:].copy())
            y[rows, slots] = ops.linear(self._round(act), w2)
        routed = ops.add_slots(y, weights)
        if not c.shared_experts:
            return self._all_reduce(routed)
        size = c.moe_intermediate * c.shared_experts
        shared = self._mlp(h, f"{base}shared_experts.", size)
        both = self._all_reduce(np.stack([routed, shared]))  # one exchange between the ranks
        return self._round(both[0] + both[1])

    def _expert(self, layer: int, expert: int) -> tuple[Any, Any]:
        """An expert's w13 [2N, D] and w2 [D, N], dequantized: float32 exactly, or the bits of
        bf16((nibble − 8) · scale): eight or four times the size of its codes."""
        prefix, local = f"model.layers.{layer}.mlp.experts.", expert - self._experts_here.start
        return self._experts.get(
            (layer, expert),
            lambda: (
                self._dequantized("w13", prefix, local), self._dequantized("w2", prefix, local),
            ),
        )  # fmt: skip

    def _dequantized(self, matrix: Matrix, prefix: str, local: int) -> Any:
        layout = self.blobs.layout
        assert layout is not None  # there are experts
        packed = self.blobs.expert(f"{prefix}{stacked(matrix, 'code').name}", local)
        scale = self.blobs.expert(f"{prefix}{stacked(matrix, 'scale').name}", local)
        codes = unpack_codes(layout.unpack("code", packed))
        values = dequantize(codes, ops.widen(layout.unpack("scale", scale)))
        if self.dtype == "float32":
            return values
        return (ops.round_bf16(values).view(np.uint32) >> np.uint32(16)).astype(np.uint16)

    def _linear(self, x: Array, name: str, n: int, k: int, rows: range | None = None) -> Array:
        """x [T, k] times some rows (all, if not given) of the weight [n, k], rounded."""
        weight = self.blobs.get(name, (n, k))
        weight = weight if rows is None else weight[_cut(rows)]
        return self._round(ops.linear(np.ascontiguousarray(x), weight))

    def _all_reduce(self, partial: Array) -> Array:
        """The ranks' float32 partial sums in rank order, rounded."""
        return self._round(self.ranks.all_reduce(partial))

    def _norm(self, x: Array, name: str, size: int, eps: float | None = None) -> Array:
        weight = self.blobs.get(name, (size,))
        return self._round(ops.rms_norm(x, weight, self.config.norm_eps if eps is None else eps))

    def _round(self, x: Array) -> Array:
        return x if self.dtype == "float32" else ops.round_bf16(x)


def _cut(part: range) -> slice:
    return slice(part.start, part.stop)
