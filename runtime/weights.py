"""The blobs as arrays: mapped, so that memory grows with what is touched, not with the model."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.blob import COMMON_FOLDER, rank_folder, read_blob
from kconvert.layouts.errors import CheckpointError, UnsupportedError
from kconvert.layouts.header import TensorEntry
from kconvert.layouts.manifest import Manifest, read_manifest
from kconvert.layouts.registry import layout_named
from kconvert.runtime.ranks import Ranks

_NUMPY = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32, "I32": np.int32, "I64": np.int64}
MODEL_PREFIXES = ("language_model.", "")


class Blobs:
    """One rank's view of a converted model: its own experts, and every common tensor."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        """Map this rank's blobs in `folder`.

        Raises OutputError where that is no finished output, UnsupportedError where it is a part,
        CheckpointError naming a blob that is missing or was changed.
        """
        self.manifest: Manifest = read_manifest(folder)
        if not self.manifest.complete:
            raise UnsupportedError(
                f"{folder} holds a part of the model: run `kconvert convert` without --layers and"
                " --ranks to complete it."
            )
        tp = self.manifest.tp
        if ranks.size != tp:
            raise UnsupportedError(
                f"{folder} was converted for {tp} rank(s), {ranks.size} were started: start {tp}"
                f" (torchrun --nproc-per-node {tp}), or convert with --tp {ranks.size}."
            )
        self.rank = ranks.rank
        self.layout = layout_named(self.manifest.layout)
        self._tensors: dict[str, tuple[NDArray[np.uint8], TensorEntry]] = {}
        self._columns: dict[str, NDArray[Any]] = {}
        for name, entry in self.manifest.files.items():
            if name.startswith((f"{COMMON_FOLDER}/", f"{rank_folder(ranks.rank, tp)}/")):
                self._map(folder, name, entry.bytes)
        found = [p for p in MODEL_PREFIXES if f"{p}model.norm.weight" in self._tensors]
        if not found:
            raise CheckpointError(f"{folder} has no model.norm.weight: it is no text model.")
        self.prefix = found[0]

    def _map(self, folder: Path, name: str, size: int) -> None:
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            raise CheckpointError(f"{path} is missing or was changed: run `kconvert validate`.")
        header, info = read_blob(path)
        if info.fingerprint != self.manifest.files[name].fingerprint:
            raise CheckpointError(f"{path} was changed: its fingerprint is not the manifest's.")
        data = np.memmap(path, np.uint8, "r")
        for tensor in header.tensors.values():
            self._tensors[tensor.name] = data, tensor

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self._tensors

    def get(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """The tensor `name` (without `language_model.`), bf16 as uint16; CheckpointError where it
        is absent or has another shape."""
        full = self.prefix + name
        if full not in self._tensors:
            raise CheckpointError(f"tensor {full} is in no blob of rank {self.rank}.")
        data, tensor = self._tensors[full]
        if tensor.shape != shape:
            raise CheckpointError(
                f"tensor {full}: expected {list(shape)} from config.json, found"
                f" {list(tensor.shape)}."
            )
        raw = data[tensor.start : tensor.start + tensor.nbytes]
        return raw.view(_NUMPY[tensor.dtype]).reshape(shape)

    def columns(self, name: str, shape: tuple[int, int], part: range) -> NDArray[Any]:
        """Some columns of a matrix; a copy of them, made once, unless they are all."""
        if len(part) == shape[1]:
            return self.get(name, shape)
        if name not in self._columns:
            cut = self.get(name, shape)[:, part.start : part.stop]
            self._columns[name] = np.ascontiguousarray(cut)
        return self._columns[name]

    def stacked(self, name: str) -> NDArray[Any]:
        """A layer's stacked tensor, expert first; its shape is the layout's."""
        _, tensor = self._tensors[self.prefix + name]
        return self.get(name, tensor.shape)
