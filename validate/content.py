"""Checks that read the blobs' data, each byte once: digests, and equality with the source.

A rank's experts are unpacked by the layout's inverse, which shares no index arithmetic with the
packing, and compared with the source's own bytes, code for code and scale for scale.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts import blob
from kconvert.layouts.checkpoint import SourceTensor
from kconvert.layouts.formats.compressed_tensors import QuantizedMatrix
from kconvert.layouts.header import TensorEntry
from kconvert.layouts.model import Expert
from kconvert.layouts.reader import CHUNK_BYTES, Reader, Scratch
from kconvert.layouts.registry import Layout
from kconvert.layouts.sharding import RankSlice
from kconvert.validate.findings import Finding
from kconvert.validate.structure import Blob

_NUMPY = {"I32": np.int32, "BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}


def in_blob(path: str, tensor: TensorEntry) -> SourceTensor:
    """A blob's tensor as something a Reader reads."""
    return SourceTensor(tensor.name, tensor.dtype, tensor.shape, path, tensor.start, tensor.nbytes)


def one_expert(tensor: SourceTensor, index: int) -> SourceTensor:
    """The part of a stacked tensor that is local expert `index`."""
    size = tensor.nbytes // tensor.shape[0]
    return tensor._replace(shape=tensor.shape[1:], start=tensor.start + index * size, nbytes=size)


def check_whole(
    one: Blob,
    name: str,
    blobs: Reader,
    shards: Reader,
    scratch: Scratch,
    source: SourceTensor | None,
) -> Iterator[Finding]:
    """A tensor that is not stacked: its digest, and the same bytes and kind as in the source."""
    tensor = in_blob(one.path, one.header.tensors[name])
    found = _digest(blobs, tensor, scratch)
    if found != one.info.digests[name]:
        yield Finding(one.path, "its bytes were changed: the digest disagrees", name)
    if source is None:
        return
    if (source.dtype, source.shape) != (tensor.dtype, tensor.shape):
        yield Finding(
            one.path,
            f"{tensor.dtype} {list(tensor.shape)} found,"
            f" {source.dtype} {list(source.shape)} in the source",
            name,
        )
    elif found != _digest(shards, source, scratch):
        yield Finding(one.path, "its bytes are not the source's", name)


def _digest(reader: Reader, tensor: SourceTensor, scratch: Scratch) -> str:
    state = blob.new_digest()
    for chunk in reader.chunks(tensor, scratch.take("chunk", (CHUNK_BYTES,), np.uint8)):
        state.update(chunk)
    return state.hexdigest()


class ExpertCheck:
    """Compares the parts of one expert that ranks hold with the source's (None: digests only)."""

    def __init__(
        self,
        expert: Expert | None,
        layout: Layout,
        blobs: Reader,
        shards: Reader,
        scratch: Scratch,
    ) -> None:
        self._layout, self._blobs, self._shards, self._scratch = layout, blobs, shards, scratch
        self.matrices = [self._load(i, matrix) for i, matrix in enumerate(expert or ())]

    def check(
        self, one: Blob, names: tuple[str, ...], index: int, held: RankSlice, groups: range
    ) -> Iterator[Finding]:
        """One rank's part: local digests of its four tensors, then codes and scales.

        `names` are the four tensors (`sharding.stacked_names`), `groups` the scale columns of
        down that the rank holds.
        """
        parts = []
        local = index - held.experts.start
        for i, name in enumerate(names):
            tensor = one_expert(in_blob(one.path, one.header.tensors[name]), local)
            part = self._read(self._blobs, f"part {i}", tensor)
            digest = blob.digest(memoryview(part).cast("B"))
            if digest != one.info.expert_digests[name][local]:
                yield Finding(one.path, "its bytes were changed: the digest disagrees", name, index)
            parts.append(part)
        if not self.matrices:
            return
        (gate, gate_scale), (up, up_scale), (down, down_scale) = self.matrices
        rows, words = held.rows, slice(held.rows.start // 8, held.rows.stop // 8)
        cut = slice(rows.start, rows.stop)
        expected = (
            np.concatenate([gate[cut], up[cut]]),
            np.concatenate([gate_scale[cut], up_scale[cut]]),
            down[:, words],
            down_scale[:, groups.start : groups.stop],
        )
        unpack = self._layout.unpack_weight, self._layout.unpermute_scales
        for i, (name, part, want) in enumerate(zip(names, parts, expected, strict=True)):
            got = unpack[i % 2](part)
            if not np.array_equal(got, want):
                yield Finding(one.path, _difference(got, want, packed=i % 2 == 0), name, index)

    def _load(self, i: int, matrix: QuantizedMatrix) -> tuple[NDArray[Any], NDArray[Any]]:
        packed = self._read(self._shards, f"packed {i}", matrix.packed)
        return packed, self._read(self._shards, f"scale {i}", matrix.scale)

    def _read(self, reader: Reader, role: str, tensor: SourceTensor) -> NDArray[Any]:
        array = self._scratch.take(role, tensor.shape, _NUMPY[tensor.dtype])
        reader.read_into(tensor, array)
        return array


def codes(packed: NDArray[np.int32]) -> NDArray[np.int8]:
    """int32 [N, K/8] → the signed codes int8 [N, K]: nibble − 8, low nibble first."""
    nibbles = packed.view(np.uint32)[:, :, None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
    return (nibbles.astype(np.int8) - 8).reshape(len(packed), -1)


def _difference(got: NDArray[Any], want: NDArray[Any], packed: bool) -> str:
    """The first place where two matrices differ, and how many do."""
    if packed:
        got, want = codes(got), codes(np.ascontiguousarray(want))
    places = np.argwhere(got != want)
    row, column = places[0]
    what = ("code" if packed else "scale") + (" differs" if len(places) == 1 else "s differ")
    return (
        f"{len(places):,} {what} from the source; first at row {row}, column {column}:"
        f" {want[row, column]} expected, {got[row, column]} found{'' if packed else ' (bits)'}"
    )
