"""What a whole output will hold, in short: enough to write the manifest without the source.

Every run leaves it in the work folder, so that `kconvert finish` can end what several machines
began. The same source and options give the same bytes, whichever share wrote them.
"""

import json
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from kconvert.layouts.blob import COMMON_FOLDER, digest, read_blob
from kconvert.layouts.errors import OutputError, UnfinishedOutputError
from kconvert.layouts.manifest import WORK_FOLDER, FileEntry, Manifest, read_manifest
from kconvert.layouts.model import VISION

OUTLINE_NAME = "outline.json"
EXPORT_RECORD = "export.json"  # what a folder is the export of: in its work folder, where it stays
_VISION_BLOB = f"{COMMON_FOLDER}/{VISION}.safetensors"


@dataclass(frozen=True)
class Outline:
    """What identifies an output, and its files."""

    layout: str
    tp: int
    ep: int
    text_only: bool
    repo: str | None
    commit: str | None
    revision: str | None  # as it was asked for
    blobs: dict[str, str | None]  # path → fingerprint; None if its shards were not here
    small_files: dict[str, str]  # name → digest
    former: tuple[
        str, ...
    ] = ()  # an earlier conversion's files that --overwrite removes at the end

    def encode(self) -> bytes:
        """As it lies in the work folder."""
        return json.dumps(asdict(self), indent=1, sort_keys=True).encode() + b"\n"

    def manifest(self, output: Path) -> Manifest:
        """The manifest of what lies in `output` now; complete if nothing is missing.

        Raises OutputError if a file there is not the one it should be.
        """
        files: dict[str, FileEntry] = {}
        for name, wanted in self.small_files.items():
            if (output / name).is_file():
                content = (output / name).read_bytes()
                files[name] = FileEntry(len(content), digest(content))
                _check(output / name, files[name].digest, wanted)
        for name, fingerprint in self.blobs.items():
            path = output / name
            if path.is_file():
                header, info = read_blob(path)
                size = path.stat().st_size
                files[name] = FileEntry(size, digest(header.raw), info.fingerprint)
                _check(path, info.fingerprint, fingerprint)
        expected = self.small_files.keys() | self.blobs.keys()
        # Vision may be missing if this or an earlier run was told to leave it out.
        text_only = self.text_only and _VISION_BLOB not in files
        if text_only:
            expected -= {_VISION_BLOB}
        return Manifest(
            layout=self.layout,
            tp=self.tp,
            ep=self.ep,
            complete=files.keys() >= expected,
            text_only=text_only,
            repo=self.repo,
            commit=self.commit,
            files=files,
        )

    def missing_blobs(self, output: Path) -> list[str]:
        """The blobs that a complete output has and `output` lacks."""
        left_out = {_VISION_BLOB} if self.text_only else set()
        return _missing(output, self.blobs.keys() - left_out)

    def missing_small_files(self, output: Path) -> list[str]:
        """The small files that a complete output has and `output` lacks."""
        return _missing(output, self.small_files.keys())


class Earlier(NamedTuple):
    """What manifest and outline tell about the conversions that an output has seen."""

    small_files: frozenset[str]  # their names
    fingerprints: dict[str, str]  # of blobs, by path, as far as they are known


def read_earlier(output: Path) -> Earlier:
    """What conversions have left in `output`, finished or not; nothing if there were none."""
    names: set[str] = set()
    fingerprints: dict[str, str | None] = {}
    with suppress(OutputError):
        files = read_manifest(output).files
        names |= {name for name, entry in files.items() if entry.fingerprint is None}
        fingerprints |= {name: entry.fingerprint for name, entry in files.items()}
    with suppress(OutputError):
        outline = read_outline(output)
        names |= outline.small_files.keys() | set(outline.former)
        fingerprints |= {name: found for name, found in outline.blobs.items() if found}
    return Earlier(
        # Small files lie at the top: a name that a file gives must not reach further.
        frozenset(name for name in names if "/" not in name and name not in ("", ".", "..")),
        {name: found for name, found in fingerprints.items() if found},
    )


def _missing(output: Path, names: Collection[str]) -> list[str]:
    return sorted(name for name in names if not (output / name).is_file())


def read_outline(output: Path) -> Outline:
    """What runs left in `output`; OutputError if none did."""
    path = output / WORK_FOLDER / OUTLINE_NAME
    try:
        table = json.loads(path.read_bytes())
        outline = Outline(**{**table, "former": tuple(table.get("former", ()))})
        if not isinstance(outline.blobs, dict) or not isinstance(outline.small_files, dict):
            raise TypeError
        return outline
    except (AttributeError, OSError, TypeError, ValueError):
        raise UnfinishedOutputError(
            f"{output} has no readable {WORK_FOLDER}/{OUTLINE_NAME}: no `kconvert convert` began"
            " there; run one."
        ) from None


def _check(path: Path, found: str, wanted: str | None) -> None:
    if wanted is not None and found != wanted:
        raise OutputError(
            f"{path} is not this conversion's file (fingerprint {found}, expected"
            f" {wanted}): delete it and run the conversion again."
        )
