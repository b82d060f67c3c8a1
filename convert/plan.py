"""The plan: a model, a layout and a parallelism → every output file, tensor, offset and source.

Pure: it reads nothing and writes nothing, so it can be printed (`--dry-run`) and tested whole.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from kconvert.convert.share import Share
from kconvert.layouts import blob
from kconvert.layouts.blob import BlobInfo, BlobTensor
from kconvert.layouts.checkpoint import SourceTensor
from kconvert.layouts.errors import CheckpointError, KconvertError, UnsupportedError
from kconvert.layouts.model import VISION, Group, Model, layer_name, layer_numbers, ranges
from kconvert.layouts.registry import Layout
from kconvert.layouts.sharding import (
    ModelDims,
    Parallelism,
    RankSlice,
    check_parallelism,
    rank_slice,
    stacked_names,
)


class Target(NamedTuple):
    """What an output is made for and from; the same in every blob of it."""

    layout: Layout
    parallelism: Parallelism
    repo: str | None = None  # Hub repo and commit, where the source is one
    commit: str | None = None


@dataclass(frozen=True)
class PlannedFile:
    """A blob to be: its path under the output, tensors with offsets, and size in bytes."""

    path: str
    tensors: tuple[BlobTensor, ...]
    info: BlobInfo  # with blank digests
    held: RankSlice | None  # None: the tensors are whole, the file is common to all ranks
    header_bytes: int
    nbytes: int


@dataclass(frozen=True)
class Job:
    """A group and the files it is converted into: the unit that is published together."""

    group: Group
    files: tuple[PlannedFile, ...]

    @property
    def copied(self) -> tuple[SourceTensor, ...]:
        """The source tensors that go unchanged into this job's common file, if it has one."""
        return self.group.whole if any(f.held is None for f in self.files) else ()

    @property
    def experts(self) -> list[int]:
        """The experts that a file of this job holds."""
        held = [f.held.experts for f in self.files if f.held is not None]
        return [e for e in range(len(self.group.experts)) if any(e in one for one in held)]

    @property
    def source_tensors(self) -> Iterable[SourceTensor]:
        """Every source tensor this job reads, each once."""
        yield from self.copied
        for e in self.experts:
            for matrix in self.group.experts[e]:
                yield from matrix

    @property
    def shards(self) -> set[str]:
        """The files this job reads."""
        return {tensor.shard for tensor in self.source_tensors}

    @property
    def source_bytes(self) -> int:
        """Bytes this job reads."""
        return sum(tensor.nbytes for tensor in self.source_tensors)


class Absent(NamedTuple):
    """A group whose shards are not all here: what it lacks, and the files it would become."""

    name: str
    shards: tuple[str, ...]
    paths: tuple[str, ...]
    wanted: bool  # this run was to convert it


@dataclass(frozen=True)
class Plan:
    """All of a conversion. `jobs` are to be done; `others` are files of the same output that the
    source has and this run leaves out; `expected` are the paths a complete output has."""

    target: Target
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
        """What is left to do when the files at the paths `published` are there."""
        jobs = (
            replace(job, files=tuple(f for f in job.files if f.path not in published))
            for job in self.jobs
        )
        return replace(self, jobs=tuple(job for job in jobs if job.files))

    def share(self, share: Share) -> "Plan":
        """The jobs of one share; the files of the others are `others`."""
        mine = tuple(job for job in self.jobs if share.holds(_layer(job.group)))
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
    _check_selection("--ranks", ranks, range(parallelism.tp))
    _check_selection("--layers", layers, range(model.dims.layers + model.dims.mtp_layers))
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
        files = _files(group, model.dims, target, contents)
        if not unwanted:
            expected += [file.path for file in files]
        now = [
            file
            for file in files
            if not skipped and (file.held is None or file.info.rank in wanted_ranks)
        ]
        others += [file for file in files if file not in now]
        if now:
            jobs.append(Job(group, tuple(now)))
    plan = Plan(
        target, model.dims, tuple(jobs), tuple(others), tuple(expected), tuple(left_out),
        tuple(absent),
    )  # fmt: skip
    check_accounts(plan)
    return plan


def check_accounts(plan: Plan) -> None:
    """Every source tensor goes to one place, every byte of it: raise KconvertError otherwise.

    Where all ranks of a group are planned, the bytes written are the bytes read, less the
    weight_shape tensors (checked, not stored), plus channelwise down scales, which every rank
    that shares an expert needs.
    """
    seen: set[str] = set()
    for job in plan.jobs:
        names = [tensor.name for tensor in job.source_tensors]
        if len(set(names)) < len(names) or not seen.isdisjoint(names):
            raise KconvertError(f"{job.group.name}: a tensor is planned twice; this is a bug.")
        seen.update(names)
        copies = plan.target.parallelism.moe_tp
        planned = [file for file in job.files if file.held is not None]
        if len(planned) not in (0, plan.target.parallelism.tp):
            continue
        read = sum(tensor.nbytes for tensor in job.copied)
        for e in job.experts:
            for matrix in job.group.experts[e]:
                read += matrix.packed.nbytes + matrix.scale.nbytes
            if plan.dims.quantization.group_size is None:
                read += (copies - 1) * job.group.experts[e].down.scale.nbytes
        written = sum(tensor.nbytes for file in job.files for tensor in file.tensors)
        if read != written:
            raise KconvertError(
                f"{job.group.name}: {read:,} bytes are read and {written:,} planned to be written;"
                " this is a bug."
            )


def _files(
    group: Group, dims: ModelDims, target: Target, contents: Mapping[str, str]
) -> list[PlannedFile]:
    """All files of a group: the common one and, for MoE layers, one a rank."""
    files = []
    if group.whole:
        whole = (BlobTensor(t.name, t.dtype, t.shape, 0, t.nbytes) for t in group.whole)
        path = f"{blob.COMMON_FOLDER}/{group.name}.safetensors"
        files.append(_file(path, whole, None, None, target, _content(group.whole, contents)))
    if group.experts:
        tp = target.parallelism.tp
        tensors = (t for expert in group.experts for matrix in expert for t in matrix)
        content = _content(tensors, contents)
        for rank in range(tp):
            held = rank_slice(dims, target.parallelism, rank)
            stacked = _stacked(group, dims, target.layout, held)
            path = f"{blob.rank_folder(rank, tp)}/{group.name}.safetensors"
            files.append(_file(path, stacked, rank, held, target, content))
    return files


def _content(tensors: Iterable[SourceTensor], contents: Mapping[str, str]) -> str:
    """Identity of what some tensors hold: of which shard's content, from which byte on, each."""
    return blob.digest("".join(f"{contents[t.shard]}{t.start}\n" for t in tensors).encode())


def _stacked(group: Group, dims: ModelDims, layout: Layout, held: RankSlice) -> list[BlobTensor]:
    """The four tensors of a rank's blob, in the order a forward pass reads them."""
    n, k, experts = len(held.rows), dims.hidden, len(held.experts)
    w13_groups = len(dims.quantization.groups(range(k)))
    w2_groups = len(dims.quantization.groups(held.rows))
    shapes = (
        ("I32", layout.weight_shape(2 * n, k)),
        (_scale_dtype(group, ("gate", "up")), layout.scale_shape(2 * n, w13_groups)),
        ("I32", layout.weight_shape(k, n)),
        (_scale_dtype(group, ("down",)), layout.scale_shape(k, w2_groups)),
    )
    return [
        BlobTensor(
            name, dtype, (experts, *shape), 0,
            experts * shape[0] * shape[1] * blob.DTYPE_BYTES[dtype], experts,
        )
        for name, (dtype, shape) in zip(stacked_names(group.prefix), shapes, strict=True)
    ]  # fmt: skip


def _scale_dtype(group: Group, projections: tuple[str, ...]) -> str:
    scales = [getattr(e, projection).scale for e in group.experts for projection in projections]
    first = scales[0]
    other = next((scale for scale in scales if scale.dtype != first.dtype), None)
    if other is not None:
        raise CheckpointError(
            f"{other.shard}, tensor {other.name}: dtype {other.dtype} found, {first.dtype} expected"
            f" as in {first.name}: a layer's experts are stacked."
        )
    return first.dtype


def _file(
    path: str,
    tensors: Iterable[BlobTensor],
    rank: int | None,
    held: RankSlice | None,
    target: Target,
    content: str,
) -> PlannedFile:
    placed = blob.lay_out(tensors)
    tp, ep = target.parallelism
    identity = {
        "format": blob.FORMAT_VERSION, "layout": target.layout.NAME, "tp": tp, "ep": ep,
        "slices": held and [held.experts.start, held.experts.stop, held.rows.start, held.rows.stop],
        "tensors": [(t.name, t.dtype, t.shape) for t in placed],
        "content": content,
    }  # fmt: skip
    info = BlobInfo(
        blob.FORMAT_VERSION, target.layout.NAME, rank, tp, ep, target.repo, target.commit,
        blob.digest(json.dumps(identity, sort_keys=True).encode()), *blob.blank_digests(placed),
    )  # fmt: skip
    header_bytes = len(blob.encode_header(placed, info))
    data_bytes = sum(tensor.nbytes for tensor in placed)
    return PlannedFile(path, placed, info, held, header_bytes, header_bytes + data_bytes)


def _layer(group: Group) -> int | None:
    return next(iter(layer_numbers([group.name])), None)


def _paths_of_absent(group: Group, dims: ModelDims, parallelism: Parallelism) -> list[str]:
    """The paths that the files of a group would have whose shards are not here."""
    paths = [f"{blob.COMMON_FOLDER}/{group.name}.safetensors"]
    layer = _layer(group)
    if layer is not None and layer >= dims.first_moe:
        tp = parallelism.tp
        paths += [f"{blob.rank_folder(r, tp)}/{group.name}.safetensors" for r in range(tp)]
    return paths


def _check_selection(option: str, numbers: Collection[int] | None, known: range) -> None:
    wrong = sorted(set(numbers or ()) - set(known))
    if wrong or (numbers is not None and not numbers):
        raise UnsupportedError(
            f"{option} {ranges(wrong)}: there are {known.start} to {known.stop - 1}."
        )
