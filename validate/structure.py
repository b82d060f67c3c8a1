"""Checks that read headers and small files alone: is everything there, and what it should be?"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from kconvert.layouts import blob
from kconvert.layouts.blob import BlobInfo
from kconvert.layouts.checkpoint import INDEX_NAME
from kconvert.layouts.errors import CheckpointError, OutputError
from kconvert.layouts.formats.compressed_tensors import SCALE_DTYPES
from kconvert.layouts.header import Header
from kconvert.layouts.manifest import MANIFEST_NAME, WORK_FOLDER, FileEntry, Manifest
from kconvert.layouts.model import OUTER, layer_name
from kconvert.layouts.registry import layout_named
from kconvert.layouts.sharding import ModelDims, Parallelism, rank_slice, stacked_names
from kconvert.validate.findings import Finding

_MOST_MISSING = 1000  # a damaged config.json can ask for millions


class Blob(NamedTuple):
    """A blob of the output whose header was read."""

    path: str  # under the output
    header: Header
    info: BlobInfo


def check_files(output: Path, manifest: Manifest) -> Iterator[Finding]:
    """Every file of the manifest is there with its size, small files with their digest too; and
    no other weights are, unless a run has published them and was interrupted."""
    for name, entry in manifest.files.items():
        path = output / name
        if not path.is_file():
            yield Finding(name, "is missing")
        elif (size := path.stat().st_size) != entry.bytes:
            yield Finding(name, f"has {size:,} bytes, {entry.bytes:,} expected")
        elif entry.fingerprint is None and blob.digest(path.read_bytes()) != entry.digest:
            yield Finding(name, "was changed: its digest is not the manifest's")
    for path in sorted(output.rglob("*.safetensors")):
        name = path.relative_to(output).as_posix()
        if name not in manifest.files and WORK_FOLDER not in path.parts:
            yield Finding(
                name,
                f"is not in {MANIFEST_NAME}: where a run was interrupted, run it again to finish",
            )
    if (output / INDEX_NAME).exists():
        yield Finding(INDEX_NAME, "lies at the root: other engines would load this folder wrongly")


def check_complete(manifest: Manifest, dims: ModelDims) -> Iterator[Finding]:
    """A complete output has the blobs of every layer and rank of its config.json, and outer.

    The converter's word is not taken for it: what must be there follows from the config alone.
    """
    if not manifest.complete:
        return
    missing = (name for name in _expected(manifest, dims) if name not in manifest.files)
    for name in islice(missing, _MOST_MISSING):
        yield Finding(name, f"is not in {MANIFEST_NAME}, which says that it is complete")


def _expected(manifest: Manifest, dims: ModelDims) -> Iterator[str]:
    layers = [layer_name(layer) for layer in range(dims.layers)]
    for name in [*layers, OUTER]:
        yield f"{blob.COMMON_FOLDER}/{name}.safetensors"
    for rank in range(manifest.tp):
        folder = blob.rank_folder(rank, manifest.tp)
        for name in layers[dims.first_moe :]:
            yield f"{folder}/{name}.safetensors"


def read_blobs(output: Path, manifest: Manifest) -> tuple[list[Blob], list[Finding]]:
    """The headers of all blobs that can be read, and what is wrong with the others."""
    blobs, findings = [], []
    for name, entry in manifest.files.items():
        if entry.fingerprint is None or not (output / name).is_file():
            continue
        try:
            header, info = blob.read_blob(output / name)
        except (CheckpointError, OutputError) as error:
            findings.append(Finding(name, str(error)))
            continue
        blobs.append(Blob(name, header, info))
    return blobs, findings


def check_headers(manifest: Manifest, blobs: list[Blob], dims: ModelDims) -> Iterator[Finding]:
    """Headers are the manifest's, agree with it and with themselves, and hold the right shapes."""
    for one in blobs:
        yield from _check_header(one, manifest.files[one.path], manifest, dims)


def _check_header(
    one: Blob, entry: FileEntry, manifest: Manifest, dims: ModelDims
) -> Iterator[Finding]:
    info = one.info
    if blob.digest(one.header.raw) != entry.digest or info.fingerprint != entry.fingerprint:
        yield Finding(one.path, "its header is not the one in the manifest")
        return
    if (info.layout, info.tp, info.ep) != (manifest.layout, manifest.tp, manifest.ep):
        yield Finding(one.path, f"is for {info.layout} tp {info.tp} ep {info.ep}")
    if one.header.data_start % blob.PAGE:
        yield Finding(one.path, f"its data starts at byte {one.header.data_start}, not on a page")
    if info.digests.keys() != one.header.tensors.keys():
        yield Finding(one.path, "its digests are not those of its tensors")
    for name, digests in info.expert_digests.items():
        if blob.digest_of_experts(digests) != info.digests.get(name):
            yield Finding(one.path, "its digest is not that of its experts' digests", name)
    if info.rank is None:
        return
    folder = blob.rank_folder(info.rank, info.tp)
    if one.path.split("/")[0] != folder:
        yield Finding(one.path, f"says that it belongs to {folder}")
    expected = _stacked_shapes(manifest, dims, info.rank)
    found = {name.rpartition(".")[2]: t.shape for name, t in one.header.tensors.items()}
    if found != expected:
        yield Finding(one.path, f"has the tensors {found}, expected {expected}")
        return
    prefix = next(iter(one.header.tensors)).rpartition(".")[0] + "."
    if set(one.header.tensors) != set(stacked_names(prefix)):
        yield Finding(one.path, f"its four tensors are not of one layer: {[*one.header.tensors]}")
    for name, tensor in one.header.tensors.items():
        allowed = ("I32",) if name.endswith("_packed") else SCALE_DTYPES
        if tensor.dtype not in allowed:
            yield Finding(one.path, f"{tensor.dtype} found, {' or '.join(allowed)} expected", name)
        if len(info.expert_digests.get(name, ())) != tensor.shape[0]:
            yield Finding(
                one.path, f"has not one digest for each of {tensor.shape[0]} experts", name
            )


def _stacked_shapes(manifest: Manifest, dims: ModelDims, rank: int) -> dict[str, tuple[int, ...]]:
    """DESIGN.md's table of shapes, for one rank."""
    layout = layout_named(manifest.layout)
    experts, rows = rank_slice(dims, Parallelism(manifest.tp, manifest.ep), rank)
    groups = dims.quantization.groups
    local, n, k = len(experts), len(rows), dims.hidden
    return {
        "w13_weight_packed": (local, *layout.weight_shape(2 * n, k)),
        "w13_weight_scale": (local, *layout.scale_shape(2 * n, len(groups(range(k))))),
        "w2_weight_packed": (local, *layout.weight_shape(k, n)),
        "w2_weight_scale": (local, *layout.scale_shape(k, len(groups(rows)))),
    }
