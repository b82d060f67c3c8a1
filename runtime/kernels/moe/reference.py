"""The MoE operations in plain torch: the reference for every CUDA kernel, on any device.

It rounds where NOTES.md says.
"""

import torch
from torch import Tensor

from kconvert.runtime.kernels.moe.shape import MoeShape


def unpack_w4a16(packed: Tensor) -> Tensor:
    """Nibbles of int32 [..., n, k/8] in the checkpoint's order -> uint8 [..., n, k]."""
    shifts = torch.arange(0, 32, 4, device=packed.device, dtype=torch.int32)
    return (packed[..., None] >> shifts & 15).to(torch.uint8).flatten(-2)


def unpack_marlin(packed: Tensor) -> Tensor:
    """Nibbles of Marlin words int32 [k/16, 2n] -> uint8 [n, k].

    Word (kt, nt, a, b, d), nibble (k parity, n half, k half):
    n = 64 nt + 16 d + 8 (n half) + a, k = 16 kt + 8 (k half) + 2 b + (k parity).
    """
    k_tiles, n = packed.shape[0], packed.shape[1] // 2
    nibbles = unpack_w4a16(packed).view(k_tiles, n // 64, 8, 4, 4, 2, 2, 2)
    return nibbles.permute(1, 4, 6, 2, 0, 7, 3, 5).reshape(n, k_tiles * 16)


def unpermute_scales(scales: Tensor) -> Tensor:
    """Marlin's scales [k/g, n] -> [n, k/g]. One single group has an order of its own."""
    groups, n = scales.shape
    if groups == 1:
        return scales.view(1, n // 32, 4, 4, 2).permute(1, 3, 2, 4, 0).reshape(n, 1)
    return scales.view(groups, n // 64, 8, 8).transpose(2, 3).reshape(groups, n).T


def dequantize(nibbles: Tensor, scales: Tensor) -> Tensor:
    """Nibbles uint8 [n, k], scales bf16 [n, k/g] -> bf16 [n, k], one rounding."""
    values = nibbles.float() - 8
    group = nibbles.shape[1] // scales.shape[1]
    return (values * scales.float().repeat_interleave(group, 1)).bfloat16()


def marlin_weight(packed: Tensor, scales: Tensor) -> Tensor:
    """One expert's Marlin blob -> bf16 [n, k]."""
    return dequantize(unpack_marlin(packed), unpermute_scales(scales))


def w4a16_weight(packed: Tensor, scales: Tensor) -> Tensor:
    """One expert in the checkpoint's order -> bf16 [n, k]."""
    return dequantize(unpack_w4a16(packed), scales)


def router(logits: Tensor, bias: Tensor, top_k: int, factor: float) -> tuple[Tensor, Tensor]:
    """logits, bias float32 [M, E], [E] -> ids int32 [M, top_k], weights float32 [M, top_k].

    Chosen by sigmoid(logit) + bias, best first, ties to the lowest id; the weights are the scores
    without the bias, normalised over the chosen, times factor.
    """
    scores = logits.sigmoid()
    ids = (scores + bias).sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = scores.gather(1, ids)
    return ids.int(), chosen * (factor / (chosen.sum(1, keepdim=True) + 1e-20))


def moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    shape: MoeShape,
    layout: str = "marlin",
) -> Tensor:
    """Routed experts of one rank: x bf16 [M, K] -> float32 [M, K].

    ids int32, weights float32 [M, top_k]; blobs stacked over the rank's experts in ``layout``
    ("marlin" or "w4a16"). Slots whose expert is on another rank add nothing.
    """
    weight = {"marlin": marlin_weight, "w4a16": w4a16_weight}[layout]
    y = torch.zeros(*ids.shape, shape.hidden, dtype=torch.bfloat16, device=x.device)
    for expert in sorted(set(ids.flatten().tolist())):
        local = expert - shape.first_expert
        if not 0 <= local < shape.experts:
            continue
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token].float() @ weight(w13[local], w13_scale[local]).float().T).chunk(2, 1)
        act = (gate / (1 + (-gate).exp()) * up).bfloat16()
        sums = act.float() @ weight(w2[local], w2_scale[local]).float().T
        y[token, slot] = (weights[token, slot, None] * sums).bfloat16()
    out = torch.zeros(x.shape[0], shape.hidden, device=x.device)
    for slot in range(shape.top_k):
        out += y[:, slot].float()
    return out
