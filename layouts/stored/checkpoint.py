"""The checkpoint that an output stands for: every tensor it was made from, by name, dtype and
shape, checked as a checkpoint's are, and where its bytes lie now.

An expert's tensors are not there as such: their places name no bytes. What is read for an expert
are its parts in the ranks' blobs (`StoredGroup.parts`).
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from kconvert.layouts.blob import digest
from kconvert.layouts.checkpoint import Checkpoint, Shard, SourceTensor, read_json
from kconvert.layouts.errors import CheckpointError, UnsupportedError
from kconvert.layouts.experts import StackedTensor, stacked_tensors
from kconvert.layouts.families.family import SPELLINGS
from kconvert.layouts.fields import CONFIG_NAME
from kconvert.layouts.header import DTYPE_BYTES
from kconvert.layouts.layout import Layout
from kconvert.layouts.manifest import MANIFEST_NAME
from kconvert.layouts.model import Group, Identity, Model, layer_name, read_model
from kconvert.layouts.registry import layout_named
from kconvert.layouts.sharding import ModelDims, RankSlice, rank_slice
from kconvert.layouts.stored.output import Blob, Output


class Part(NamedTuple):
    """What a rank's blob holds of one expert in one stacked tensor."""

    rank: int
    rows: range  # of the expert's intermediate rows
    stacked: StackedTensor
    place: SourceTensor  # a matrix in the order of the blob's layout
    digest: str


class StoredRank(NamedTuple):
    """What a rank's blob holds of a layer: each stacked tensor, and its experts' digests."""

    slice: RankSlice
    tensors: tuple[tuple[StackedTensor, SourceTensor, list[str]], ...]


@dataclass(frozen=True, kw_only=True)
class StoredGroup(Group):
    """A group that lies in blobs."""

    layout: Layout
    dims: ModelDims
    ranks: tuple[StoredRank, ...]
    contents: Identity  # as its blobs say
    digests: Mapping[str, str]  # of the whole tensors

    def parts(self, expert: int) -> Iterator[Part]:
        """Where an expert lies; of channelwise scales of down, every rank's copy."""
        for rank, held in enumerate(self.ranks):
            if expert in held.slice.experts:
                local = held.slice.experts.index(expert)
                for stacked, place, digests in held.tensors:
                    yield Part(rank, held.slice.rows, stacked, place.part(local), digests[local])

    @property
    def is_cast(self) -> bool:
        """Whether its scales are stored in another dtype than the source's."""
        scales = (place for rank in self.ranks[:1] for kind, place, _ in rank.tensors
                  if kind.role == "scale")  # fmt: skip
        return any(place.dtype != self.experts[0].gate.scale.dtype for place in scales)

    def read_for(self, expert: int) -> Iterable[SourceTensor]:
        return (part.place for part in self.parts(expert))

    def identity(self, contents: Mapping[str, str]) -> Identity:
        return self.contents

    def digest_of(self, tensor: SourceTensor) -> str | None:
        return self.digests[tensor.name]


class Stored(NamedTuple):
    """A finished output, read as a checkpoint is."""

    output: Output
    checkpoint: Checkpoint  # its shards are the blobs
    model: Model  # of StoredGroups


def read_stored(folder: Path) -> Stored:
    """Headers and small files of the output in `folder`, each compared with the manifest.

    Raises what `Output` and `read_model` do: OutputError, UnsupportedError, CheckpointError.
    """
    output = Output(folder)
    layers = output.moe_layers()
    common = {blob.path.stem: blob for blob in output.common()}
    ranks = {
        layer_name(layer): [output.experts(layer, rank) for rank in range(output.stored.tp)]
        for layer in sorted(layers)
    }
    held = {group: _held(output, blobs) for group, blobs in ranks.items()}
    tensors = {tensor.name: tensor for blob in common.values() for tensor in _tensors(output, blob)}
    for blobs in ranks.values():
        tensors |= {tensor.name: tensor for tensor in _of_experts(output, blobs)}
    everything = [*common.values(), *(blob for blobs in ranks.values() for blob in blobs)]
    checkpoint = Checkpoint(
        config=read_json(folder / CONFIG_NAME),
        tensors=tensors,
        absent={},
        unindexed={},
        shards={output.name_of(blob): _shard(output, blob) for blob in everything},
        ignored=(),
        small_files=_small_files(output),
    )
    model = read_model(checkpoint)
    layout = layout_named(output.layout)(output.dims.quantization)
    groups: dict[str, Group] = {}
    for name, group in model.groups.items():
        blobs = ranks.get(name, [])
        blob = common.get(name)
        groups[name] = StoredGroup(
            **vars(group),
            layout=layout,
            dims=output.dims,
            ranks=held.get(name, ()),
            contents=Identity(blob.info.content if blob else "", _content(blobs)),
            digests=blob.info.digests if blob else {},
        )
    return Stored(output, checkpoint, replace(model, groups=groups))


def _tensors(output: Output, blob: Blob) -> Iterator[SourceTensor]:
    name = output.name_of(blob)
    for entry in blob.header.tensors.values():
        yield SourceTensor(entry.name, entry.dtype, entry.shape, name, entry.start, entry.nbytes)


def _shard(output: Output, blob: Blob) -> Shard:
    size = output.manifest.files[output.name_of(blob)].bytes
    return Shard(output.name_of(blob), size, blob.header.data_start, blob.header.raw)


def _held(output: Output, blobs: list[Blob]) -> tuple[StoredRank, ...]:
    """What the ranks' blobs of a layer hold. Raises CheckpointError for a tensor that is not as
    config.json and the manifest have it."""
    layout, held = layout_named(output.layout)(output.dims.quantization), []
    kinds = stacked_tensors(output.dims.quantization)
    first = {tensor: blobs[0].stacked(tensor) for tensor in kinds}
    for rank, blob in enumerate(blobs):
        part = rank_slice(output.dims, output.stored, rank)
        places = {tensor.name: tensor for tensor in _tensors(output, blob)}
        tensors = []
        for stacked in kinds:
            name = blob.stacked(stacked).name
            cut = stacked.cut(part.rows, output.dims.hidden)
            shape = (len(part.experts), *layout.shape(stacked.role, cut.n, cut.k))
            place, digests = places[name], blob.info.expert_digests.get(name, [])
            wanted = (first[stacked].name, first[stacked].dtype, shape, len(part.experts))
            if (name, place.dtype, place.shape, len(digests)) != wanted:
                raise CheckpointError(
                    f"{blob.path}, tensor {name}: {place.dtype} {list(place.shape)} with"
                    f" {len(digests)} digests found, expected {wanted[1]} {list(shape)} with"
                    f" {wanted[3]} as {wanted[0]}: convert it again."
                )
            tensors.append((stacked, place, digests))
        held.append(StoredRank(part, tuple(tensors)))
    return tuple(held)


def _of_experts(output: Output, blobs: list[Blob]) -> Iterator[SourceTensor]:
    """The tensors that the experts of a layer were made from; their bytes lie elsewhere.

    What w1 and gate_proj are to one another is not in a blob: the block's name tells, as published
    checkpoints have it.
    """
    dims, format, blob = output.dims, output.family.format, blobs[0]
    code = blob.stacked(stacked_tensors(dims.quantization)[0]).name
    base = code.rpartition(".")[0] + "."
    dtypes, n, k = _source_dtypes(output, blob), dims.intermediate, dims.hidden
    shapes: Iterable[tuple[str, int, int]]
    if format.fused:
        shapes = (("gate_up_proj", 2 * n, k), ("down_proj", k, n))
    else:
        spelling = SPELLINGS[".block_sparse_moe." in base or ".ffn." in base]
        shapes = [
            (f"{expert}.{name}.", *((k, n) if name == spelling[2] else (n, k)))
            for expert in range(dims.experts)
            for name in spelling
        ]
    for name, rows, columns in shapes:
        for tensor, dtype, shape in format.stated(f"{base}{name}", rows, columns, dtypes):
            shape = (dims.experts, *shape) if format.fused else shape
            nbytes = DTYPE_BYTES[dtype] * math.prod(shape)
            yield SourceTensor(tensor, dtype, shape, output.name_of(blob), 0, nbytes)


def _source_dtypes(output: Output, blob: Blob) -> dict[str, str]:
    """The dtype of each companion that the source had: as it lies in the blob, or as the blob says
    of what it does not keep so."""
    format, sharding = output.family.format, blob.info.sharding
    assert sharding is not None  # see `Output.experts`
    unknown = sharding.dropped.keys() - format.roles.keys()
    if unknown:
        raise UnsupportedError(
            f"{blob.path} says that the source had {min(unknown)}, which {format.name} has not: use"
            " the version that wrote it."
        )
    kept = {
        companion: blob.stacked(tensor).dtype
        for companion, role in format.roles.items()
        for tensor in stacked_tensors(output.dims.quantization)
        if tensor.role == role and role in ("scale", "bias")
    }
    return kept | sharding.dropped


def _content(blobs: list[Blob]) -> str:
    """What the experts were made from, as all blobs of a layer must say."""
    for blob in blobs:
        if blob.info.content != blobs[0].info.content:
            raise CheckpointError(
                f"{blob.path} was made from other weights than {blobs[0].path}: convert it again."
            )
    return blobs[0].info.content if blobs else ""


def _small_files(output: Output) -> tuple[str, ...]:
    """Their names. Raises CheckpointError where one is not what the manifest says."""
    names = []
    for name, entry in output.manifest.files.items():
        if entry.fingerprint is None:
            path = output.sized(name)
            if digest(path.read_bytes()) != entry.digest:
                raise CheckpointError(
                    f"{path} was changed: its digest is not the one in {MANIFEST_NAME}; copy it"
                    " anew, or convert again."
                )
            names.append(name)
    return tuple(sorted(names))
