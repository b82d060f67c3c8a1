"""Blobs: safetensors files whose large tensors start on a page, with a digest for every tensor.

Order (DESIGN.md, Blobs): tensors of whole pages first, in the order the runtime reads them, then
the rest, wider dtype first; the header is padded with spaces so that data starts at a page. The
metadata holds "format": "pt" and one JSON string "kconvert" (`BlobInfo`). Digests have a fixed
width, so a header's size is known before its digests are.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import xxhash

from kconvert.layouts.errors import OutputError
from kconvert.layouts.header import DTYPE_BYTES, Header, read_header

FORMAT_VERSION = 1
PAGE = 4096
NO_DIGEST = "0" * 32


class BlobTensor(NamedTuple):
    """A tensor of a blob: `offset` counts from the start of the data part.

    `experts` > 0: stacked over that many experts, each contiguous, and digested one by one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    experts: int = 0


@dataclass(frozen=True)
class BlobInfo:
    """What a blob says of itself. `rank` None: common to all ranks."""

    format: int
    layout: str
    rank: int | None
    tp: int
    ep: int
    repo: str | None
    commit: str | None
    fingerprint: str
    digests: dict[str, str]  # tensor → xxh3_128, for stacked experts over their digests
    expert_digests: dict[str, list[str]]  # stacked tensor → xxh3_128 of each local expert


def lay_out(tensors: Iterable[BlobTensor]) -> tuple[BlobTensor, ...]:
    """Give tensors (in reading order) their offsets: whole pages first, then by dtype width."""

    def placement(tensor: BlobTensor) -> tuple[bool, int]:
        loose = tensor.nbytes % PAGE != 0
        return loose, -DTYPE_BYTES[tensor.dtype] if loose else 0

    placed, offset = [], 0
    for tensor in sorted(tensors, key=placement):  # a stable sort keeps the reading order
        placed.append(tensor._replace(offset=offset))
        offset += tensor.nbytes
    return tuple(placed)


def encode_header(tensors: Iterable[BlobTensor], info: BlobInfo) -> bytes:
    """The header as it lies in the file: length prefix, JSON, spaces up to the next page."""
    table: dict[str, object] = {
        "__metadata__": {
            "format": "pt",
            "kconvert": json.dumps(vars(info), separators=(",", ":"), ensure_ascii=False),
        }
    }
    for tensor in tensors:
        table[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [tensor.offset, tensor.offset + tensor.nbytes],
        }
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return len(text).to_bytes(8, "little") + text


def blank_digests(tensors: Iterable[BlobTensor]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Digest tables of the right size and without the digests, to learn a header's length."""
    tensors = tuple(tensors)
    return (
        {tensor.name: NO_DIGEST for tensor in tensors},
        {tensor.name: [NO_DIGEST] * tensor.experts for tensor in tensors if tensor.experts},
    )


def new_digest() -> "xxhash.xxh3_128":
    """An xxh3_128 to be fed piece by piece."""
    return xxhash.xxh3_128()


def digest(data: bytes | memoryview) -> str:
    """xxh3_128 of `data` in hex. The streaming object is used as it lets other threads run."""
    return xxhash.xxh3_128(data).hexdigest()


def digest_of_experts(digests: Iterable[str]) -> str:
    """The digest of a stacked tensor: over its experts' digests, in order."""
    return digest(b"".join(bytes.fromhex(value) for value in digests))


def read_blob(path: Path) -> tuple[Header, BlobInfo]:
    """Header and metadata of the blob at `path`.

    Raises CheckpointError where it is no sound safetensors file, OutputError where it is not ours.
    """
    header = read_header(path)
    return header, blob_info(header, str(path))


def blob_info(header: Header, file: str) -> BlobInfo:
    """The `kconvert` metadata of a blob's header; OutputError where it is absent or malformed."""
    try:
        info = BlobInfo(**json.loads(header.metadata["kconvert"]))
        _check_info(info)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        raise OutputError(
            f"{file} was not written by kconvert, or damaged: its metadata is not readable."
        ) from None
    if info.format != FORMAT_VERSION:
        raise OutputError(
            f"{file} has format {info.format}, this version reads {FORMAT_VERSION}:"
            " convert again or use the version that wrote it."
        )
    return info


def _check_info(info: BlobInfo) -> None:
    """Raise ValueError or TypeError unless every field can be what it should be."""
    if not (
        all(type(value) is int for value in (info.format, info.tp, info.ep))
        and all(isinstance(value, str) for value in (info.layout, info.fingerprint))
        and all(value is None or isinstance(value, str) for value in (info.repo, info.commit))
        and (info.rank is None or type(info.rank) is int)
    ):
        raise TypeError("a field of another type")
    if not (1 <= info.ep <= info.tp and info.tp % info.ep == 0):
        raise ValueError("tp and ep")
    if info.rank is not None and not 0 <= info.rank < info.tp:
        raise ValueError("rank")
    lists = [list(info.digests.values()), *info.expert_digests.values()]
    for value in [info.fingerprint, *(value for values in lists for value in values)]:
        if len(bytes.fromhex(value)) != len(NO_DIGEST) // 2:
            raise ValueError("digest")


def rank_folder(rank: int, tp: int) -> str:
    """The folder of one GPU's blobs."""
    return f"rank-{rank:05}-of-{tp:05}"


COMMON_FOLDER = "common"
