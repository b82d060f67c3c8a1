"""The source: a checkpoint folder's config, index and shard headers → an inventory of its tensors.

No weight is read. Everything hostile or broken is refused here, in one sentence, so that the
compiler and the validator work on facts.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kconvert.layouts.errors import CheckpointError, MissingFileError
from kconvert.layouts.fields import CONFIG_NAME
from kconvert.layouts.header import (
    Header,
    TensorEntry,
    decode_json,
    read_header,
    refuse_lfs_pointer,
)

INDEX_NAME = "model.safetensors.index.json"
# Weights in any container; everything else that lies beside config.json is a small file.
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
_SMALL_FILE_BYTES = 64 << 20
# What download tools leave beside a file that is not whole yet, or that they are still fetching.
_PARTIAL_MARKS = (
    ".aria2", ".aria2__temp", ".incomplete", ".part", ".partial", ".crdownload", ".download",
    ".!qb", ".!ut", ".lock", ".tmp",
)  # fmt: skip
_DOWNLOAD_STREAM = ":Zone.Identifier"  # Windows' note on where a file came from
_MAX_JSON_BYTES = 64 << 20  # K2.6's index has 25 MB, K3's 60


class SourceTensor(NamedTuple):
    """A tensor of the checkpoint: `nbytes` bytes at byte `start` of the file `shard`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    start: int
    nbytes: int

    def part(self, index: int) -> "SourceTensor":
        """Number `index` along the first axis: an expert's matrix in a tensor of all of them."""
        size = self.nbytes // self.shape[0]
        return self._replace(shape=self.shape[1:], start=self.start + index * size, nbytes=size)


def tensor_in(shard: str, entry: TensorEntry) -> SourceTensor:
    """A tensor that the header of the file `shard` lists."""
    name, dtype, shape, start, nbytes = entry
    return SourceTensor(name, dtype, shape, shard, start, nbytes)


@dataclass(frozen=True)
class Shard:
    """One weight file: its size and header in bytes, and the header as it lies there."""

    name: str
    size: int
    data_start: int
    header: bytes


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds, as its index and headers say."""

    config: dict[str, Any]
    tensors: dict[str, SourceTensor]  # those of the shards that are present
    absent: dict[str, str]  # tensor → shard, for shards the index names and the folder lacks
    unindexed: dict[str, str]  # tensor → shard that holds it, without the index saying so
    shards: dict[str, Shard]
    ignored: tuple[str, ...]  # sentences: unindexed tensors and files nobody reads
    small_files: tuple[str, ...]  # names, to be copied verbatim


def read_checkpoint(folder: Path) -> Checkpoint:
    """Inventory of the local checkpoint in `folder`.

    Raises CheckpointError if it is damaged or contradicts itself. Shards that the index names and
    the folder lacks are no error here (see `Checkpoint.absent`), unless all are missing.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: give a checkpoint's folder.")
    files = {
        path.name: path.stat().st_size if path.is_file() else None for path in folder.iterdir()
    }
    return assemble(folder, files, lambda names: {n: read_header(folder / n) for n in names})


def assemble(
    folder: Path,
    files: Mapping[str, int | None],
    read_headers: Callable[[list[str]], dict[str, Header]],
) -> Checkpoint:
    """Inventory of a checkpoint; `files` maps its files' names to their sizes in bytes (None: not
    a file).

    Only config and index have to lie in `folder`; headers come through `read_headers`, so that the
    shards may be elsewhere.
    """
    config = read_json(folder / CONFIG_NAME)
    # Hidden files are the tools' (.gitattributes, .cache), not the model's.
    files = {name: size for name, size in sorted(files.items()) if not name.startswith(".")}
    weight_map = read_index(folder, files)
    wanted = sorted(set(weight_map.values())) if weight_map else _only_shard(folder, files)
    sizes = {name: size for name in wanted if (size := files.get(name)) is not None}
    if not sizes:
        raise MissingFileError(f"{folder} holds none of the {len(wanted)} shards its index names.")
    headers = read_headers(list(sizes))
    tensors, absent, unindexed = take_inventory(weight_map, headers)
    small, skipped = _sort_files(folder, files, set(wanted))
    shards = {
        name: Shard(name, sizes[name], header.data_start, header.raw)
        for name, header in headers.items()
    }
    return Checkpoint(
        config=config,
        tensors=tensors,
        absent=absent,
        unindexed=unindexed,
        shards=shards,
        ignored=(*_unindexed_notes(unindexed), *skipped),
        small_files=tuple(small),
    )


def take_inventory(
    weight_map: dict[str, str] | None, headers: dict[str, Header]
) -> tuple[dict[str, SourceTensor], dict[str, str], dict[str, str]]:
    """Join an index (None: a single file without one) with its shards' headers.

    Returns the tensors of the present shards, tensor → shard for the absent ones, and tensor →
    shard for those that the index does not place there (they are ignored).
    """
    tensors: dict[str, SourceTensor] = {}
    if weight_map is None:
        weight_map = {name: shard for shard, header in headers.items() for name in header.tensors}
    absent = {name: shard for name, shard in weight_map.items() if shard not in headers}
    placed = dict.fromkeys(headers, 0)
    entries = {shard: header.tensors for shard, header in headers.items()}
    for name, shard in weight_map.items():
        if shard not in entries:
            continue
        entry = entries[shard].get(name)
        if entry is None:
            raise CheckpointError(
                f"{shard} lacks tensor {name}, which the index places there: index and shards"
                " belong to different checkpoints; download them again."
            )
        _, dtype, shape, start, nbytes = entry
        tensors[name] = SourceTensor(name, dtype, shape, shard, start, nbytes)
        placed[shard] += 1
    unindexed = {
        name: shard
        for shard, header in headers.items()
        if placed[shard] < len(header.tensors)
        for name in header.tensors
        if weight_map.get(name) != shard
    }
    return tensors, absent, unindexed


def _unindexed_notes(unindexed: dict[str, str]) -> list[str]:
    """A sentence for each shard with tensors that are ignored."""
    names: dict[str, list[str]] = {}
    for name, shard in unindexed.items():
        names.setdefault(shard, []).append(name)
    return [
        f"{shard}: {len(extra)} tensor(s) not in the index, {_some(extra)}"
        for shard, extra in names.items()
    ]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; CheckpointError if it is absent, too large, not UTF-8 or not an
    object."""
    if not path.is_file():
        raise MissingFileError(f"{path} is missing: {path.parent} is not a whole checkpoint.")
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise CheckpointError(
            f"{path} has {path.stat().st_size:,} bytes, at most {_MAX_JSON_BYTES:,} are read: it is"
            " damaged, or another file."
        )
    raw = path.read_bytes()
    refuse_lfs_pointer(path, raw)
    try:
        value = decode_json(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable as JSON: {error}.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object.")
    return value


def read_index(folder: Path, files: Collection[str]) -> dict[str, str] | None:
    """tensor → shard name of the folder's index; None if there is no index."""
    if INDEX_NAME not in files:
        return None
    weight_map = read_json(folder / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX_NAME} has no weight_map: download it again.")
    shards = weight_map.values()
    if set(map(type, shards)) != {str} or not all(map(_is_file_name, set(shards))):
        name, shard = next((n, s) for n, s in weight_map.items() if not _is_file_name(s))
        raise CheckpointError(
            f"{folder / INDEX_NAME} places tensor {name} in {shard!r}: expected the name of a"
            " file in the same folder."
        )
    return weight_map


def _is_file_name(shard: object) -> bool:
    """A shard is a file in this folder. It may be a link (as in every Hub cache), never a path."""
    return isinstance(shard, str) and shard not in ("", ".", "..") and not set(shard) & set("/\\\0")


def _only_shard(folder: Path, files: Collection[str]) -> list[str]:
    shards = [name for name in files if name.endswith(".safetensors")]
    if len(shards) != 1:
        found = f"{len(shards)} safetensors files" if shards else "no safetensors file"
        raise CheckpointError(
            f"{folder} has no {INDEX_NAME} and {found}: without an index exactly one is expected."
        )
    return shards


def _sort_files(
    folder: Path, files: dict[str, int | None], shards: set[str]
) -> tuple[list[str], list[str]]:
    """The small files to copy, and a sentence for each file or folder that is left alone.

    Raises CheckpointError if one of them shows that a download has not ended.
    """
    small, skipped = [], []
    for name, size in files.items():
        if name in shards or name == INDEX_NAME:
            continue
        mark = next((mark for mark in _PARTIAL_MARKS if name.lower().endswith(mark)), None)
        if mark and name[: -len(mark)] in files:
            raise CheckpointError(
                f"{folder / name} lies beside {name[: -len(mark)]}, whose download has not ended:"
                " finish it, or delete that file if the other is whole."
            )
        if size is None:
            skipped.append(f"{name}: not a file")
        elif mark:
            skipped.append(f"{name}: part of a download")
        elif name.endswith(_DOWNLOAD_STREAM):
            skipped.append(f"{name}: a note of Windows")
        elif Path(name).suffix in _WEIGHT_SUFFIXES:
            skipped.append(f"{name}: weights the index does not name")
        elif name.endswith(".index.json"):
            skipped.append(f"{name}: the index of other weights")
        elif size > _SMALL_FILE_BYTES:
            skipped.append(f"{name}: too large for a small file")
        else:
            small.append(name)
    return small, skipped


def _some(names: list[str]) -> str:
    """The first names of a list, for a sentence."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
