"""The plan: a model, a layout and a parallelism → every output file, tensor, offset and source.

Pure: it reads nothing and writes nothing, so it can be printed (`--dry-run`) and tested whole.
"""

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from kconvert.convert.planned import PlannedFile, PlannedTensor
from kconvert.convert.share import Share
from kconvert.layouts import blob
from kconvert.layouts.blob import BlobInfo, BlobTensor, Sharding
from kconvert.layouts.checkpoint import SourceTensor
from kconvert.layouts.errors import CheckpointError, OptionError
from kconvert.layouts.experts import W13_ROWS, stacked_tensors
from kconvert.layouts.families.family import Family
from kconvert.layouts.formats.format import Format, QuantizedMatrix
from kconvert.layouts.header import DTYPE_BYTES
from kconvert.layouts.layout import Layout
from kconvert.layouts.model import VISION, Group, Model, layer_name, layer_number, ranges
from kconvert.layouts.quantization import Role
from kconvert.layouts.sharding import (
    ModelDims,
    Parallelism,
    RankSlice,
    check_parallelism,
    rank_slice,
)

_FIRST_FORMAT = "pack-quantized"  # its fingerprints do not name it, as there was no other


class Target(NamedTuple):
    """What an output is made for and from; the same in every blob of it."""

    layout: Layout
    parallelism: Parallelism
    repo: str | None = None  # Hub repo and commit, if the source is one
    commit: str | None = None
    scale_dtype: str | None = None  # what scales are cast to; None: kept


@dataclass(frozen=True)
class Job:
    """A group and the files it is converted into, which are published together. What takes a look
    at all its tensors, maybe thousands, is computed once."""

    group: Group
    files: tuple[PlannedFile, ...]

    @property
    def copied(self) -> tuple[SourceTensor, ...]:
        """The source tensors that go into this job's files unchanged."""
        tensors = (tensor.source for file in self.files for tensor in file.copied)
        return tuple(source for source in tensors if isinstance(source, SourceTensor))

    @cached_property
    def experts(self) -> list[int]:
        """The experts that a file of this job holds."""
        parts = [f.rank_slice.experts for f in self.files if f.rank_slice is not None]
        return [e for e in range(len(self.group.experts)) if any(e in part for part in parts)]

    @property
    def source_tensors(self) -> Iterable[SourceTensor]:
        """Every source tensor this job reads, each once."""
        yield from self.copied
        for e in self.experts:
            yield from self.group.read_for(e)

    @cached_property
    def shards(self) -> set[str]:
        """The files this job reads."""
        return {tensor.shard for tensor in self.source_tensors}

    @cached_property
    def source_bytes(self) -> int:
        """Bytes this job reads."""
        return sum(tensor.nbytes for tensor in self.source_tensors)


class Absent(NamedTuple):
    """A group whose shards are not all here: what is missing, and the files it would become."""

    name: str
    shards: tuple[str, ...]
    paths: tuple[str, ...]
    wanted: bool  # this run was to convert it


@dataclass(frozen=True)
class Plan:
    """A whole conversion. `jobs` are to be done; `others` are files of the same output that this
    run leaves out though the source is here; `expected` are the paths a complete output has."""

    target: Target
    format: Format  # of the source's experts
    dims: ModelDims
    jobs: tuple[Job, ...]
    others: tuple[PlannedFile, ...]
    expected: tuple[str, ...]
    left_out: tuple[str, ...]  # names of the groups that are not converted
    absent: tuple[Absent, ...]  # of a source that is not whole

    @property
    def files(self) -> tuple[PlannedFile, ...]:
        """Every file to be written."""
        return tuple(file for job in self.jobs for file in job.files)

    def without(self, published: Collection[str]) -> "Plan":
        """What is left to do if the files at the paths `published` are there."""
        jobs = (
            replace(job, files=tuple(f for f in job.files if f.path not in published))
            for job in self.jobs
        )
        return replace(self, jobs=tuple(job for job in jobs if job.files))

    def share(self, share: Share) -> "Plan":
        """The jobs of one share; the files of the others are `others`."""
        mine = tuple(job for job in self.jobs if share.holds(layer_number(job.group.name)))
        rest = (file for job in self.jobs if job not in mine for file in job.files)
        return replace(self, jobs=mine, others=(*self.others, *rest))


def make_plan(
    model: Model,
    contents: Mapping[str, str],
    target: Target,
    *,
    layers: Collection[int] | None = None,
    ranks: Collection[int] | None = None,
    text_only: bool = False,
) -> Plan:
    """Plan the conversion of `model`, or of some of its layers and ranks.

    `contents` maps each shard to the identity of its content (see `source.content_id`).
    `layers` leaves out the other layers, outer and vision; `ranks` the other ranks' blobs.
    Raises UnsupportedError for a parallelism that does not fit or a layer or rank that does not
    exist. Groups that lack shards are `Plan.absent`: their files may be published already.
    """
    parallelism = target.parallelism
    check_parallelism(model.dims, parallelism, target.layout.constraint)
    _check_selection("--ranks", ranks, range(parallelism.tp), f"--tp {parallelism.tp} has ranks")
    every_layer = range(model.dims.layers + model.dims.mtp_layers)
    _check_selection("--layers", layers, every_layer, "the model has layers")
    chosen = model.groups.keys() if layers is None else {layer_name(layer) for layer in layers}
    wanted_ranks = range(parallelism.tp) if ranks is None else ranks
    jobs, others, expected, left_out, absent = [], [], [], [], []
    for group in model.groups.values():
        unwanted = text_only and group.name == VISION
        skipped = unwanted or group.name not in chosen
        if skipped:
            left_out.append(group.name)
        if group.absent:
            paths = _paths_of_absent(group, model.dims, parallelism)
            absent.append(Absent(group.name, group.absent, tuple(paths), not skipped))
            if not unwanted:
                expected += paths
            continue
        files = _files(group, model.family, target, contents)
        if not unwanted:
            expected += [file.path for file in files]
        now = [
            file
            for file in files
            if not skipped and (file.rank is None or file.rank in wanted_ranks)
        ]
        others += [file for file in files if file not in now]
        if now:
            jobs.append(Job(group, tuple(now)))
    return Plan(
        target=target,
        format=model.family.format,
        dims=model.dims,
        jobs=tuple(jobs),
        others=tuple(others),
        expected=tuple(expected),
        left_out=tuple(left_out),
        absent=tuple(absent),
    )


def _files(
    group: Group, family: Family, target: Target, contents: Mapping[str, str]
) -> list[PlannedFile]:
    """All files of a group: the common one and, for MoE layers, one for each rank."""
    identity, files = group.identity(contents), []
    if group.whole:
        files.append(_common_file(group, target, identity.whole))
    if group.experts:
        dtypes = _dtypes([m for expert in group.experts for m in expert.stored], target)
        for rank in range(target.parallelism.tp):
            files.append(_rank_file(group, family, target, rank, identity.experts, dtypes))
    return files


def _common_file(group: Group, target: Target, content: str) -> PlannedFile:
    tensors = [
        PlannedTensor(BlobTensor(t.name, t.dtype, t.shape, 0, t.nbytes), t) for t in group.whole
    ]
    path = f"{blob.COMMON_FOLDER}/{group.name}.safetensors"
    return _file(path, tensors, target, content, {"version": blob.COMMON_VERSION})


def _rank_file(
    group: Group, family: Family, target: Target, rank: int, content: str, kinds: "_Dtypes"
) -> PlannedFile:
    """Shapes and sources of the stacked tensors, in the order a forward pass reads them."""
    layout, (tp, ep), dims = target.layout, target.parallelism, family.dims
    experts, rows = part = rank_slice(dims, target.parallelism, rank)
    dtypes, tensors = kinds.stacked, []
    for stacked in stacked_tensors(dims.quantization):
        cut = stacked.cut(rows, dims.hidden)
        dtype = dtypes[stacked.role]
        shape = (len(experts), *layout.shape(stacked.role, cut.n, cut.k))
        stored = BlobTensor(
            name=f"{group.prefix}{stacked.name}",
            dtype=dtype,
            shape=shape,
            offset=0,
            nbytes=math.prod(shape) * DTYPE_BYTES[dtype],
            experts=len(experts),
        )
        tensors.append(PlannedTensor(stored, cut))
    sharding = Sharding(
        layout=layout.name,
        rank=rank,
        tp=tp,
        ep=ep,
        quantization=blob.described(dims.quantization, dtypes["scale"]),
        w13_rows=W13_ROWS,
        padding=None,
        dropped=kinds.dropped,
    )
    identity: dict[str, object] = {
        "version": layout.version, "layout": layout.name, "tp": tp, "ep": ep,
        "slice": [experts.start, experts.stop, rows.start, rows.stop],
    }  # fmt: skip
    if family.format.name != _FIRST_FORMAT:  # the same tensors may mean something else
        identity["source_format"] = family.format.name
    path = f"{blob.rank_folder(rank, tp)}/{group.name}.safetensors"
    return _file(path, tensors, target, content, identity, sharding, part)


class _Dtypes(NamedTuple):
    """The dtypes of the stacked tensors of a group's experts, and of the companions that are not
    kept as they are."""

    stacked: dict[Role, str]
    dropped: dict[str, str]


def _dtypes(matrices: list[QuantizedMatrix], target: Target) -> _Dtypes:
    scale = _one_dtype(matrix.scale for matrix in matrices)
    stacked: dict[Role, str] = {"code": "I32", "scale": scale, "zero_point": "I32"}
    if matrices[0].bias is not None:
        stacked["bias"] = _one_dtype(m.bias for m in matrices if m.bias is not None)
    companions: dict[str, list[SourceTensor]] = {}
    for matrix in matrices:
        for tensor in matrix.dropped:
            companions.setdefault(_companion(tensor), []).append(tensor)
    dropped = {companion: _one_dtype(tensors) for companion, tensors in companions.items()}
    if target.scale_dtype not in (None, scale):
        stacked["scale"] = str(target.scale_dtype)
        dropped[_companion(matrices[0].scale)] = scale
    return _Dtypes(stacked, dropped)


def _companion(tensor: SourceTensor) -> str:
    return tensor.name.rpartition(".")[2]


def _one_dtype(tensors: Iterable[SourceTensor]) -> str:
    """The dtype of tensors that are stacked or described together; CheckpointError if they have
    several."""
    first, *others = tensors
    other = next((tensor for tensor in others if tensor.dtype != first.dtype), None)
    if other is not None:
        raise CheckpointError(
            f"{other.shard}, tensor {other.name}: dtype {other.dtype} found, {first.dtype} expected"
            f" as in {first.name}: a layer's experts are stacked."
        )
    return first.dtype


def _file(
    path: str,
    tensors: list[PlannedTensor],
    target: Target,
    content: str,
    identity: dict[str, object],
    sharding: Sharding | None = None,
    part: RankSlice | None = None,
) -> PlannedFile:
    """A blob with its tensors laid out; its bytes follow from `identity` and `content`."""
    sources = {tensor.blob.name: tensor.source for tensor in tensors}
    placed = blob.lay_out(tensor.blob for tensor in tensors)
    identity = identity | {
        "tensors": [(t.name, t.dtype, t.shape) for t in placed], "content": content,
    }  # fmt: skip
    info = BlobInfo(
        format=blob.FORMAT_VERSION,
        repo=target.repo,
        commit=target.commit,
        content=content,
        fingerprint=blob.digest(json.dumps(identity, sort_keys=True).encode()),
        digests={tensor.name: blob.NO_DIGEST for tensor in placed},
        expert_digests={tensor.name: [] for tensor in placed if tensor.experts},
        sharding=sharding,
    )
    header_bytes = blob.header_bytes(placed, info)
    return PlannedFile(
        path=path,
        tensors=tuple(PlannedTensor(stored, sources[stored.name]) for stored in placed),
        info=info,
        rank_slice=part,
        header_bytes=header_bytes,
        nbytes=header_bytes + sum(stored.nbytes for stored in placed),
    )


def _paths_of_absent(group: Group, dims: ModelDims, parallelism: Parallelism) -> list[str]:
    """The paths of the files of a group whose shards are not here."""
    paths = [f"{blob.COMMON_FOLDER}/{group.name}.safetensors"]
    layer = layer_number(group.name)
    if layer is not None and dims.is_moe(layer):
        tp = parallelism.tp
        paths += [f"{blob.rank_folder(r, tp)}/{group.name}.safetensors" for r in range(tp)]
    return paths


def _check_selection(option: str, numbers: Collection[int] | None, known: range, what: str) -> None:
    wrong = sorted(set(numbers or ()) - set(known))
    if wrong or (numbers is not None and not numbers):
        raise OptionError(f"{option} {ranges(wrong)}: {what} {ranges(known)}.")
