"""Lets vLLM and SGLang run their Marlin path without a GPU, in tests: the two CUDA operations it
needs (repack and MoE GEMM) as plain torch, from the index formulas of layouts/FORMAT.md. Repack
calls are counted: a folder of ours must cause none.

Engines load it as a plugin, in each of their processes (`launch.py` writes the entry point).
"""

import hashlib
import importlib
import json
import os
from pathlib import Path
from typing import Any

import torch

REPACKS = [0]  # calls in this process


def _places(k: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For each word of a Marlin matrix [K/16, 2N] the k and n of its eight nibbles: [.., 8]."""
    w, p = torch.arange(k // 16 * 2 * n)[:, None], torch.arange(8)[None, :]
    c = w % (2 * n)
    a, b, d = c % 128 // 16, c // 4 % 4, c % 4
    rows = 64 * (c // 128) + 16 * d + 8 * (p >> 1 & 1) + a
    columns = 16 * (w // (2 * n)) + 8 * (p & 1) + 2 * b + (p >> 2)
    return columns, rows


def repack(qweight: torch.Tensor, *sizes: object, **_: object) -> torch.Tensor:
    """GPTQ's [E, K/8, N] → Marlin's [E, K/16, 2N]."""
    REPACKS[0] += 1
    k, n = 8 * qweight.shape[1], qweight.shape[2]
    columns, rows = _places(k, n)
    codes = qweight[:, columns // 8, rows] >> 4 * (columns % 8) & 15
    words = (codes.to(torch.int64) << 4 * torch.arange(8)).sum(-1)
    return (words - (words >> 31 << 32)).to(torch.int32).view(len(qweight), k // 16, 2 * n)


def dequantize(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Marlin codes [K/16, 2N] and scales [G, N] → bfloat16 [N, K]."""
    k, n = 16 * packed.shape[0], packed.shape[1] // 2
    columns, rows = _places(k, n)
    codes = torch.empty(n, k)
    codes[rows, columns] = ((packed.reshape(-1, 1) >> 4 * torch.arange(8) & 15) - 8).float()
    i = torch.arange(n)
    if len(scales) > 1:
        place = 64 * (i // 64) + 8 * (i % 8) + i % 64 // 8
    else:
        place = 32 * (i // 32) + 8 * (i % 8 // 2) + 2 * (i % 32 // 8) + i % 2
    wide = scales[:, place].float().T.repeat_interleave(k // len(scales), dim=1)
    return (codes * wide).to(torch.bfloat16)


def experts(keeper, hidden, w1, w2, s1, s2, weights, ids, expert_map=None) -> torch.Tensor:
    """The MoE of a layer; dequantized experts are kept on `keeper`."""
    if not hasattr(keeper, "_shim_experts"):
        keeper._shim_experts = [
            (dequantize(w1[e], s1[e]), dequantize(w2[e], s2[e])) for e in range(len(w1))
        ]
    if expert_map is not None:
        ids = expert_map[ids.long()]
    out = torch.zeros(len(hidden), w2.shape[2] // 2)
    for row, slot in (ids >= 0).nonzero().tolist():
        w13, down = keeper._shim_experts[int(ids[row, slot])]
        gate, up = (w13 @ hidden[row].to(torch.bfloat16)).chunk(2)
        y = down @ (torch.nn.functional.silu(gate.float()) * up.float()).to(torch.bfloat16)
        out[row] += weights[row, slot].float() * y.float()
    return out


def inspect_model(model: torch.nn.Module) -> dict[str, Any]:
    """Digest of every parameter and buffer of this rank's model, and how often it has repacked."""
    found = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        what = f"{tensor.dtype}{list(tensor.shape)}".encode()
        found[name] = hashlib.sha256(what + data.tobytes()).hexdigest()
    return {"parameters": found, "repacks": REPACKS[0]}


def install_vllm() -> None:
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe.experts import marlin_moe

    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, **rest) -> None:
        result = experts(
            self, hidden_states, w1, w2, self.w1_scale, self.w2_scale, topk_weights, topk_ids,
            rest["expert_map"],
        )  # fmt: skip
        output.copy_(result)

    marlin_moe.MarlinExpertsBase._supports_current_device = staticmethod(lambda: True)
    marlin_moe.MarlinExperts.apply = apply
    _custom_ops.gptq_marlin_moe_repack = repack
    _install_vllm_026()


def _install_vllm_026() -> None:
    """It asks a GPU for the size of its workspaces."""
    name = "compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_wna16_marlin"
    try:
        own = importlib.import_module(f"vllm.model_executor.layers.quantization.{name}")
    except ImportError:
        return
    from vllm.v1.worker.workspace import init_workspace_manager

    own.marlin_make_workspace_new = lambda device, *_: torch.zeros(4, dtype=torch.int32)
    init_workspace_manager(torch.device("cpu"))


def install_sglang() -> None:
    from sglang.srt.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_wNa16_moe as own,
    )
    from sglang.srt.models.deepseek_common import attention_backend_handler as attention
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def apply_weights(self, layer, dispatch_output):
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

        hidden = dispatch_output.hidden_states
        weights, ids, *_ = dispatch_output.topk_output
        result = experts(
            layer, hidden, layer.w13_weight_packed, layer.w2_weight_packed,
            layer.w13_weight_scale, layer.w2_weight_scale, weights, ids,
        )  # fmt: skip
        return StandardCombineInput(hidden_states=result.to(hidden.dtype))

    def report(model, *_, **__):
        folder = Path(os.environ["SHIM_REPORTS"])
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        (folder / f"rank-{rank}.json").write_text(json.dumps(inspect_model(model)))
        return model

    own.gptq_marlin_moe_repack = repack
    own.marlin_make_workspace = lambda device, *_: torch.zeros(4, dtype=torch.int32, device=device)
    own.CompressedTensorsWNA16MoE.apply_weights = apply_weights
    attention.AttentionBackendRegistry.register(
        "torch_native", lambda *_: attention.AttnForwardMethod.MLA
    )
    loader = "sglang.srt.model_loader.loader.DefaultModelLoader.load_model"
    HookRegistry.register(loader, report, HookType.AFTER)
