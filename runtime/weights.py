"""The blobs as arrays: mapped, so that memory grows with what is used, not with the model, and
compared with their digests at first use, so that damage never becomes a token."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.blob import COMMON_FOLDER, digest, rank_folder, read_blob
from kconvert.layouts.errors import (
    ChangedFileError,
    CheckpointError,
    KconvertError,
    UnfinishedOutputError,
    UnsupportedError,
)
from kconvert.layouts.experts import STACKED
from kconvert.layouts.fields import CONFIG_NAME
from kconvert.layouts.header import TensorEntry
from kconvert.layouts.layout import Layout
from kconvert.layouts.manifest import Manifest, read_manifest
from kconvert.layouts.model import VISION
from kconvert.layouts.quantization import Quantization
from kconvert.layouts.registry import layout_named
from kconvert.layouts.sharding import Parallelism, rank_experts
from kconvert.runtime import tokenizer
from kconvert.runtime.config import GENERATION_NAME
from kconvert.runtime.distributed import Ranks

NUMPY = {
    "BF16": np.uint16,
    "F32": np.float32,
    "I32": np.int32,
    "U8": np.uint8,
    "F8_E8M0": np.uint8,
}
_FLOATS, _WORDS, _BYTES = ("BF16", "F32"), ("I32",), ("U8", "F8_E8M0")
# Parameters that a forward pass reads → the dtypes it can read.
_DTYPES = {"weight": _FLOATS, "e_score_correction_bias": _FLOATS} | {
    tensor.name: _WORDS if tensor.role == "code" else _FLOATS for tensor in STACKED
}
# The same for experts in MXFP4.
_MXFP4_DTYPES = _DTYPES | {tensor.name: _BYTES for tensor in STACKED if tensor.role == "scale"}
_SMALL_FILES = (
    CONFIG_NAME, GENERATION_NAME,
    tokenizer.RANKS_NAME, tokenizer.CONFIG_NAME, tokenizer.TEMPLATE_NAME,
)  # fmt: skip
_VISION_BLOB = f"{COMMON_FOLDER}/{VISION}.safetensors"
MODEL_PREFIXES = ("language_model.", "")
# Common tensors of which a rank keeps only its part.
_CUT = {
    "embed_tokens", "lm_head", "q_proj", "q_b_proj", "kv_b_proj", "o_proj", "gate_proj", "up_proj",
    "down_proj",
}  # fmt: skip


class StoredTensor(NamedTuple):
    """A tensor in the mapped file `data`; `digests`: its own, or each expert's if it is stacked."""

    path: Path
    data: NDArray[np.uint8]
    entry: TensorEntry
    digests: list[str]


class Blobs:
    """One rank's view of a converted model: its own experts, and every common tensor."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        """Map this rank's blobs in `folder`. Their headers, and the small files that generating
        reads, are compared with the manifest; no tensor's data is read.

        Raises UnfinishedOutputError if `folder` is not an output or only a part of one,
        UnsupportedError if it is for another number of ranks or holds a dtype that the engine does
        not compute with, CheckpointError naming a file that is missing or was changed.
        """
        self.manifest: Manifest = read_manifest(folder)
        if not self.manifest.complete:
            raise UnfinishedOutputError(
                f"{folder} holds a part of the model: run `kconvert convert` without --layers and"
                " --ranks to complete it."
            )
        tp = self.manifest.tp
        if ranks.size != tp:
            raise UnsupportedError(
                f"{folder} was converted for {tp} rank(s), {ranks.size} were started: start {tp}"
                f" (torchrun --nproc-per-node {tp}), or reshard it to --tp {ranks.size}."
            )
        self.rank = ranks.rank
        self.layout: Layout | None = None  # of the experts, as their blobs say
        self._folder = folder
        self._tensors: dict[str, StoredTensor] = {}
        self._sound: set[tuple[str, int]] = set()  # tensors' parts whose digests were right
        self._columns: dict[str, NDArray[Any]] = {}
        for name, entry in self.manifest.files.items():
            if name in _SMALL_FILES and digest(self._sized(name).read_bytes()) != entry.digest:
                raise _changed(f"{folder / name} is not what was converted")
            if name.startswith((f"{COMMON_FOLDER}/", f"{rank_folder(ranks.rank, tp)}/")):
                self._map(name)
        prefixes = [p for p in MODEL_PREFIXES if f"{p}model.norm.weight" in self._tensors]
        if not prefixes:
            raise CheckpointError(f"{folder} has no model.norm.weight: it is no text model.")
        self.prefix = prefixes[0]

    def _map(self, name: str) -> None:
        path = self._sized(name)
        try:
            header, info = read_blob(path)
        except KconvertError:  # its advice is for a source
            raise _changed(f"{path} has a damaged header") from None
        if digest(header.raw) != self.manifest.files[name].digest:
            raise _changed(f"{path} has another header than was written")
        if name == _VISION_BLOB:
            return
        allowed = _DTYPES
        if info.sharding is not None:
            quantization = info.sharding.read_quantization(path)
            _refuse_other(path, quantization)
            self.layout = layout_named(info.sharding.layout)(quantization)
            allowed = _DTYPES if quantization.scheme == "int" else _MXFP4_DTYPES
        data = np.memmap(path, np.uint8, "r").view(np.ndarray)
        for tensor in header.tensors.values():
            dtypes = allowed.get(tensor.name.rpartition(".")[2])
            if dtypes is not None and tensor.dtype not in dtypes:
                raise UnsupportedError(
                    f"{path}, tensor {tensor.name}: {tensor.dtype} found, the engine computes with"
                    f" {' or '.join(dtypes)}: convert a checkpoint that has this dtype."
                )
            digests = info.expert_digests.get(tensor.name) or [info.digests[tensor.name]]
            self._tensors[tensor.name] = StoredTensor(path, data, tensor, digests)

    def _sized(self, name: str) -> Path:
        """The path of a file that is there and has the manifest's size."""
        path = self._folder / name
        if not path.is_file() or path.stat().st_size != self.manifest.files[name].bytes:
            raise _changed(f"{path} is missing or was changed")
        return path

    def get(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """The tensor `name` (without `language_model.`), bf16 as uint16. Its data is compared with
        its digest at the first call.

        Raises CheckpointError if it is absent, has another shape or was changed.
        """
        tensor = self.find(name, shape)
        return self._read(tensor, range(len(tensor.digests))).reshape(shape)

    def columns(self, name: str, shape: tuple[int, int], part: range) -> NDArray[Any]:
        """Some columns of a matrix: a copy, made once, unless they are all of them. Raises as
        `get`."""
        if len(part) == shape[1]:
            return self.get(name, shape)
        if name not in self._columns:
            cut = self.get(name, shape)[:, part.start : part.stop]
            self._columns[name] = np.ascontiguousarray(cut)
        return self._columns[name]

    def expert(self, name: str, local: int) -> NDArray[Any]:
        """The rank's expert number `local` of a layer's stacked tensor, in the layout's shape. No
        other expert is read. Raises as `get`."""
        tensor = self.find(name)
        return self._read(tensor, range(local, local + 1)).reshape(tensor.entry.shape[1:])

    def dtypes(self, ending: str) -> set[str]:
        """The dtypes of the tensors whose names end with `ending`."""
        return {t.entry.dtype for name, t in self._tensors.items() if name.endswith(ending)}

    def kept_bytes(self) -> int:
        """Bytes of all tensors that this rank keeps if it copies them, without a tied head."""
        total, size = 0, self.manifest.tp
        for name, tensor in self._tensors.items():
            cut = name.split(".")[-2] in _CUT
            total += tensor.entry.nbytes // (size if cut else 1)
        return total

    def stack(self, name: str) -> NDArray[Any]:
        """All of the rank's experts in a layer's stacked tensor, in its own shape. Raises as
        `get`."""
        tensor = self.find(name)
        return self._read(tensor, range(len(tensor.digests))).reshape(tensor.entry.shape)

    def find(self, name: str, shape: tuple[int, ...] | None = None) -> StoredTensor:
        """Where the tensor `name` lies. Raises CheckpointError if there is none, or if it has
        another shape."""
        full = self.prefix + name
        if full not in self._tensors:
            raise CheckpointError(
                f"{self._folder}: tensor {full} is in no blob of rank {self.rank}, and"
                f" {CONFIG_NAME} asks for it."
            )
        tensor = self._tensors[full]
        if shape is not None and tensor.entry.shape != shape:
            raise CheckpointError(
                f"{tensor.path}, tensor {full}: expected {list(shape)} from {CONFIG_NAME}, found"
                f" {list(tensor.entry.shape)}."
            )
        return tensor

    def _read(self, tensor: StoredTensor, parts: range) -> NDArray[Any]:
        """Some of the parts that have a digest each, as a flat array; each is hashed once, where it
        is mapped."""
        path, data, entry, digests = tensor
        size = entry.nbytes // len(digests)
        for part in parts:
            if (entry.name, part) in self._sound:
                continue
            start = entry.start + size * part
            if digest(data[start : start + size].data) != digests[part]:
                which = f", expert {self._number(tensor, part)}" if len(entry.shape) == 3 else ""
                raise _changed(
                    f"{path}, tensor {entry.name}{which}: its data is not what was converted"
                )
            self._sound.add((entry.name, part))
        raw = data[entry.start + size * parts.start : entry.start + size * parts.stop]
        return raw.view(NUMPY[entry.dtype])

    def _number(self, tensor: StoredTensor, local: int) -> int:
        """The model's number of the rank's expert `local`."""
        split = Parallelism(self.manifest.tp, self.manifest.ep)
        return rank_experts(split.ep * tensor.entry.shape[0], split, self.rank)[local]


def _refuse_other(path: Path, quantization: Quantization) -> None:
    """Raise UnsupportedError for experts that no backend computes with."""
    if (quantization.bits, quantization.zero_point, quantization.bias) != (4, False, False):
        raise UnsupportedError(
            f"{path}: the experts are {quantization.text}, the engine runs symmetric INT4 and"
            " MXFP4."
        )


def _changed(what: str) -> ChangedFileError:
    return ChangedFileError(
        f"{what}: delete the file and run the same `kconvert convert` command again (`kconvert"
        " validate` lists all that is changed)."
    )
