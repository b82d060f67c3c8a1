"""kconvert.json: what an output holds, written last, and the proof that it is all there."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from kconvert.layouts.blob import FORMAT_VERSION, digest
from kconvert.layouts.checkpoint import read_json
from kconvert.layouts.errors import CheckpointError, OutputError

MANIFEST_NAME = "kconvert.json"
WORK_FOLDER = ".kconvert"


@dataclass(frozen=True)
class FileEntry:
    """A file of the output. `digest` (xxh3_128) is of the whole of a small file and of the header
    of a blob, which holds the digests of the rest; `fingerprint` is a blob's."""

    bytes: int
    digest: str
    fingerprint: str | None = None


@dataclass(frozen=True)
class Manifest:
    """The whole output: what it was made for, from what, and every file of it."""

    layout: str
    tp: int
    ep: int
    complete: bool  # every blob of the model is there; vision apart where it was left out
    text_only: bool
    repo: str | None
    commit: str | None
    files: dict[str, FileEntry]


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest's bytes: the same for the same content; the last key is its own digest."""
    table = {"format": FORMAT_VERSION, **asdict(manifest)}
    table["files"] = {name: asdict(entry) for name, entry in sorted(manifest.files.items())}
    return json.dumps({**table, "digest": _own_digest(table)}, indent=1).encode() + b"\n"


def read_manifest(output: Path) -> Manifest:
    """The manifest of the folder `output`; OutputError where there is none or it was changed."""
    path = output / MANIFEST_NAME
    if not path.is_file():
        raise OutputError(
            f"{output} has no {MANIFEST_NAME}: it is not a finished output of `kconvert convert`;"
            " run the conversion (again) to finish it."
        )
    try:
        table = read_json(path)
    except CheckpointError as error:
        raise OutputError(str(error)) from None
    try:
        own = table.pop("digest")
        version = table.pop("format")
        if version != FORMAT_VERSION:
            raise OutputError(f"{path} has format {version}, this version reads {FORMAT_VERSION}.")
        if own != _own_digest({"format": version, **table}):
            raise OutputError(f"{path} was changed after it was written: its digest disagrees.")
        files = {name: FileEntry(**entry) for name, entry in table.pop("files").items()}
        manifest = Manifest(**table, files=files)
        if not 1 <= manifest.ep <= manifest.tp or manifest.tp % manifest.ep:
            raise ValueError(f"tp {manifest.tp} and ep {manifest.ep}")
    except OutputError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise OutputError(f"{path} is not a manifest of kconvert ({error}).") from None
    return manifest


def _own_digest(table: dict[str, object]) -> str:
    return digest(json.dumps(table, sort_keys=True).encode())
