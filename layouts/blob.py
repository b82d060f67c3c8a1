"""Blobs: safetensors files whose large tensors start on a page, with a digest for every tensor.

Order (FORMAT.md): tensors of whole pages first, in the order the runtime reads them, then
the rest, wider dtype first; the header is padded with spaces so that data starts at a page. The
metadata holds "format": "pt" and one JSON string "kconvert" (`BlobInfo`). Digests have a fixed
width, so a header's size is known before its digests are.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from kconvert.layouts.errors import NewerFormatError, OutputError
from kconvert.layouts.experts import W13_ROWS
from kconvert.layouts.header import DTYPE_BYTES, Header, read_header
from kconvert.layouts.quantization import SCHEMES, Quantization

FORMAT_VERSION = 1  # the one that is written, and the newest that is read
COMMON_VERSION = 1  # of a common blob's bytes; a rank's blob has its layout's version
PAGE = 4096
NO_DIGEST = "0" * 32
_DIGEST_BYTES = len(f'\\"{NO_DIGEST}\\",')  # in a list, in JSON that is a string in JSON


class BlobTensor(NamedTuple):
    """A tensor of a blob: `offset` counts from the start of the data part.

    `experts` > 0: stacked over that many experts, each contiguous and with its own digest.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    experts: int = 0


@dataclass(frozen=True)
class Sharding:
    """What a rank's blob says of how its experts were cut and packed."""

    layout: str
    rank: int
    tp: int
    ep: int
    quantization: dict[str, Any]  # as `described` makes it: Quantization's fields and scale_dtype
    w13_rows: str  # experts.W13_ROWS
    padding: object  # null: there is none
    dropped: dict[str, str]  # companions of the source that are not kept → their dtype

    def read_quantization(self, file: Path) -> Quantization:
        """`quantization` without its scale dtype; OutputError naming `file` if a later version
        wrote it."""
        table = {key: value for key, value in self.quantization.items() if key != "scale_dtype"}
        fields = set(Quantization._fields)
        if table.get("scheme") not in SCHEMES or not fields - {"bias"} <= table.keys() <= fields:
            raise OutputError(
                f"{file} says that its quantization is {self.quantization}, this version reads"
                f" {' and '.join(SCHEMES)} with {', '.join(sorted(fields))}: use the version that"
                " wrote it, or convert again."
            )
        return Quantization(**table)


@dataclass(frozen=True)
class BlobInfo:
    """A blob's metadata. `sharding` None: it is common to all ranks, layouts and parallelisms.

    `unknown`: keys that a later version wrote, kept as they are.
    """

    format: int
    repo: str | None
    commit: str | None
    content: str  # the identity of the source bytes it was made from
    fingerprint: str  # of `content` and of everything else that determines its bytes
    digests: dict[str, str]  # tensor → xxh3_128; of a stacked one, of its experts' digests
    expert_digests: dict[str, list[str]]  # stacked tensor → xxh3_128 of each local expert
    sharding: Sharding | None = None
    unknown: dict[str, Any] = field(default_factory=dict)

    def encode(self) -> str:
        """The metadata's JSON: one flat object."""
        table = dict(vars(self))
        sharding, unknown = table.pop("sharding"), table.pop("unknown")
        table |= {} if sharding is None else vars(sharding)
        return json.dumps(table | unknown, separators=(",", ":"), ensure_ascii=False)


def described(quantization: Quantization, scale_dtype: str) -> dict[str, Any]:
    """A quantization as a blob's metadata states it; `bias` is there only if it is true."""
    q = quantization
    return {
        "scheme": q.scheme, "group_size": q.group_size, "bits": q.bits,
        "zero_point": q.zero_point, **({"bias": True} if q.bias else {}),
        "scale_dtype": scale_dtype,
    }  # fmt: skip


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
    table: dict[str, object] = {"__metadata__": {"format": "pt", "kconvert": info.encode()}}
    for tensor in tensors:
        table[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [tensor.offset, tensor.offset + tensor.nbytes],
        }
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return len(text).to_bytes(8, "little") + text


def header_bytes(tensors: tuple[BlobTensor, ...], info: BlobInfo) -> int:
    """The header's length with all digests, from an `info` whose `expert_digests` are empty lists:
    writing them all out for each blob takes longer than the rest of a plan."""
    length = len(encode_header(tensors, info).rstrip(b" "))
    length += sum(_DIGEST_BYTES * t.experts - 1 for t in tensors if t.experts)
    return length + -length % PAGE


def blank_digests(tensors: Iterable[BlobTensor]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Digest tables of the right size, filled with zeros."""
    tensors = tuple(tensors)
    return (
        {tensor.name: NO_DIGEST for tensor in tensors},
        {tensor.name: [NO_DIGEST] * tensor.experts for tensor in tensors if tensor.experts},
    )


def new_digest() -> "xxhash.xxh3_128":
    """An xxh3_128 that is fed piece by piece."""
    return xxhash.xxh3_128()


def digest(data: bytes | memoryview) -> str:
    """xxh3_128 of `data` in hex. The streaming object is used, as it releases the GIL."""
    return xxhash.xxh3_128(data).hexdigest()


def digest_of_experts(digests: Iterable[str]) -> str:
    """The digest of a stacked tensor: over its experts' digests, in order."""
    return digest(b"".join(bytes.fromhex(value) for value in digests))


def read_blob(path: Path) -> tuple[Header, BlobInfo]:
    """Header and metadata of the blob at `path`.

    Raises CheckpointError if it is no sound safetensors file, OutputError if it is not ours.
    """
    header = read_header(path)
    return header, blob_info(header, str(path))


def blob_info(header: Header, file: str) -> BlobInfo:
    """The `kconvert` metadata of a blob's header; OutputError if it is absent, malformed or of a
    later format."""
    try:
        table = json.loads(header.metadata["kconvert"])
        if type(table["format"]) is int and table["format"] > FORMAT_VERSION:
            raise NewerFormatError(
                f"{file} has format {table['format']}, this version reads up to {FORMAT_VERSION}:"
                " use the version that wrote it, or convert again."
            )
        info = _parsed(table)
    except OutputError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        raise OutputError(
            f"{file} was not written by kconvert, or is damaged: its metadata is not readable."
        ) from None
    if info.sharding and (info.sharding.w13_rows, info.sharding.padding) != (W13_ROWS, None):
        raise OutputError(
            f"{file} has w13_rows {info.sharding.w13_rows!r:.40} and padding"
            f" {info.sharding.padding!r:.40}, this version reads {W13_ROWS!r} without padding."
        )
    return info


_SHARDING = tuple(field.name for field in fields(Sharding))
_COMMON = tuple(
    field.name for field in fields(BlobInfo) if field.name not in ("sharding", "unknown")
)


def _parsed(table: dict[str, Any]) -> BlobInfo:
    """Raises KeyError, TypeError or ValueError unless every field is what it should be."""
    common = {name: table.pop(name) for name in _COMMON}
    sharding = None
    if "rank" in table:
        sharding = Sharding(**{name: table.pop(name) for name in _SHARDING})
        _check_sharding(sharding)
    info = BlobInfo(**common, sharding=sharding, unknown=table)
    if not (
        type(info.format) is int
        and info.format >= 1
        and isinstance(info.fingerprint, str)
        and all(value is None or isinstance(value, str) for value in (info.repo, info.commit))
    ):
        raise TypeError("a field of another type")
    lists = [list(info.digests.values()), *info.expert_digests.values()]
    for value in [info.fingerprint, info.content, *(v for values in lists for v in values)]:
        if len(bytes.fromhex(value)) != len(NO_DIGEST) // 2:
            raise ValueError("digest")
    return info


def _check_sharding(sharding: Sharding) -> None:
    if not (
        all(type(value) is int for value in (sharding.rank, sharding.tp, sharding.ep))
        and isinstance(sharding.layout, str)
        and isinstance(sharding.quantization, dict)
        and isinstance(sharding.dropped, dict)
    ):
        raise TypeError("a field of another type")
    if not (1 <= sharding.ep <= sharding.tp and sharding.tp % sharding.ep == 0):
        raise ValueError("tp and ep")
    if not 0 <= sharding.rank < sharding.tp:
        raise ValueError("rank")


def rank_folder(rank: int, tp: int) -> str:
    """The name of the folder with one rank's blobs."""
    return f"rank-{rank:05}-of-{tp:05}"


COMMON_FOLDER = "common"
