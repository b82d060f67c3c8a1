"""kconvert.json: what an output holds, written last, and the proof that it is all there."""

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from kconvert.layouts.blob import FORMAT_VERSION, digest
from kconvert.layouts.checkpoint import read_json
from kconvert.layouts.errors import (
    CheckpointError,
    NewerFormatError,
    OutputError,
    UnfinishedOutputError,
)
from kconvert.layouts.sharding import MOST

MANIFEST_NAME = "kconvert.json"
WORK_FOLDER = ".kconvert"


@dataclass(frozen=True)
class FileEntry:
    """A file of the output. `digest` (xxh3_128) is of the whole of a small file and of the header
    of a blob, which holds the digests of the rest; `fingerprint` is a blob's."""

    bytes: int
    digest: str
    fingerprint: str | None = None
    unknown: dict[str, Any] = field(default_factory=dict)  # keys of a later writer


@dataclass(frozen=True)
class Manifest:
    """The whole output: what it was made for, from what, and every file of it."""

    layout: str
    tp: int
    ep: int
    complete: bool  # every blob of the model is there, vision aside if it was left out
    text_only: bool
    repo: str | None
    commit: str | None
    files: dict[str, FileEntry]
    format: int = FORMAT_VERSION
    unknown: dict[str, Any] = field(default_factory=dict)  # keys of a later writer


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest's bytes: the same for the same content; the last key is its own digest."""
    files = {name: _flat(entry) for name, entry in sorted(manifest.files.items())}
    table = {"format": manifest.format, **_flat(manifest), "files": files}
    return json.dumps({**table, "digest": _own_digest(table)}, indent=1).encode() + b"\n"


def read_manifest(output: Path) -> Manifest:
    """The manifest of the folder `output`.

    Raises UnfinishedOutputError if there is none, NewerFormatError if a later version wrote it,
    OutputError if it was changed or is none of ours.
    """
    path = output / MANIFEST_NAME
    if not output.is_dir():
        raise UnfinishedOutputError(
            f"{output} is not a folder: give an output of `kconvert convert`."
        )
    if not path.is_file():
        raise UnfinishedOutputError(
            f"{output} has no {MANIFEST_NAME}: it is not a finished output of `kconvert convert`;"
            " run the conversion (again) to finish it."
        )
    try:
        table = read_json(path)
    except CheckpointError as error:
        raise OutputError(str(error)) from None
    try:
        own, version = table.pop("digest"), table["format"]
        if type(version) is int and version > FORMAT_VERSION:
            raise NewerFormatError(
                f"{path} has format {version}, this version reads up to {FORMAT_VERSION}: use the"
                " version that wrote it, or convert again."
            )
        if own != _own_digest(table):
            raise OutputError(
                f"{path} was changed after it was written: its digest disagrees; copy it again, or"
                " convert again."
            )
        entries = table.pop("files").items()
        files = {name: FileEntry(**_known(FileEntry, entry)) for name, entry in entries}
        manifest = Manifest(**_known(Manifest, table), files=files)
        _check(manifest)
    except OutputError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise OutputError(
            f"{path} is not a manifest of kconvert ({error}): copy it again, or convert again."
        ) from None
    return manifest


def _flat(record: FileEntry | Manifest) -> dict[str, Any]:
    """A record's fields, and beside them the keys that its reader did not know."""
    table = dict(vars(record))
    unknown: dict[str, Any] = table.pop("unknown")
    return table | unknown


def _known(kind: type[FileEntry | Manifest], table: dict[str, Any]) -> dict[str, Any]:
    """The fields of `kind` in `table`; all others as `unknown`."""
    names = {field.name for field in fields(kind)} - {"unknown"}
    unknown = {key: value for key, value in table.items() if key not in names}
    return {key: table[key] for key in table.keys() & names} | {"unknown": unknown}


def _check(manifest: Manifest) -> None:
    """Raise ValueError unless every field has a value it can have."""
    if type(manifest.format) is not int or manifest.format < 1:
        raise ValueError(f"format {manifest.format!r:.20}")
    tp, ep = manifest.tp, manifest.ep
    if type(tp) is not int or type(ep) is not int or not 1 <= ep <= tp <= MOST or tp % ep:
        raise ValueError(f"tp {tp!r:.20} and ep {ep!r:.20}")
    if not isinstance(manifest.layout, str):
        raise ValueError("layout")
    if type(manifest.complete) is not bool or type(manifest.text_only) is not bool:
        raise ValueError("complete and text_only")
    if not all(v is None or isinstance(v, str) for v in (manifest.repo, manifest.commit)):
        raise ValueError("repo and commit")
    for name, entry in manifest.files.items():
        # A name must stay inside the output: no other file may be read through it.
        if name.startswith("/") or "\0" in name or {"", ".", ".."} & set(name.split("/")):
            raise ValueError(f"file {name!r:.80}")
        if (
            type(entry.bytes) is not int
            or not isinstance(entry.digest, str)
            or not (entry.fingerprint is None or isinstance(entry.fingerprint, str))
        ):
            raise ValueError(f"the entry of {name!r:.80}")


def _own_digest(table: dict[str, object]) -> str:
    return digest(json.dumps(table, sort_keys=True).encode())
