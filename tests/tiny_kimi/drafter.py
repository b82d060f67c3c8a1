"""A DFlash drafter in z-lab's format: it drafts a whole block in one pass.

Its context are the target's hidden states at the committed tokens; its block is [last token,
MASK × 7], embedded by the target, whose lm_head also reads the result.
"""

from types import SimpleNamespace
from typing import Any

import torch
from bpe import MASK, VOCAB
from model import MLP, TEXT_CONFIG, Linear, Norm
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

LAYERS = 2
CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dtype": "bfloat16",
    "hidden_size": TEXT_CONFIG["hidden_size"], "num_hidden_layers": LAYERS,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 512,
    "vocab_size": VOCAB, "hidden_act": "silu",
    "max_position_embeddings": TEXT_CONFIG["max_position_embeddings"], "rms_norm_eps": 1e-05,
    "rope_theta": 50000.0, "attention_bias": False, "attention_dropout": 0.0,
    "tie_word_embeddings": False, "block_size": 8,
    "num_target_layers": TEXT_CONFIG["num_hidden_layers"],
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1, 2]},
    "layer_types": ["full_attention"] * LAYERS, "use_sliding_window": False,
    "sliding_window": None,
}  # fmt: skip


class DraftAttention(nn.Module):
    def __init__(self, c: SimpleNamespace) -> None:
        super().__init__()
        self.c = c
        heads, kv_heads = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, heads)
        self.k_proj, self.v_proj = Linear(c.hidden_size, kv_heads), Linear(c.hidden_size, kv_heads)
        self.o_proj = Linear(heads, c.hidden_size)
        self.q_norm, self.k_norm = (Norm(c.head_dim, c.rms_norm_eps) for _ in range(2))

    def forward(
        self, x: Tensor, ctx: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        keys, width = torch.cat((ctx.to(x.dtype), x), 1), self.c.head_dim
        q, k, v = (
            projection(rows).unflatten(-1, (-1, width)).transpose(1, 2)
            for projection, rows in ((self.q_proj, x), (self.k_proj, keys), (self.v_proj, keys))
        )
        q, k = rotate_half(self.q_norm(q), angles[0]), rotate_half(self.k_norm(k), angles[1])
        groups = self.c.num_attention_heads // self.c.num_key_value_heads
        k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, mask)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class DraftLayer(nn.Module):
    def __init__(self, c: SimpleNamespace) -> None:
        super().__init__()
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = DraftAttention(c)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c.hidden_size, c.intermediate_size)

    def forward(
        self, x: Tensor, ctx: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), ctx, angles, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    def __init__(self, config: dict[str, Any] = CONFIG) -> None:
        super().__init__()
        self.c = c = SimpleNamespace(**config)
        self.target_layer_ids = c.dflash_config["target_layer_ids"]
        self.fc = Linear(c.hidden_size * len(self.target_layer_ids), c.hidden_size)
        self.hidden_norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(c) for _ in range(c.num_hidden_layers))
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)
        frequencies = 1 / c.rope_theta ** (torch.arange(0, c.head_dim, 2) / c.head_dim)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def features(self, outputs: list[Tensor]) -> Tensor:
        """What the drafter sees of the target, from the outputs of all its layers."""
        return torch.cat([outputs[i] for i in self.target_layer_ids], -1)

    def forward(
        self, features: Tensor, anchors: Tensor, tokens: Tensor, embed: nn.Module
    ) -> Tensor:
        """Many blocks at once: hidden states [B, n, block − 1, hidden] for the drafted slots.

        features [B, T, ·] of the sequence; anchors [B, n], the positions of the blocks' first
        slots; tokens [B, n] there. A block sees the features before its anchor, and itself.
        """
        size, (batch, count) = self.c.block_size, anchors.shape
        ids = tokens.new_full((batch, count, size), self.c.dflash_config["mask_token_id"])
        ids[:, :, 0] = tokens
        x = embed(ids).flatten(1, 2)
        ctx = self.hidden_norm(self.fc(features))
        past = torch.arange(features.shape[1], device=x.device)
        positions = (anchors.unsqueeze(-1) + torch.arange(size, device=x.device)).flatten(1)
        keys = torch.cat((past.expand(batch, -1), positions), 1)
        angles = tuple(p.unsqueeze(-1) * self.frequencies for p in (positions, keys))
        block = torch.arange(count, device=x.device).repeat_interleave(size)
        sees_past = past < anchors.repeat_interleave(size, 1).unsqueeze(-1)
        sees_block = (block.unsqueeze(0) == block.unsqueeze(1)).expand(batch, -1, -1)
        mask = torch.cat((sees_past, sees_block), -1).unsqueeze(1)
        for layer in self.layers:
            x = layer(x, ctx, angles, mask)
        return self.norm(x).unflatten(1, (count, size))[:, :, 1:]


def rotate_half(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the pairs (i, i + dim / 2) of x [B, heads, T, dim] by angles [B, T, dim / 2]."""
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
