"""The plan of an export: a model that lies in blobs → the shards of a checkpoint. Pure.

A shard a layer, then embedding and head, then one each for the projector and the vision tower, in
the order of safetensors' own writer. That is Moonshot's split: its K2.6 comes back file by file.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from kconvert.convert.plan import Job, Plan, Target
from kconvert.convert.planned import Place, PlannedShard, PlannedTensor
from kconvert.layouts.blob import BlobTensor
from kconvert.layouts.checkpoint import SourceTensor
from kconvert.layouts.errors import UnsupportedError
from kconvert.layouts.experts import PROJECTIONS, StackedTensor, stacked_tensors
from kconvert.layouts.fields import CONFIG_NAME
from kconvert.layouts.header import DTYPE_BYTES, file_order, shard_header
from kconvert.layouts.model import VISION, Group, Model
from kconvert.layouts.sharding import Parallelism, RankSlice
from kconvert.layouts.w4a16 import W4A16


class Content(NamedTuple):
    """What a shard holds of a group: its `whole` tensors, and all of the group's experts."""

    group: Group
    whole: tuple[SourceTensor, ...]


def plan_export(model: Model) -> Plan:
    """Every shard, and in it every tensor that the model was converted from.

    Raises UnsupportedError if the format's bytes cannot be made from what blobs keep.
    """
    format = model.family.format
    if not format.restores:
        raise UnsupportedError(
            f"{CONFIG_NAME} says {format.name}: blobs do not keep every byte of that format, only"
            " compressed-tensors formats can be exported."
        )
    order = W4A16(model.dims.quantization)  # the checkpoint's own
    contents = [content for group in model.groups.values() for content in _split(group)]
    files: dict[str, list[PlannedShard]] = {}
    for i, content in enumerate(contents):
        # Moonshot's names: five digits, of six.
        path = f"model-{i + 1:05}-of-{len(contents):06}.safetensors"
        files.setdefault(content.group.name, []).append(_shard(path, content, model, order))
    return Plan(
        target=Target(order, Parallelism()),
        format=model.family.format,
        dims=model.dims,
        jobs=tuple(Job(model.groups[name], tuple(shards)) for name, shards in files.items()),
        others=(),
        expected=tuple(shard.path for shards in files.values() for shard in shards),
        left_out=(),
        absent=(),
    )


def _split(group: Group) -> Iterator[Content]:
    """The projector and the tower are shards of their own."""
    if group.name != VISION:
        yield Content(group, group.whole)
        return
    parts: dict[str, list[SourceTensor]] = {}
    for tensor in group.whole:
        parts.setdefault(tensor.name.partition(".")[0], []).append(tensor)
    for _, tensors in sorted(parts.items()):
        yield Content(group, tuple(tensors))


def _shard(path: str, content: Content, model: Model, order: W4A16) -> PlannedShard:
    (group, whole), dims = content, model.dims
    tensors = file_order([*whole, *(t for expert in group.experts for t in expert.tensors)])
    header = len(shard_header(tensors))
    placed, at = {}, 0
    for tensor in tensors:
        placed[tensor.name] = BlobTensor(tensor.name, tensor.dtype, tensor.shape, at, tensor.nbytes)
        at += tensor.nbytes
    planned = [PlannedTensor(placed[tensor.name], tensor) for tensor in whole]
    experts: dict[tuple[int, StackedTensor], tuple[Place, ...]] = {}
    constants: dict[int, tuple[tuple[Place, bytes], ...]] = {}

    def place(tensor: SourceTensor) -> Place:
        return Place(tensor.name, None, placed[tensor.name].offset)

    for stacked in stacked_tensors(dims.quantization) if group.experts else ():
        cut = stacked.cut(range(dims.intermediate), dims.hidden)
        for index, expert in enumerate(group.experts):
            parts = [getattr(expert, name).by_role[stacked.role] for name in stacked.projections]
            experts[index, stacked] = tuple(map(place, parts))
        words = stacked.role in ("code", "zero_point")
        dtype, count = "I32" if words else parts[0].dtype, len(group.experts)
        shape = (count, *order.shape(stacked.role, cut.n, cut.k))
        nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
        planned.append(PlannedTensor(BlobTensor(stacked.name, dtype, shape, 0, nbytes, count), cut))
    for index, expert in enumerate(group.experts):
        shapes = []
        for projection, matrix in zip(PROJECTIONS, expert, strict=True):
            n, k = dims.intermediate, dims.hidden
            n, k = (k, n) if projection == "down" else (n, k)
            for tensor in matrix.dropped:
                companion = tensor.name.rpartition(".")[2]
                data = model.family.format.dropped_data(companion, tensor.dtype, n, k)
                shapes.append((place(tensor), data))
        constants[index] = tuple(shapes)
    everything = RankSlice(range(len(group.experts)), range(dims.intermediate))
    return PlannedShard(
        path=path,
        tensors=tuple(planned),
        info=None,
        rank_slice=everything if group.experts else None,
        header_bytes=header,
        nbytes=header + at,
        all_tensors=tuple(placed.values()),
        experts=experts,
        constants=constants,
    )
