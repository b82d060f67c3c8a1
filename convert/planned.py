"""A file that is to be written, a blob or a checkpoint's shard: what goes where in it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kconvert.layouts.blob import BlobInfo, BlobTensor, encode_header
from kconvert.layouts.checkpoint import SourceTensor
from kconvert.layouts.experts import Cut, StackedTensor
from kconvert.layouts.header import shard_header
from kconvert.layouts.sharding import RankSlice


class PlannedTensor(NamedTuple):
    """A tensor, and what it is made from: a source tensor that is copied, or what `Cut` takes out
    of every local expert."""

    blob: BlobTensor
    source: SourceTensor | Cut


class Place(NamedTuple):
    """Where bytes go: to byte `at` of the data part, as a tensor or as one local expert of one."""

    tensor: str
    expert: int | None
    at: int


@dataclass(frozen=True)
class PlannedFile:
    """A blob: its path under the output, its tensors with their offsets, its size in bytes."""

    path: str
    tensors: tuple[PlannedTensor, ...]
    info: BlobInfo | None  # blank digests, and none for experts; None: it is no blob
    rank_slice: RankSlice | None  # None: the tensors are whole, the file is common to all ranks
    header_bytes: int
    nbytes: int

    @property
    def rank(self) -> int | None:
        """The rank whose file it is; None if it is common."""
        return self.info.sharding.rank if self.info and self.info.sharding else None

    @property
    def fingerprint(self) -> str:
        """A blob's fingerprint."""
        assert self.info is not None
        return self.info.fingerprint

    @property
    def digested(self) -> bool:
        """Whether its header has a digest of each expert's part."""
        return self.info is not None

    @property
    def copied(self) -> tuple[PlannedTensor, ...]:
        """The tensors that are copied from the source."""
        return tuple(t for t in self.tensors if isinstance(t.source, SourceTensor))

    @property
    def stacked(self) -> tuple[PlannedTensor, ...]:
        """The tensors that are packed expert by expert."""
        return tuple(t for t in self.tensors if isinstance(t.source, Cut))

    @property
    def blob_tensors(self) -> tuple[BlobTensor, ...]:
        """The tensors as the header lists them."""
        return tuple(tensor.blob for tensor in self.tensors)

    def places(
        self, index: int, packed: Sequence[memoryview]
    ) -> Iterator[tuple[Place, memoryview]]:
        """Where the bytes of local expert `index` go, in contiguous pieces; `packed` is its part of
        each of `stacked`."""
        for (tensor, _), view in zip(self.stacked, packed, strict=True):
            at = tensor.offset + index * (tensor.nbytes // tensor.experts)
            yield Place(tensor.name, index, at), view

    def header(self, digests: dict[str, str], expert_digests: dict[str, list[str]]) -> bytes:
        """The file's first bytes, when all tensors have their digests."""
        assert self.info is not None
        info = replace(self.info, digests=digests, expert_digests=expert_digests)
        return encode_header(self.blob_tensors, info)


@dataclass(frozen=True)
class PlannedShard(PlannedFile):
    """A checkpoint's shard. Its experts' tensors lie one by one; `tensors` are the whole ones, and
    the stacked ones that are packed: in the checkpoint's order, a stacked tensor is the matrices it
    was made from, one below the other."""

    all_tensors: tuple[BlobTensor, ...]  # placed
    experts: Mapping[tuple[int, StackedTensor], tuple[Place, ...]]  # in the order of `projections`
    constants: Mapping[int, tuple[tuple[Place, bytes], ...]]  # expert → its dropped companions

    @property
    def blob_tensors(self) -> tuple[BlobTensor, ...]:
        return self.all_tensors

    def places(
        self, index: int, packed: Sequence[memoryview]
    ) -> Iterator[tuple[Place, memoryview]]:
        for tensor, view in zip(self.stacked, packed, strict=True):
            assert isinstance(tensor.source, Cut)
            places = self.experts[index, tensor.source.tensor]
            size = len(view) // len(places)
            for i, place in enumerate(places):
                yield place, view[i * size : (i + 1) * size]
        for place, data in self.constants[index]:
            yield place, memoryview(data)

    def header(self, digests: dict[str, str], expert_digests: dict[str, list[str]]) -> bytes:
        return shard_header(self.blob_tensors)
