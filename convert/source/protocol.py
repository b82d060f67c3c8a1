"""What a source of shards is: the converter takes a job's shards, and releases them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from kconvert.convert.progress import Meter
from kconvert.layouts.checkpoint import Checkpoint

INCOMING = "incoming"  # in the work folder: what is downloaded
WINDOW = 2  # shards that are held at once: one is converted while the next one comes


class Deliveries(Protocol):
    """The shards of a run's jobs, job after job: `take`, convert, `check`, publish, `release`."""

    def ready(self, job: int) -> bool:
        """Whether `take` would not wait."""

    def take(self, job: int) -> None:
        """Wait until a job's shards are there."""

    def path(self, shard: str) -> Path:
        """Where a taken shard lies."""

    def check(self, job: int) -> None:
        """Raise CheckpointError if a shard is not what it was when the plan was made."""

    def release(self, job: int, forget: Callable[[str], object]) -> None:
        """The job's blobs are published. `forget` is told the shards that no later job needs."""


class Source(Protocol):
    """A checkpoint that is ready to be converted."""

    @property
    def checkpoint(self) -> Checkpoint: ...

    @property
    def contents(self) -> dict[str, str]:
        """Shard → identity of its content."""

    @property
    def name(self) -> str | None:
        """The repository, of a Hub source."""

    @property
    def commit(self) -> str | None:
        """Its commit, of a Hub source."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences on what may be wrong with it."""

    @property
    def verified(self) -> bool:
        """Whether contents are compared with the hashes that they should have."""

    @property
    def folder(self) -> Path:
        """Where small files lie, and shards as far as they are there."""

    def path(self, name: str) -> Path:
        """A file in `folder`, with links followed."""

    def deliveries(
        self, order: list[set[str]], work: Path, meter: Meter
    ) -> AbstractContextManager[Deliveries]:
        """`order[i]`: the shards that job i needs. `work`: for what is downloaded."""

    def to_download(self, shards: set[str], work: Path) -> dict[str, int]:
        """Bytes that are still to be downloaded, by shard, for those that are not whole here."""

    def disk_for(self, order: list[set[str]], work: Path) -> dict[Path, int]:
        """Bytes that downloads for the jobs take on disk at one time, by the files they go into."""

    def finished(self, path: str, fingerprint: str) -> Path | None:
        """A file that is, byte for byte, what the output will have at `path`; None if there is
        none."""
