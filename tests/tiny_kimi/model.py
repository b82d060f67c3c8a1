"""K2.6's text model in plain torch, for training and for judging what was trained.

DeepSeek-V3's architecture with checkpoint names: MLA with interleaved RoPE under YaRN, a dense
layer, MoE layers with a shared expert and a sigmoid router. It agrees with transformers'
DeepseekV3 in float32. The latents' two norms have epsilon 1e-6 there, whatever rms_norm_eps says.
"""

import copy
import math
from types import SimpleNamespace
from typing import Any

import torch
from bpe import BOS, IM_END, PAD, SPECIAL_IDS, VOCAB
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

GROUP = 32
_LATENT_EPS = 1e-6
_TOKENS = {"bos_token_id": BOS, "eos_token_id": IM_END, "pad_token_id": PAD}
TEXT_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "hidden_size": 256,
    "num_hidden_layers": 3, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "n_routed_experts": 16, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 128, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 16, "v_head_dim": 64, "vocab_size": VOCAB,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-05, "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
    "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0, "hidden_act": "silu", "attention_bias": False, **_TOKENS,
    "quantization_config": {
        "config_groups": {
            "group_0": {
                "input_activations": None, "output_activations": None, "targets": ["Linear"],
                "weights": {
                    "actorder": None, "block_structure": None, "dynamic": False,
                    "group_size": GROUP, "num_bits": 4, "observer": "minmax",
                    "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
                },
            }
        },
        "format": "pack-quantized",
        "ignore": [
            "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        ],
        "kv_cache_scheme": None, "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    },
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
    "dtype": "bfloat16", **_TOKENS, "media_placeholder_token_id": SPECIAL_IDS["<|media_pad|>"],
    "text_config": TEXT_CONFIG,
}  # fmt: skip


def yarn_frequencies(dim: int, theta: float, scaling: dict[str, Any]) -> Tensor:
    """RoPE's inverse frequencies: slow ones divided by the factor, a ramp in between."""
    original = scaling["original_max_position_embeddings"]

    def turning(rotations: float) -> float:  # the dimension that turns so often in the original
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(turning(scaling["beta_fast"])), 0)
    high = min(math.ceil(turning(scaling["beta_slow"])), dim - 1)
    pairs = torch.arange(0, dim, 2, dtype=torch.float32)
    fast = 1 / theta ** (pairs / dim)
    ramp = ((pairs / 2 - low) / max(high - low, 0.001)).clamp(0, 1)
    return fast / scaling["factor"] * ramp + fast * (1 - ramp)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the pairs (2i, 2i+1) of x [..., T, dim] by angles [T, dim / 2]."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Moonshot's grid: codes −7 to 7 [..., K] and bf16(max|w| / 7) scales [..., K / 32]."""
    groups = weight.detach().float().unflatten(-1, (-1, GROUP))
    scale = (groups.abs().amax(-1) / 7).bfloat16()
    codes = groups / scale.float().clamp_min(1e-30).unsqueeze(-1)
    return codes.round().clamp(-7, 7).to(torch.int8).flatten(-2), scale


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    return (codes.float().unflatten(-1, (-1, GROUP)) * scale.float().unsqueeze(-1)).flatten(-2)


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Linear(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        nn.init.normal_(self.weight, std=0.6 * inputs**-0.5)


class Cache:
    """A layer's keys and values of the tokens so far, in buffers of a fixed length."""

    def __init__(self, length: int) -> None:
        self.length, self.used = length, 0
        self.k = self.v = torch.empty(0)

    def extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Take in new rows; all rows until now."""
        if not self.used:
            self.k, self.v = (t.new_empty(*t.shape[:2], self.length, t.shape[3]) for t in (k, v))
        start, self.used = self.used, self.used + k.shape[2]
        self.k[:, :, start : self.used], self.v[:, :, start : self.used] = k, v
        return self.k[:, :, : self.used], self.v[:, :, : self.used]


class Attention(nn.Module):
    def __init__(self, c: SimpleNamespace) -> None:
        super().__init__()
        self.c, heads = c, c.num_attention_heads
        self.q_a_proj = Linear(c.hidden_size, c.q_lora_rank)
        self.q_a_layernorm = Norm(c.q_lora_rank, _LATENT_EPS)
        self.q_b_proj = Linear(c.q_lora_rank, heads * (c.qk_nope_head_dim + c.qk_rope_head_dim))
        self.kv_a_proj_with_mqa = Linear(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim)
        self.kv_a_layernorm = Norm(c.kv_lora_rank, _LATENT_EPS)
        self.kv_b_proj = Linear(c.kv_lora_rank, heads * (c.qk_nope_head_dim + c.v_head_dim))
        self.o_proj = Linear(heads * c.v_head_dim, c.hidden_size)
        mscale = 0.1 * c.rope_scaling["mscale_all_dim"] * math.log(c.rope_scaling["factor"]) + 1
        self.scale = (c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5 * mscale**2

    def forward(self, x: Tensor, angles: Tensor, cache: Cache | None) -> Tensor:
        c, (batch, rows, _) = self.c, x.shape
        heads = (batch, rows, c.num_attention_heads, -1)
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(heads).transpose(1, 2)
        q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(heads).transpose(1, 2)
        k_nope, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], -1)
        k_rope = rotate(k_rope, angles).unsqueeze(1).expand(-1, c.num_attention_heads, -1, -1)
        q, k = torch.cat((q_nope, rotate(q_rope, angles)), -1), torch.cat((k_nope, k_rope), -1)
        if cache is not None:
            k, v = cache.extended(k, v)
        scores = (q * self.scale) @ k.mT  # the fused kernels are slower on a CPU in bfloat16
        if rows > 1:
            past = k.shape[2] - rows
            unseen = torch.ones(rows, past + rows, dtype=torch.bool, device=x.device).triu(past + 1)
            scores = scores.masked_fill(unseen, -torch.inf)
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, hidden: int, size: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = Linear(hidden, size), Linear(hidden, size)
        self.down_proj = Linear(size, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    def __init__(self, c: SimpleNamespace) -> None:
        super().__init__()
        self.c = c
        self.weight = Linear(c.hidden_size, c.n_routed_experts).weight
        self.register_buffer("e_score_correction_bias", torch.zeros(c.n_routed_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight).sigmoid()
        chosen = (scores + self.e_score_correction_bias).topk(self.c.num_experts_per_tok).indices
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * self.c.routed_scaling_factor


class MoE(nn.Module):
    def __init__(self, c: SimpleNamespace) -> None:
        super().__init__()
        hidden, size, experts = c.hidden_size, c.moe_intermediate_size, c.n_routed_experts
        self.gate, self.quantized, self.loads = Router(c), False, torch.zeros(experts)
        self.shared_experts = MLP(hidden, size * c.n_shared_experts)
        self.gate_proj, self.up_proj, self.down_proj = (
            nn.Parameter(torch.randn(experts, *shape) * 0.6 * shape[1] ** -0.5)
            for shape in ((size, hidden), (size, hidden), (hidden, size))
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        chosen, weights = self.gate(flat)
        # Give each expert its rows: sort the (row, slot) pairs by expert, pad to the fullest one.
        experts, top_k = len(self.gate_proj), chosen.shape[1]
        self.loads = chosen.flatten().bincount(minlength=experts)
        order = chosen.flatten().argsort(stable=True)
        starts = self.loads.cumsum(0) - self.loads
        owner = chosen.flatten()[order]
        capacity = int(self.loads.max())
        place = owner * capacity + torch.arange(len(order), device=x.device) - starts[owner]
        rows = order // top_k
        grid = flat.new_zeros(experts * capacity, flat.shape[1]).index_copy(0, place, flat[rows])
        gate, up, down = (
            self._weight(p).mT for p in (self.gate_proj, self.up_proj, self.down_proj)
        )
        grid = grid.view(experts, capacity, -1)
        y = ((F.silu(grid @ gate) * (grid @ up)) @ down).flatten(0, 1)[place].float()
        y = y * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(flat).index_add(0, rows, y).view_as(x) + self.shared_experts(x)

    def _weight(self, weight: Tensor) -> Tensor:
        """The weight, or in quantization-aware training its value on the grid."""
        # Straight through: the gradient is the unquantized weight's.
        if not self.quantized:
            return weight
        return weight + (dequantize(*quantize(weight)) - weight).detach()


class Layer(nn.Module):
    def __init__(self, c: SimpleNamespace, index: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        dense = index < c.first_k_dense_replace
        self.mlp = MLP(c.hidden_size, c.intermediate_size) if dense else MoE(c)

    def forward(self, x: Tensor, angles: Tensor, cache: Cache | None, drop: float) -> Tensor:
        y = self.self_attn(self.input_layernorm(x), angles, cache)
        x = x + F.dropout(y, drop, self.training)
        return x + F.dropout(self.mlp(self.post_attention_layernorm(x)), drop, self.training)


class Kimi(nn.Module):
    """The text model; parameter names are the checkpoint's without `language_model.model.`."""

    def __init__(self, config: dict[str, Any] = TEXT_CONFIG, dropout: float = 0.0) -> None:
        super().__init__()
        self.c = c = SimpleNamespace(**copy.deepcopy(config))
        self.dropout = dropout
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c.num_hidden_layers))
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = Linear(c.hidden_size, c.vocab_size)
        frequencies = yarn_frequencies(c.qk_rope_head_dim, c.rope_theta, c.rope_scaling)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, ids: Tensor, cache: list[Cache] | None = None) -> list[Tensor]:
        """The output of every layer [B, T, hidden]; with a cache, ids continue what is in it."""
        start = cache[0].used if cache else 0
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)
        angles = positions[:, None] * self.frequencies
        x = F.dropout(self.embed_tokens(ids), self.dropout, self.training)
        outputs = []
        for i, layer in enumerate(self.layers):
            x = layer(x, angles, cache[i] if cache else None, self.dropout)
            outputs.append(x)
        return outputs

    def logits(self, x: Tensor) -> Tensor:
        return self.lm_head(self.norm(x)).float()

    @torch.no_grad()
    def generate(self, ids: Tensor, new: int, temperature: float = 0.0) -> Tensor:
        """ids [B, T] and `new` more tokens each; temperature 0 takes the likeliest."""
        cache, step = [Cache(ids.shape[1] + new) for _ in self.layers], ids
        for _ in range(new):
            logits = self.logits(self(step, cache)[-1][:, -1:])
            if temperature:
                noise = -torch.empty_like(logits).exponential_().log()
                logits = logits / temperature + noise
            step = logits.argmax(-1)
            ids = torch.cat((ids, step), 1)
        return ids
