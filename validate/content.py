"""Checks that read the blobs' data, each byte once: digests, and equality with the source.

A rank's experts are put back into plain order and compared with the source's own bytes, code for
code and scale for scale. The inverse is the layout's quick one; for one expert a layer, which is
witnessed, it is the inverse by formulas, which shares no index arithmetic with the packing.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.blob import digest, new_digest
from kconvert.layouts.checkpoint import SourceTensor
from kconvert.layouts.experts import PROJECTIONS, Cut, Matrix, Part, stacked, stacked_by_name
from kconvert.layouts.formats.format import Expert, Format
from kconvert.layouts.header import TensorEntry
from kconvert.layouts.layout import Layout
from kconvert.layouts.quantization import Role
from kconvert.layouts.reader import CHUNK_BYTES, NUMPY_BITS, Reader, Scratch
from kconvert.layouts.scan import cast_to_bf16, scan_scales
from kconvert.layouts.sharding import ModelDims, RankSlice
from kconvert.validate.difference import difference
from kconvert.validate.findings import ROLE_CHECKS, Finding, Tally
from kconvert.validate.product import products_agree, read_in_order
from kconvert.validate.statistics import ScaleSums, count_codes, sum_scales
from kconvert.validate.structure import Blob


class Done:
    """What one task found and looked at."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.tally = Tally()
        self.codes: list[tuple[int, NDArray[np.int64]]] = []  # expert, how often each code is there
        self.scales: list[tuple[int, ScaleSums]] = []
        self.stored = 0  # bytes of experts' parts

    def find(self, *findings: Finding) -> None:
        """They name their checks."""
        self.findings += findings

    @contextmanager
    def looking(self, check: str, nbytes: int) -> Iterator[None]:
        """One thing of so many bytes is looked at."""
        begin = time.perf_counter()
        yield
        self.tally.add(check, 1, nbytes, time.perf_counter() - begin)


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
    done: Done,
) -> None:
    """A tensor that is not stacked: its digest, and the same bytes and kind as in the source."""
    tensor = in_blob(blob.path, blob.header.tensors[name])
    with done.looking("digests", tensor.nbytes):
        found = _digest(blobs, tensor, scratch)
    if found != blob.info.digests[name]:
        text = "its bytes were changed: the digest disagrees"
        done.find(Finding(blob.path, text, name, check="digests"))
    if source is None:
        return
    with done.looking("common", 2 * tensor.nbytes):
        if (source.dtype, source.shape) != (tensor.dtype, tensor.shape):
            text = (
                f"{tensor.dtype} {list(tensor.shape)} found,"
                f" {source.dtype} {list(source.shape)} in the source"
            )
            done.find(Finding(blob.path, text, name, check="common"))
        elif found != _digest(shards, source, scratch):
            done.find(Finding(blob.path, "its bytes are not the source's", name, check="common"))


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
        dims: ModelDims,
        blobs: Reader,
        shards: Reader,
        scratch: Scratch,
    ) -> None:
        """Read the source's expert. Raises CheckpointError where what was dropped of it does not
        say what the rest does."""
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
        n, k = dims.intermediate, dims.hidden
        for projection, matrix in zip(PROJECTIONS, expert or (), strict=expert is not None):
            for tensor in matrix.dropped:
                shape = (k, n) if projection == "down" else (n, k)
                format.check_dropped(tensor, self._read(shards, "dropped", tensor), *shape)
        self.codes = [array for (_, role), array in self._source.items() if role == "code"]

    def check(
        self, blob: Blob, part: RankSlice, index: int, hidden: int, done: Done, witnessed: bool
    ) -> None:
        """One rank's part of expert `index`: each stacked tensor's digest, then codes and scales
        against the source's rows and columns; what they look like. For one that is `witnessed`, the
        inverse is by the layout's formulas, and what the kernels read is compared too."""
        local = part.experts.index(index)
        matrices: dict[Matrix, dict[Role, tuple[NDArray[Any], str]]] = {}
        for name, tensor in blob.header.tensors.items():
            cut = stacked_by_name(name).cut(part.rows, hidden)
            place, role = in_blob(blob.path, tensor).part(local), cut.tensor.role
            with done.looking("digests", place.nbytes):
                stored = self._read(self._blobs, f"stored {cut.tensor.name}", place)
                changed = digest(stored.data.cast("B"))
            if changed != blob.info.expert_digests[name][local]:
                text = "its bytes were changed: the digest disagrees"
                done.find(Finding(blob.path, text, name, index, "digests"))
            done.stored += place.nbytes
            matrices.setdefault(cut.tensor.matrix, {})[role] = stored, tensor.dtype
            if role == "scale":
                with done.looking("finite", place.nbytes):
                    sums = sum_scales(stored, tensor.dtype)
                done.scales.append((index, sums))
                if sums.not_finite:
                    done.find(_not_finite(blob.path, stored, tensor.dtype, name, index))
            elif role == "code":
                counts = count_codes(stored, self._layout.quantization.bits)
                done.codes.append((index, counts))
            if self._source:
                with done.looking(ROLE_CHECKS[role], 2 * place.nbytes):
                    inverse = self._layout.unpack if witnessed else self._layout.restore
                    got = inverse(role, stored)
                    found = self._against_source(blob, tensor, cut, got, index)
                done.find(*(finding._replace(check=ROLE_CHECKS[role]) for finding in found))
        if witnessed and read_in_order(self._layout):
            for matrix, stored_by_role in matrices.items():
                self._multiply(blob, matrix, stored_by_role, index, done)

    def _multiply(
        self,
        blob: Blob,
        matrix: Matrix,
        by_role: dict[Role, tuple[NDArray[Any], str]],
        index: int,
        done: Done,
    ) -> None:
        (codes, _), (scales, dtype) = by_role["code"], by_role["scale"]
        with done.looking("product", codes.nbytes + scales.nbytes):
            agree = products_agree(self._layout, codes, scales, dtype, index)
        if not agree:
            name = next(n for n in blob.header.tensors if n.endswith(stacked(matrix, "code").name))
            text = "the kernels' order gives another product than the layout's inverse"
            done.find(Finding(blob.path, text, name, index, "product"))

    def _against_source(
        self, blob: Blob, tensor: TensorEntry, cut: Cut, got: NDArray[Any], index: int
    ) -> list[Finding]:
        role = cut.tensor.role
        parts = [self._wanted(role, source) for source in cut.parts]
        if role == "scale" and tensor.dtype != self._scale_dtype:
            parts = [self._cast(part, blob) for part in parts]
        if got.dtype != parts[0].dtype:
            text = f"its scales are {tensor.dtype}, the source's {self._scale_dtype}"
            return [Finding(blob.path, text, tensor.name, index)]
        ends = np.cumsum([len(part) for part in parts[:-1]], dtype=np.intp)
        if all(map(np.array_equal, np.split(got, ends), parts)):
            return []
        want = np.concatenate(parts)
        at = Finding(blob.path, "", tensor.name, index)
        return [difference(got, want, role, self._layout.quantization, tensor.dtype, at)]

    def _wanted(self, role: Role, part: Part) -> NDArray[Any]:
        """The source's rows and columns, in plain order."""
        source = self._source[part.projection, role]
        return self._layout.quantization.part(role, source, part.rows, part.columns)

    def _cast(self, scales: NDArray[Any], blob: Blob) -> NDArray[Any]:
        """The scales as `convert --scale-dtype bfloat16` makes them, if the blob says so."""
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


def _not_finite(path: str, scales: NDArray[Any], dtype: str, name: str, index: int) -> Finding:
    first = scan_scales(scales, dtype).not_finite
    assert first is not None
    text = f"a scale is not finite, the first stored at {[*first]}"
    return Finding(path, text, name, index, "finite")
