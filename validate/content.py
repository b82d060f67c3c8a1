"""Checks that read the blobs' data, each byte once: digests, and equality with the source.

A rank's experts are unpacked by the layout's inverse, which shares no index arithmetic with the
packing, and compared with the source's own bytes, code for code and scale for scale.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.blob import digest, new_digest
from kconvert.layouts.checkpoint import SourceTensor
from kconvert.layouts.experts import PROJECTIONS, Part, stacked_by_name
from kconvert.layouts.formats.format import Expert, Format
from kconvert.layouts.header import TensorEntry
from kconvert.layouts.layout import Layout
from kconvert.layouts.quantization import Role, unpack_words, unpack_zero_points
from kconvert.layouts.reader import CHUNK_BYTES, NUMPY_BITS, Reader, Scratch
from kconvert.layouts.scan import cast_to_bf16, scan_scales
from kconvert.layouts.sharding import RankSlice
from kconvert.validate.findings import Finding
from kconvert.validate.structure import Blob


def in_blob(path: str, tensor: TensorEntry) -> SourceTensor:
    """A blob's tensor as something a Reader reads."""
    return SourceTensor(tensor.name, tensor.dtype, tensor.shape, path, tensor.start, tensor.nbytes)


def check_whole(
    blob: Blob,
    name: str,
    blobs: Reader,
    shards: Reader,
    scratch: Scratch,
    source: SourceTensor | None,
) -> Iterator[Finding]:
    """A tensor that is not stacked: its digest, and the same bytes and kind as in the source."""
    tensor = in_blob(blob.path, blob.header.tensors[name])
    found = _digest(blobs, tensor, scratch)
    if found != blob.info.digests[name]:
        yield Finding(blob.path, "its bytes were changed: the digest disagrees", name)
    if source is None:
        return
    if (source.dtype, source.shape) != (tensor.dtype, tensor.shape):
        yield Finding(
            blob.path,
            f"{tensor.dtype} {list(tensor.shape)} found,"
            f" {source.dtype} {list(source.shape)} in the source",
            name,
        )
    elif found != _digest(shards, source, scratch):
        yield Finding(blob.path, "its bytes are not the source's", name)


def _digest(reader: Reader, tensor: SourceTensor, scratch: Scratch) -> str:
    state = new_digest()
    for chunk in reader.chunks(tensor, scratch.take("chunk", (CHUNK_BYTES,), np.uint8)):
        state.update(chunk)
    return state.hexdigest()


class ExpertCheck:
    """Compares the parts of one expert that ranks hold with the source's (None: digests only)."""

    def __init__(
        self,
        expert: Expert | None,
        layout: Layout,
        format: Format,
        blobs: Reader,
        shards: Reader,
        scratch: Scratch,
    ) -> None:
        self._layout, self._blobs, self._shards, self._scratch = layout, blobs, shards, scratch
        self._scale_dtype = "" if expert is None else expert.gate.scale.dtype
        stored = {
            tensor: self._read(shards, f"source {i}", tensor)
            for i, tensor in enumerate(() if expert is None else expert.kept)
        }
        self._source = {
            (projection, role): format.plain(projection, role, tensor, stored[tensor], scratch.take)
            for projection, matrix in zip(PROJECTIONS, expert or (), strict=expert is not None)
            for role, tensor in matrix.by_role.items()
        }
        self.codes = [array for (_, role), array in self._source.items() if role == "code"]

    def check(self, blob: Blob, part: RankSlice, index: int, hidden: int) -> Iterator[Finding]:
        """One rank's part of expert `index`: each stacked tensor's digest, then codes and scales
        against the source's rows and columns."""
        local = part.experts.index(index)
        for name, tensor in blob.header.tensors.items():
            cut = stacked_by_name(name).cut(part.rows, hidden)
            stored = self._read(self._blobs, "stored", in_blob(blob.path, tensor).part(local))
            if digest(memoryview(stored).cast("B")) != blob.info.expert_digests[name][local]:
                text = "its bytes were changed: the digest disagrees"
                yield Finding(blob.path, text, name, index)
            role = cut.tensor.role
            if role == "scale":
                yield from _not_finite(blob.path, stored, tensor.dtype, name, index)
            if not self._source:
                continue
            want = np.concatenate([self._wanted(role, source) for source in cut.parts])
            if role == "scale" and tensor.dtype != self._scale_dtype:
                want = self._cast(want, blob)
            got = self._layout.unpack(role, stored)
            if got.dtype != want.dtype:
                text = f"its scales are {tensor.dtype}, the source's {self._scale_dtype}"
                yield Finding(blob.path, text, name, index)
            elif not np.array_equal(got, want):
                text = _difference(got, want, role, self._layout.quantization.bits)
                yield Finding(blob.path, text, name, index)

    def _wanted(self, role: Role, part: Part) -> NDArray[Any]:
        """The source's rows and columns, in plain order."""
        source = self._source[part.projection, role]
        return self._layout.quantization.part(role, source, part.rows, part.columns)

    def _cast(self, scales: NDArray[Any], blob: Blob) -> NDArray[Any]:
        """The scales as `convert --scale-dtype bfloat16` makes them, where the blob says so."""
        assert blob.info.sharding is not None
        if self._scale_dtype not in blob.info.sharding.dropped.values():
            return scales
        out = np.empty(scales.shape, np.uint16)
        cast_to_bf16(scales, self._scale_dtype, out)
        return out

    def _read(self, reader: Reader, purpose: str, tensor: SourceTensor) -> NDArray[Any]:
        array = self._scratch.take(purpose, tensor.shape, NUMPY_BITS[tensor.dtype])
        reader.read_into(tensor, array)
        return array


def _not_finite(
    path: str, scales: NDArray[Any], dtype: str, name: str, index: int
) -> Iterator[Finding]:
    first = scan_scales(scales, dtype).not_finite
    if first is not None:
        yield Finding(path, f"a scale is not finite, the first stored at {[*first]}", name, index)


def _difference(got: NDArray[Any], want: NDArray[Any], role: Role, bits: int) -> str:
    """The first place where two matrices differ, and how many do."""
    if role == "code":
        got, want = unpack_words(got, bits), unpack_words(want, bits)
    elif role == "zero_point":
        got, want = unpack_zero_points(got), unpack_zero_points(want)
    places = np.argwhere(got != want)
    place = tuple(places[0])
    what = role.replace("_", " ") + (" differs" if len(places) == 1 else "s differ")
    where = f"row {place[0]}" + (f", column {place[1]}" if len(place) > 1 else "")
    return (
        f"{len(places):,} {what} from the source; first at {where}:"
        f" {want[place]} expected, {got[place]} found"
        f"{'' if role in ('code', 'zero_point') else ' (bits)'}"
    )
