"""Checkpoints for tests: read one into memory, change it, write it as other software would."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kconvert.layouts import blob
from kconvert.layouts.header import read_header
from kconvert.layouts.manifest import encode_manifest, read_manifest

DATA = Path(__file__).parent / "data"
KIMI_MINI = DATA / "kimi-mini"
SHARD = "model-00002-of-000006.safetensors"  # layer 1, the first with experts
LAYER1 = "language_model.model.layers.1."
EXPERT0 = f"{LAYER1}mlp.experts.0."


class Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def copy_mini(folder: Path) -> Path:
    """A kimi-mini of one's own, to be changed."""
    shutil.copytree(KIMI_MINI, folder)
    return folder


def load(path: Path) -> dict[str, Tensor]:
    header, raw = read_header(path), path.read_bytes()
    return {
        name: Tensor(t.dtype, t.shape, raw[t.start : t.start + t.nbytes])
        for name, t in header.tensors.items()
    }


def header_json(tensors: dict[str, Tensor]) -> dict[str, dict]:
    table, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + len(tensor.data)
        table[name] = {
            "dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end],
        }  # fmt: skip
        offset = end
    return table


def write(path: Path, tensors: dict[str, Tensor], *, metadata=..., pad: int = 0, raw: bytes = b""):
    """Write tensors in the given order; `pad` spaces behind the header; `raw` as the header."""
    table = header_json(tensors)
    if metadata is not ...:
        table = {"__metadata__": metadata, **table}
    text = raw or json.dumps(table, separators=(",", ":")).encode() + b" " * pad
    data = b"".join(tensor.data for tensor in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def change_json(path: Path, change) -> None:
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))


def tree(folder: Path) -> dict[str, bytes]:
    """Every file's bytes, but for the work folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".kconvert" not in path.parts
    }


def forge(out: Path, name: str) -> None:
    """Make headers and manifest agree with changed data, as a converter with a bug would."""
    header, info = blob.read_blob(out / name)
    raw = (out / name).read_bytes()
    digests, experts = {}, {}
    for tensor in header.tensors.values():
        data = raw[tensor.start : tensor.start + tensor.nbytes]
        digests[tensor.name] = blob.digest(data)
        if tensor.name in info.expert_digests:
            count = tensor.shape[0]
            size = len(data) // count
            parts = [blob.digest(data[i * size : (i + 1) * size]) for i in range(count)]
            experts[tensor.name] = parts
            digests[tensor.name] = blob.digest_of_experts(parts)
    tensors = [
        blob.BlobTensor(t.name, t.dtype, t.shape, t.start - header.data_start, t.nbytes)
        for t in header.tensors.values()
    ]
    new = blob.encode_header(tensors, replace(info, digests=digests, expert_digests=experts))
    assert len(new) == header.data_start
    (out / name).write_bytes(new + raw[header.data_start :])
    manifest = read_manifest(out)
    files = {**manifest.files, name: replace(manifest.files[name], digest=blob.digest(new))}
    (out / "kconvert.json").write_bytes(encode_manifest(replace(manifest, files=files)))


def published(output: Path) -> list[Path]:
    """Files with a final name."""
    return [p for p in output.rglob("*") if p.is_file() and p.parent.name != ".kconvert"]


def marlin_formula(packed: np.ndarray) -> np.ndarray:
    """word(k, n) and nibble(k, n) as the facts state them, one code at a time."""
    rows, columns = packed.shape[0], 8 * packed.shape[1]
    n, k = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    code = packed.view(np.uint32)[n, k // 8] >> (4 * (k % 8)).astype(np.uint32) & 15
    word = k // 16 * 2 * rows + 128 * (n // 64) + 16 * (n % 8) + 4 * (k % 8 // 2) + n // 16 % 4
    nibble = k // 8 % 2 + 2 * (n // 8 % 2) + 4 * (k % 2)
    out = np.zeros(rows * columns // 8, np.uint32)
    np.bitwise_or.at(out, word, code << (4 * nibble).astype(np.uint32))
    return out.view(np.int32).reshape(columns // 16, 2 * rows)


def flip(path: Path, name: str, expert: int | None = None) -> str:
    """Change one bit of a tensor or of a local expert in the middle; the tensor's whole name."""
    header, _ = blob.read_blob(path)
    full = next(full for full in header.tensors if full.endswith(name))
    tensor = header.tensors[full]
    size = tensor.nbytes // (tensor.shape[0] if expert is not None else 1)
    flip_byte(path, tensor.start + size * (expert or 0) + size // 2)
    return full


def flip_byte(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def torchrun(ranks: int, arguments: list[str | Path]) -> str:
    """The output of a command that runs as so many ranks."""
    tests = Path(__file__).parent
    environment = {
        **os.environ, "PYTHONPATH": f"{tests}:{tests / 'runtime'}", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    outcome = subprocess.run(
        [sys.executable, *launcher, *rendezvous, *arguments],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    return outcome.stdout
