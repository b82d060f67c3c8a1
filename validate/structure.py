"""Checks that read only headers and small files: is everything there, and as it should be?"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from kconvert.layouts.blob import (
    COMMON_FOLDER,
    PAGE,
    BlobInfo,
    Sharding,
    described,
    digest,
    digest_of_experts,
    rank_folder,
    read_blob,
)
from kconvert.layouts.checkpoint import INDEX_NAME
from kconvert.layouts.errors import CheckpointError, OutputError
from kconvert.layouts.experts import stacked_by_name, stacked_tensors
from kconvert.layouts.families.agreement import disagreements
from kconvert.layouts.families.family import Family
from kconvert.layouts.formats.format import SCALE_DTYPES
from kconvert.layouts.header import Header
from kconvert.layouts.manifest import MANIFEST_NAME, WORK_FOLDER, FileEntry, Manifest
from kconvert.layouts.model import OUTER, VISION, layer_name, layer_number, name_prefix
from kconvert.layouts.quantization import Quantization, Role
from kconvert.layouts.registry import layout_named
from kconvert.layouts.sharding import ModelDims, Parallelism, rank_slice
from kconvert.validate.findings import Finding

_MOST_MISSING = 1000  # a damaged config.json can ask for millions


class Blob(NamedTuple):
    """A blob of the output whose header was read."""

    path: str  # under the output
    header: Header
    info: BlobInfo

    @property
    def group(self) -> str:
        """The name of what it holds: a layer, `outer` or `vision`."""
        return Path(self.path).stem


def check_files(output: Path, manifest: Manifest) -> Iterator[Finding]:
    """Every file of the manifest is there with its size, and small files with their digest. No
    other weights are there, except what an interrupted run has published."""
    for name, entry in manifest.files.items():
        path = output / name
        if not path.is_file():
            yield Finding(name, "is missing")
        elif (size := path.stat().st_size) != entry.bytes:
            yield Finding(name, f"has {size:,} bytes, {entry.bytes:,} expected")
        elif entry.fingerprint is None and digest(path.read_bytes()) != entry.digest:
            yield Finding(name, "was changed: its digest is not the manifest's")
    for path in sorted(output.rglob("*.safetensors")):
        name = path.relative_to(output).as_posix()
        if name not in manifest.files and WORK_FOLDER not in path.parts:
            yield Finding(
                name,
                f"is not in {MANIFEST_NAME}: if a run was interrupted, run it again to finish",
                severity="warning",
            )
    if (output / INDEX_NAME).exists():
        yield Finding(INDEX_NAME, "lies at the root: other engines would load this folder wrongly")


def check_complete(manifest: Manifest, dims: ModelDims) -> Iterator[Finding]:
    """A complete output has the blobs of every layer and rank of its config.json, and outer.

    The manifest is not relied on: what must be there follows from the config alone.
    """
    if not manifest.complete:
        return
    missing = (name for name in _expected(manifest, dims) if name not in manifest.files)
    for name in islice(missing, _MOST_MISSING):
        yield Finding(name, f"is not in {MANIFEST_NAME}, which says that it is complete")


def _expected(manifest: Manifest, dims: ModelDims) -> Iterator[str]:
    layers = [layer_name(layer) for layer in range(dims.layers)]
    for name in [*layers, OUTER]:
        yield f"{COMMON_FOLDER}/{name}.safetensors"
    for rank in range(manifest.tp):
        folder = rank_folder(rank, manifest.tp)
        for layer, name in enumerate(layers):
            if dims.is_moe(layer):
                yield f"{folder}/{name}.safetensors"


def read_blobs(output: Path, manifest: Manifest) -> tuple[list[Blob], list[Finding]]:
    """The headers of all blobs that can be read, and what is wrong with the others."""
    blobs, findings = [], []
    for name, entry in manifest.files.items():
        if entry.fingerprint is None or not (output / name).is_file():
            continue
        try:
            header, info = read_blob(output / name)
        except (CheckpointError, OutputError) as error:
            # A finding names the file itself, and the advice is for a download.
            text = str(error).removeprefix(f"{output / name}").lstrip(", ")
            findings.append(
                Finding(name, text.removesuffix("; download it again.").removesuffix("."))
            )
            continue
        blobs.append(Blob(name, header, info))
    return blobs, findings


def check_headers(manifest: Manifest, blobs: list[Blob], dims: ModelDims) -> Iterator[Finding]:
    """Headers are the manifest's, agree with it and in themselves, and hold the right shapes."""
    for blob in blobs:
        yield from _check_header(blob, manifest.files[blob.path], manifest, dims)


def check_alignment(blobs: list[Blob]) -> Iterator[Finding]:
    """Data and every tensor of whole pages begin on a page: the runtime reads past the cache."""
    for blob in blobs:
        starts = {t.name: t.start for t in blob.header.tensors.values() if t.nbytes % PAGE == 0}
        if blob.header.data_start % PAGE:
            text = f"its data starts at byte {blob.header.data_start}, not on a page"
            yield Finding(blob.path, text, severity="warning")
        for name, start in starts.items():
            if start % PAGE:
                text = f"starts at byte {start:,}, not on a page"
                yield Finding(blob.path, text, name, severity="warning")


def check_provenance(manifest: Manifest, blobs: list[Blob]) -> Iterator[Finding]:
    """Every blob names the repository and commit that the manifest does."""
    for blob in blobs:
        info = blob.info
        if (info.repo, info.commit) != (manifest.repo, manifest.commit):
            found, expected = (
                f"{repo or 'a local folder'}{f' at {commit}' if commit else ''}"
                for repo, commit in ((info.repo, info.commit), (manifest.repo, manifest.commit))
            )
            text = f"says that it was made from {found}, the manifest {expected}"
            yield Finding(blob.path, text, severity="warning")


def check_common(blobs: list[Blob], family: Family) -> Iterator[Finding]:
    """Common blobs hold every tensor that config.json implies, as it says, and no other."""
    common = {blob.group: blob for blob in blobs if blob.info.sharding is None}
    prefix = name_prefix([name for blob in common.values() for name in blob.header.tensors])
    stacked = {b.group: next(iter(b.header.tensors), "") for b in blobs if b.info.sharding}
    for group, blob in common.items():
        if group != VISION:
            experts, tensors = stacked.get(group, ""), blob.header.tensors
            for wrong in disagreements(family, layer_number(group), prefix, tensors, experts):
                yield Finding(blob.path, wrong.text, wrong.tensor)


def _check_header(
    blob: Blob, entry: FileEntry, manifest: Manifest, dims: ModelDims
) -> Iterator[Finding]:
    info, path = blob.info, blob.path
    if digest(blob.header.raw) != entry.digest or info.fingerprint != entry.fingerprint:
        yield Finding(path, "its header is not the one in the manifest")
        return
    if info.digests.keys() != blob.header.tensors.keys():
        yield Finding(path, "its digests are not those of its tensors")
    for name, digests in info.expert_digests.items():
        if digest_of_experts(digests) != info.digests.get(name):
            yield Finding(path, "its digest is not that of its experts' digests", name)
    if info.sharding is not None:
        yield from _check_sharding(blob, info.sharding, manifest, dims)
    elif not path.startswith(f"{COMMON_FOLDER}/"):
        yield Finding(path, f"says that it belongs to {COMMON_FOLDER}")


def _check_sharding(
    blob: Blob, sharding: Sharding, manifest: Manifest, dims: ModelDims
) -> Iterator[Finding]:
    """A rank's blob is in its folder, says what manifest and config.json say, and holds the stacked
    tensors of one layer."""
    path, info = blob.path, blob.info
    here = (sharding.layout, sharding.tp, sharding.ep)
    if here != (manifest.layout, manifest.tp, manifest.ep):
        yield Finding(path, f"is for {here[0]} tp {here[1]} ep {here[2]}")
        return
    folder = rank_folder(sharding.rank, sharding.tp)
    if path.split("/")[0] != folder:
        yield Finding(path, f"says that it belongs to {folder}")
    expected = _stacked_shapes(manifest, dims, sharding.rank)
    found = {name.rpartition(".")[2]: t.shape for name, t in blob.header.tensors.items()}
    if found != expected:
        yield Finding(path, f"has the tensors {found}, expected {expected}")
        return
    if len({name.rpartition(".")[0] for name in blob.header.tensors}) > 1:
        yield Finding(path, f"its tensors are not of one layer: {[*blob.header.tensors]}")
    for name, tensor in blob.header.tensors.items():
        allowed = _dtypes(stacked_by_name(name).role, dims.quantization)
        if tensor.dtype not in allowed:
            yield Finding(path, f"{tensor.dtype} found, {' or '.join(allowed)} expected", name)
        if len(info.expert_digests.get(name, ())) != tensor.shape[0]:
            yield Finding(path, f"has not one digest for each of {tensor.shape[0]} experts", name)
    said = sharding.quantization
    scales = {t.dtype for n, t in blob.header.tensors.items() if stacked_by_name(n).role == "scale"}
    wanted = described(dims.quantization, *sorted(scales))
    if said != wanted:
        yield Finding(path, f"says that its quantization is {said}, expected {wanted}")


def _dtypes(role: Role, quantization: Quantization) -> tuple[str, ...]:
    if role in ("code", "zero_point"):
        return ("I32",)
    if role == "scale" and quantization.scheme == "mxfp4":
        return ("U8", "F8_E8M0")
    return SCALE_DTYPES


def _stacked_shapes(manifest: Manifest, dims: ModelDims, rank: int) -> dict[str, tuple[int, ...]]:
    """FORMAT.md's table of shapes, for one rank."""
    layout = layout_named(manifest.layout)(dims.quantization)
    experts, rows = rank_slice(dims, Parallelism(manifest.tp, manifest.ep), rank)
    cuts = [tensor.cut(rows, dims.hidden) for tensor in stacked_tensors(dims.quantization)]
    return {
        cut.tensor.name: (len(experts), *layout.shape(cut.tensor.role, cut.n, cut.k))
        for cut in cuts
    }
