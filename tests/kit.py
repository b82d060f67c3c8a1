"""Checkpoints for tests: read one into memory, change it, write it as other software would."""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

from kconvert.layouts.header import read_header

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
