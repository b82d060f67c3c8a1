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
from kconvert.layouts.experts import Part, stacked_by_name
from kconvert.layouts.formats.compressed_tensors import unpack_codes
from kconvert.layouts.header import TensorEntry
from kconvert.layouts.layout import Layout
from kconvert.layouts.model import Expert
from kconvert.layouts.quantization import Role
from kconvert.layouts.reader import CHUNK_BYTES, NUMPY_BITS, Reader, Scratch
from kconvert.layouts.scan import scan_scales
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
        blobs: Reader,
        shards: Reader,
        scratch: Scratch,
    ) -> None:
        self._layout, self._blobs, self._shards, self._scratch = layout, blobs, shards, scratch
        matrices = {} if expert is None else expert._asdict()
        self._source = {
            (projection, role): self._read(shards, f"{projection} {role}", getattr(matrix, role))
            for projection, matrix in matrices.items()
            for role in ("code", "scale")
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
            got = self._layout.unpack(role, stored)
            if not np.array_equal(got, want):
                yield Finding(blob.path, _difference(got, want, role), name, index)

    def _wanted(self, role: Role, part: Part) -> NDArray[Any]:
        """The source's rows and columns, in its own order."""
        columns = part.columns
        if role == "code":
            stored = range(columns.start // 8, columns.stop // 8)
        else:
            stored = self._layout.quantization.groups(columns)
        source = self._source[part.projection, role]
        return source[part.rows.start : part.rows.stop, stored.start : stored.stop]

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


def _difference(got: NDArray[Any], want: NDArray[Any], role: Role) -> str:
    """The first place where two matrices differ, and how many do."""
    if role == "code":
        got, want = unpack_codes(got), unpack_codes(want)
    places = np.argwhere(got != want)
    row, column = places[0]
    what = role + (" differs" if len(places) == 1 else "s differ")
    return (
        f"{len(places):,} {what} from the source; first at row {row}, column {column}:"
        f" {want[row, column]} expected, {got[row, column]} found"
        f"{'' if role == 'code' else ' (bits)'}"
    )
