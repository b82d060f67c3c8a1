"""The checkpoint that an output stands for: every tensor it was made from, by name, dtype and
shape, checked as a checkpoint's are, and where its bytes lie now.

An expert's own tensors are no longer there, so their places name no bytes: what is read for an
expert are its parts in the ranks' blobs (`StoredGroup.parts`).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import NamedTuple

from kconvert.layouts.blob import digest
from kconvert.layouts.checkpoint import Checkpoint, Shard, SourceTensor, read_json, tensor_in
from kconvert.layouts.errors import ChangedFileError, CheckpointError, UnsupportedError
from kconvert.layouts.experts import StackedTensor, stacked_tensors
from kconvert.layouts.families.family import projections
from kconvert.layouts.fields import CONFIG_NAME
from kconvert.layouts.formats.format import Format, Kind
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
        """Where an expert lies; for channelwise scales of down, every rank's copy."""
        for rank, held in enumerate(self.ranks):
            if expert in held.slice.experts:
                local = held.slice.experts.index(expert)
                for stacked, place, digests in held.tensors:
                    yield Part(rank, held.slice.rows, stacked, place.part(local), digests[local])

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
    cast: bool  # scales were cast to bfloat16


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
    for name, blobs in ranks.items():
        tensors |= {tensor.name: tensor for tensor in _source_tensors(output, blobs, held[name])}
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
    scale = next(name for name, role in output.family.format.roles.items() if role == "scale")
    shardings = [blob.info.sharding for blobs in ranks.values() for blob in blobs]
    cast = any(scale in sharding.dropped for sharding in shardings if sharding is not None)
    return Stored(output, checkpoint, replace(model, groups=groups), cast)


def _tensors(output: Output, blob: Blob) -> Iterator[SourceTensor]:
    name = output.name_of(blob)
    for entry in blob.header.tensors.values():
        yield tensor_in(name, entry)


def _shard(output: Output, blob: Blob) -> Shard:
    size = output.manifest.files[output.name_of(blob)].bytes
    return Shard(output.name_of(blob), size, blob.header.data_start, blob.header.raw)


def _held(output: Output, blobs: list[Blob]) -> tuple[StoredRank, ...]:
    """What the ranks' blobs of a layer hold. Raises CheckpointError for a tensor that does not fit
    config.json and the manifest."""
    layout, held = layout_named(output.layout)(output.dims.quantization), []
    all_stacked = stacked_tensors(output.dims.quantization)
    first = {tensor: blobs[0].stacked(tensor) for tensor in all_stacked}
    for rank, blob in enumerate(blobs):
        part = rank_slice(output.dims, output.stored, rank)
        places = {tensor.name: tensor for tensor in _tensors(output, blob)}
        tensors = []
        for stacked in all_stacked:
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


def _source_tensors(
    output: Output, blobs: list[Blob], held: tuple[StoredRank, ...]
) -> Iterator[SourceTensor]:
    """The tensors that the experts of a layer were made from; their places name no bytes."""
    dims, format, sharding = output.dims, output.family.format, blobs[0].info.sharding
    assert sharding is not None  # see `Output.experts`
    places = {stacked.role: place for stacked, place, _ in held[0].tensors}
    shard, prefix = places["code"].shard, places["code"].name.rpartition(".")[0] + "."
    _refuse_dropped(format, sharding.dropped, shard)
    n, k = dims.intermediate, dims.hidden
    if format.fused:
        bases = {f"{prefix}gate_up_proj": (2 * n, k), f"{prefix}down_proj": (k, n)}
    else:
        bases = {
            f"{prefix}{expert}.{projection}.": shape
            for expert in range(dims.experts)
            for projection, shape in zip(projections(prefix), ((n, k), (n, k), (k, n)), strict=True)
        }
    for base, shape in bases.items():
        for companion, kind in format.kinds(*shape).items():
            role = format.roles[companion]
            dtype = sharding.dropped.get(companion)
            if dtype is None:
                if role is None:
                    continue  # it is optional, or `read_model` says that it is missing
                dtype = _stored_dtype(kind, places[role].dtype)
            whole = (dims.experts, *kind.shape) if format.fused else kind.shape
            nbytes = DTYPE_BYTES[dtype] * prod(whole)
            yield SourceTensor(f"{base}{companion}", dtype, whole, shard, 0, nbytes)


def _refuse_dropped(format: Format, dropped: Mapping[str, str], shard: str) -> None:
    """Raise UnsupportedError if companions were dropped that are not known here."""
    kinds = format.kinds(64, 128)
    known = {
        name: kinds[name].dtypes for name, role in format.roles.items() if role in (None, "scale")
    }
    if any(dtype not in known.get(name, ()) for name, dtype in dropped.items()):
        expected = "; ".join(f"{name}, {' or '.join(dtypes)}" for name, dtypes in known.items())
        raise UnsupportedError(
            f"{shard} says that {dict(dropped)!r:.80} was dropped from the source; this version"
            f" knows {expected}."
        )


def _stored_dtype(kind: Kind, stored: str) -> str:
    """The dtype that a companion had whose data is now stored as `stored`."""
    return stored if stored in kind.dtypes else kind.dtypes[0]


def _content(blobs: list[Blob]) -> str:
    """The content that all blobs of a layer name; CheckpointError if they do not agree."""
    for blob in blobs:
        if blob.info.content != blobs[0].info.content:
            raise CheckpointError(
                f"{blob.path} was made from other weights than {blobs[0].path}: convert it again."
            )
    return blobs[0].info.content if blobs else ""


def _small_files(output: Output) -> tuple[str, ...]:
    """The small files' names. Raises CheckpointError if one is not what the manifest says."""
    names = []
    for name, entry in output.manifest.files.items():
        if entry.fingerprint is None:
            path = output.sized(name)
            if digest(path.read_bytes()) != entry.digest:
                raise ChangedFileError(
                    f"{path} was changed: its digest is not the one in {MANIFEST_NAME}; copy it"
                    " again, or convert again."
                )
            names.append(name)
    return tuple(sorted(names))
