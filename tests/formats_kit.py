"""Checkpoints that other people's libraries wrote, and what their experts are worth."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from kit import DATA, load

from kconvert.layouts.blob import read_blob
from kconvert.layouts.experts import stacked_by_name, stacked_tensors
from kconvert.layouts.quantization import dequantize, factors, integers
from kconvert.layouts.registry import layout_named
from kconvert.layouts.scan import widened

FORMATS = DATA / "formats"
CHECKPOINTS = sorted(p.name for p in FORMATS.iterdir() if (p / "config.json").exists())
DEEPSEEK = [name for name in CHECKPOINTS if name.startswith("deepseek")]
GPT_OSS = "gpt-oss-mxfp4"
_TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I32": torch.int32,
          "I64": torch.int64, "U8": torch.uint8}  # fmt: skip
_NAMES = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down",
          "w2": "down"}  # fmt: skip
Key = tuple[int, int, str]  # layer, expert, projection


def source_tensors(name: str) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint."""
    return {
        key: torch.frombuffer(bytearray(t.data), dtype=_TORCH[t.dtype]).reshape(t.shape)
        for path in sorted((FORMATS / name).glob("*.safetensors"))
        for key, t in load(path).items()
    }


def reference(name: str) -> dict[Key, np.ndarray]:
    """The experts' weights float32 [N, K] as the libraries of their ecosystem decode them."""
    tensors = source_tensors(name)
    found = {}
    for key in tensors:
        base, _, companion = key.rpartition(".")
        if companion in ("weight_packed", "qweight") and ".experts." in base:
            decode = _gptq if companion == "qweight" else _compressed_tensors
            layer, expert, projection = (base.split(".")[i] for i in (2, -2, -1))
            value = decode(tensors, base, name)
            found[int(layer), int(expert), _NAMES[projection]] = value.numpy()
        elif companion.endswith("_proj_blocks"):
            found |= _gpt_oss(tensors, key)
    return found


def _compressed_tensors(tensors: dict, base: str, name: str) -> torch.Tensor:
    from compressed_tensors.compressors import unpack_fp4_from_uint8, unpack_from_int32

    packed, scale = tensors[f"{base}.weight_packed"], tensors[f"{base}.weight_scale"]
    n = len(packed)
    if packed.dtype == torch.uint8:
        codes = unpack_fp4_from_uint8(packed, n, 2 * packed.shape[1], torch.float32)
        scales = torch.ldexp(torch.ones(scale.shape), scale.int() - 127)
    else:
        shape = torch.Size(tensors[f"{base}.weight_shape"].tolist())
        codes = unpack_from_int32(packed, 32 * packed.shape[1] // shape[1], shape).float()
        scales = scale.float()
        zero_point = tensors.get(f"{base}.weight_zero_point")
        if zero_point is not None:
            points = unpack_from_int32(zero_point, 4, torch.Size(scale.shape), packed_dim=0)
            codes -= points.float().repeat_interleave(shape[1] // scale.shape[1], 1)
    return codes * scales.repeat_interleave(codes.shape[1] // scales.shape[1], 1)


def _gptq(tensors: dict, base: str, name: str) -> torch.Tensor:
    """As GPTQModel's dequantization says it; its logits prove it (`test_logits`)."""
    table = json.loads((FORMATS / name / "config.json").read_text())["quantization_config"]
    bits, shifts = table["bits"], torch.arange(0, 32, table["bits"])
    mask = (1 << bits) - 1
    words = tensors[f"{base}.qweight"].long() & 0xFFFFFFFF
    codes = (words[:, None, :] >> shifts[:, None] & mask).reshape(-1, words.shape[1])  # [K, N]
    scales = tensors[f"{base}.scales"].float()
    points = torch.full(scales.shape, 1 << (bits - 1))
    if not table["sym"]:
        add = 0x11111111 if table["checkpoint_format"] == "gptq" else 0
        zeros = (tensors[f"{base}.qzeros"].long() + add) & 0xFFFFFFFF
        points = (zeros[:, :, None] >> shifts & mask).reshape(len(zeros), -1)
    group = len(codes) // len(scales)
    values = (codes - points.repeat_interleave(group, 0)).float()
    return (values * scales.repeat_interleave(group, 0)).T


def _gpt_oss(tensors: dict, key: str) -> dict[Key, np.ndarray]:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    layer, base = int(key.split(".")[2]), key.removesuffix("_blocks")
    scales = tensors[f"{base}_scales"]
    whole = convert_moe_packed_tensors(tensors[key], scales, dtype=torch.float32)
    found = {}
    for expert, matrix in enumerate(whole.transpose(1, 2).numpy()):  # [2N, K] or [K, N]
        if "gate_up" in base:
            found |= {(layer, expert, "gate"): matrix[::2], (layer, expert, "up"): matrix[1::2]}
        else:
            found[layer, expert, "down"] = matrix
    return found


def dequantized(out: Path) -> dict[Key, np.ndarray]:
    """The experts' weights float32 [N, K] as the blobs of an output have them, all ranks joined."""
    parts: dict[Key, dict[int, np.ndarray]] = {}
    for path in sorted(out.glob("rank-*/*.safetensors")):
        for key, matrix in _of_blob(path):
            parts.setdefault(key, {})[len(parts.get(key, {}))] = matrix
    axis = {"gate": 0, "up": 0, "down": 1}
    return {
        key: np.concatenate([*pieces.values()], axis=axis[key[2]]) for key, pieces in parts.items()
    }


def _of_blob(path: Path) -> Iterator[tuple[Key, np.ndarray]]:
    _, info = read_blob(path)
    sharding, layer = info.sharding, int(path.stem[-5:])
    q = sharding.read_quantization(path)
    layout = layout_named(sharding.layout)(q)
    stored = {stacked_by_name(name): t for name, t in load(path).items()}
    assert set(stored) == set(stacked_tensors(q))
    kinds = {"I32": np.int32, "BF16": np.uint16, "F16": np.uint16, "F32": np.uint32, "U8": np.uint8}
    arrays = {
        (s.matrix, s.role): np.frombuffer(t.data, kinds[t.dtype]).reshape(t.shape)
        for s, t in stored.items()
    }
    count = arrays["w13", "code"].shape[0]
    first = sharding.rank // (sharding.tp // sharding.ep) * count
    for local in range(count):
        for matrix, projections in (("w13", ("gate", "up")), ("w2", ("down",))):
            plain = {
                role: layout.unpack(role, np.ascontiguousarray(arrays[matrix, role][local]))
                for role in q.roles
            }
            scales = plain["scale"]
            if q.scheme == "int":
                scales = widened(scales, sharding.quantization["scale_dtype"])
            codes = integers(q, plain["code"], plain.get("zero_point"))
            values = dequantize(codes, factors(q, scales))
            for name, part in zip(projections, np.split(values, len(projections)), strict=True):
                yield (layer, first + local, name), part
