"""The safetensors container: a header, read and checked without touching the data, or written.

Format: 8 bytes little-endian header length N, N bytes of JSON, then the data
(https://huggingface.co/docs/safetensors). Stricter than the safetensors library where it is
silent (duplicate keys) and plainer where it misnames a fault (LFS pointers, truncation).
"""

import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from kconvert.layouts.errors import CheckpointError, TruncatedFileError

# Bytes an element, widest last: safetensors writes wider dtypes first, in this order reversed.
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "C64": 8, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
_DTYPES = list(DTYPE_BYTES)
# The safetensors library's cap is 100 MB, from which a hostile author can make 2.3 GB of objects.
# K2.6's largest header has 0.5 MB; all its 208,550 tensors in one file would have 31.
MAX_HEADER_BYTES = 32 << 20
_MAX_TABLES = 1 << 20  # objects and lists take 72 bytes each or more, and as few as 2 in the file
_LFS_POINTER = b"version https://git-lfs"


class TensorEntry(NamedTuple):
    """One tensor of a header. `start` is the byte offset in the FILE, not in its data part."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class Header(NamedTuple):
    """A checked header: tensors tile the data part exactly, in offset order."""

    metadata: dict[str, str]
    tensors: dict[str, TensorEntry]
    data_start: int
    raw: bytes  # length prefix and JSON as they lie in the file


def read_header(path: Path) -> Header:
    """Read and check the header of the safetensors file at `path`; its data is not read.

    Raises CheckpointError naming the file and, if there is one, the tensor at fault;
    OSError as the system gives it.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # or a pipe would keep us waiting
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is not a regular file.")
        return header_from(lambda count: os.pread(fd, count, 0), status.st_size, str(path))
    finally:
        os.close(fd)


def header_from(read_first: Callable[[int], bytes], size: int, file: str) -> Header:
    """The checked header of a file of `size` bytes, of which `read_first(n)` gives the first n.

    Raises CheckpointError if it does not start as a safetensors file does, or as `parse_header`
    does.
    """
    first = read_first(64)
    if size == 0:
        raise TruncatedFileError(f"{file} is empty: download it again.")
    refuse_lfs_pointer(file, first)
    if size < 8:
        raise TruncatedFileError(
            f"{file} is truncated: {size} bytes found, at least 8 expected; download it again."
        )
    length = int.from_bytes(first[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file} is no safetensors file: its header claims {length:,} bytes, at most"
            f" {MAX_HEADER_BYTES:,} are allowed; download it again."
        )
    if length > size - 8:
        raise TruncatedFileError(
            f"{file} is truncated: {size:,} bytes found, {8 + length:,} expected of its header"
            " alone; download it again."
        )
    return parse_header(read_first(8 + length), size, file)


class Described(Protocol):
    """A tensor as a header lists it."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


D = TypeVar("D", bound=Described)


def file_order(tensors: Iterable[D]) -> list[D]:
    """The order of safetensors' own writer: wider dtype first, then by name."""
    return sorted(tensors, key=lambda t: (-_DTYPES.index(t.dtype), t.name))


def shard_header(tensors: Iterable[Described]) -> bytes:
    """A header as safetensors' own writer makes it: no metadata, padded with spaces to 8 bytes."""
    table, offset = {}, 0
    for tensor in tensors:
        end = offset + DTYPE_BYTES[tensor.dtype] * prod(tensor.shape)
        table[tensor.name] = {
            "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [offset, end],
        }  # fmt: skip
        offset = end
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def refuse_lfs_pointer(file: Path | str, first: bytes) -> None:
    """Raise CheckpointError if a file that begins with `first` is a Git LFS pointer."""
    if first.startswith(_LFS_POINTER):
        raise CheckpointError(
            f"{file} is a Git LFS pointer, not the file itself: fetch it with `git lfs pull`."
        )


def decode_json(
    raw: bytes,
    hook: Callable[[list[tuple[str, object]]], object] | None = None,
    parse_float: Callable[[str], object] = float,
) -> Any:
    """The JSON value in `raw`; ValueError or RecursionError if it cannot be read."""
    if raw.count(b"{") + raw.count(b"[") > _MAX_TABLES:
        raise ValueError(f"more than {_MAX_TABLES:,} objects and lists")
    return json.loads(raw.decode("utf-8"), object_pairs_hook=hook, parse_float=parse_float)


def parse_header(raw: bytes, file_size: int, file: str) -> Header:
    """Check `raw` (length prefix and JSON) against a file of `file_size` bytes named `file`.

    Raises CheckpointError for anything that is not a header whose tensors tile the data exactly.
    """
    try:
        table = decode_json(raw[8:], _unique, str)  # a header has no numbers but integers
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON and duplicate keys alike
        reason = str(error).partition(";")[0]  # Python's own advice follows there
        raise CheckpointError(f"{file} has a header that cannot be read: {reason}.") from None
    if not isinstance(table, dict):
        raise CheckpointError(f"{file} has a header that is not a JSON object.")
    metadata = table.pop("__metadata__", None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{file} has a __metadata__ that is not a map of strings to strings.")
    data_start = len(raw)
    # JSON's true is 1 to Python, as a key of a dict too.
    sizes: _Sizes | None = None if b"true" in raw or b"false" in raw else {}
    tensors = sorted(
        (_entry(file, data_start, name, info, sizes) for name, info in table.items()),
        key=itemgetter(3, 4),  # a zero-size tensor comes before its neighbour
    )
    expected = data_start
    for tensor in tensors:
        if tensor.start != expected:
            kind = "a hole" if tensor.start > expected else "an overlap"
            raise CheckpointError(
                f"{file} has {kind} before tensor {tensor.name}: its data starts at byte"
                f" {tensor.start:,}, expected {expected:,}."
            )
        expected += tensor.nbytes
    if expected != file_size:
        short = file_size < expected
        kind = "truncated" if short else "too long"
        raise (TruncatedFileError if short else CheckpointError)(
            f"{file} is {kind}: {file_size:,} bytes found, {expected:,} expected from its header;"
            " download it again."
        )
    return Header(metadata, {t.name: t for t in tensors}, data_start, raw)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        twice = next(key for key, count in Counter(k for k, _ in pairs).items() if count > 1)
        raise ValueError(f"key {twice!r} stands there twice")
    return table


# (dtype, *shape) of tensors that were checked → dtype, shape and bytes: thousands are alike.
_Sizes = dict[tuple[Any, ...], tuple[str, tuple[int, ...], int]]


def _entry(file: str, data_start: int, name: str, info: Any, sizes: _Sizes | None) -> TensorEntry:
    if sizes:
        try:
            start, end = info["data_offsets"]
            dtype, shape, nbytes = sizes[(info["dtype"], *info["shape"])]
            sound = type(start) is type(end) is int and len(info) == 3 and name.isascii()
            if sound and end - start == nbytes and 0 <= start < 1 << 62:
                return TensorEntry(name, dtype, shape, data_start + start, nbytes)
        except (KeyError, TypeError, ValueError):
            pass  # what is wrong with it is said below
    entry = _checked_entry(file, data_start, name, info)
    if sizes is not None:
        sizes[(entry.dtype, *entry.shape)] = entry.dtype, entry.shape, entry.nbytes
    return entry


def _checked_entry(file: str, data_start: int, name: str, info: object) -> TensorEntry:
    if not (name.isascii() or name == name.encode("utf-8", "replace").decode("utf-8")):
        raise CheckpointError(f"{file} has a tensor name that is not valid Unicode: {name!a}.")
    if not isinstance(info, dict) or info.keys() != {"dtype", "shape", "data_offsets"}:
        found = sorted(info) if isinstance(info, dict) else type(info).__name__
        raise CheckpointError(
            f"{file}, tensor {name}: expected the keys dtype, shape and data_offsets,"
            f" found {found}."
        )
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    itemsize = DTYPE_BYTES.get(dtype) if isinstance(dtype, str) else None
    if itemsize is None:
        raise CheckpointError(
            f"{file}, tensor {name}: dtype {dtype!r} is not one of {', '.join(DTYPE_BYTES)}."
        )
    if not _naturals(shape):
        raise CheckpointError(f"{file}, tensor {name}: shape {shape!r:.80} is not a list of sizes.")
    if not _naturals(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{file}, tensor {name}: data_offsets {offsets!r:.80} are not two byte offsets."
        )
    start, end = offsets
    nbytes = itemsize * prod(shape)
    if end - start != nbytes:
        raise CheckpointError(
            f"{file}, tensor {name}: {dtype} {shape} takes {nbytes:,} bytes,"
            f" its data_offsets give {end - start:,}."
        )
    return TensorEntry(name, dtype, tuple(shape), data_start + start, nbytes)


def _naturals(values: object) -> bool:
    """Whether `values` is a short list of integers 0 ≤ v < 2**63."""
    if not isinstance(values, list) or len(values) > 16:
        return False
    # A loop, as a generator takes twice as long; `type`, as JSON's true is an int to Python.
    for value in values:  # noqa: SIM110
        if type(value) is not int or not 0 <= value < 1 << 63:
            return False
    return True
