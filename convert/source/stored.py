"""A finished output as the source of another one."""

from dataclasses import dataclass
from pathlib import Path

from kconvert.convert.source.local import LocalSource, stamp
from kconvert.layouts.manifest import Manifest
from kconvert.layouts.model import Model
from kconvert.layouts.stored.checkpoint import read_stored


@dataclass(frozen=True, kw_only=True)
class StoredSource(LocalSource):
    """The blobs of an output; `name` and `commit` are those that its manifest says."""

    manifest: Manifest
    cast: bool  # its scales were cast to bfloat16

    @property
    def verified(self) -> bool:
        """What is read is compared with its digest."""
        return True

    def finished(self, path: str, fingerprint: str) -> Path | None:
        entry = self.manifest.files.get(path)
        return self.path(path) if entry and entry.fingerprint == fingerprint else None


def open_stored(folder: Path) -> tuple[StoredSource, Model]:
    """Read manifest, headers and small files of the output in `folder`.

    Raises UnfinishedOutputError if it is no output or only a part of one, CheckpointError if a file
    is missing or was changed.
    """
    stored = read_stored(folder)
    manifest = stored.output.manifest
    source = StoredSource(
        folder=folder,
        checkpoint=stored.checkpoint,
        contents={},  # the groups know their identities
        stamps={name: stamp(folder / name) for name in stored.checkpoint.shards},
        warnings=(),
        oids=None,
        name=manifest.repo,
        commit=manifest.commit,
        manifest=manifest,
        cast=stored.cast,
    )
    return source, stored.model
