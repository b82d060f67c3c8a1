"""A checkpoint in a repository of the Hub, at a commit."""

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from kconvert.convert.progress import Meter
from kconvert.convert.source.download import Arrivals
from kconvert.convert.source.protocol import INCOMING, WINDOW, Deliveries
from kconvert.convert.source.repo import Repo, open_repo
from kconvert.layouts.checkpoint import INDEX_NAME, Checkpoint, assemble
from kconvert.layouts.fields import CONFIG_NAME

T = TypeVar("T")
_REQUESTS = 8  # at once


@dataclass(frozen=True)
class HubSource:
    """A repository at a commit. Small files are in the cache, shards may be."""

    repo: Repo
    folder: Path
    checkpoint: Checkpoint
    contents: dict[str, str]  # shard → the Hub's hash
    keep_shards: bool
    warnings: tuple[str, ...] = ()
    verified: bool = True

    @property
    def name(self) -> str:
        return self.repo.name

    @property
    def commit(self) -> str:
        return self.repo.commit

    def path(self, name: str) -> Path:
        return (self.folder / name).resolve()

    def deliveries(
        self, order: list[set[str]], work: Path, meter: Meter
    ) -> AbstractContextManager[Deliveries]:
        return Arrivals(self.repo, self.checkpoint.shards, order, work, meter, self.keep_shards)

    def to_download(self, shards: set[str], work: Path) -> dict[str, int]:
        repo, incoming = self.repo, work / INCOMING
        return {
            name: repo.files[name].size
            - (0 if self.keep_shards else repo.bytes_there(incoming, name))
            for name in shards
            if repo.cached(name) is None
        }

    def disk_for(self, order: list[set[str]], work: Path) -> dict[Path, int]:
        missing = self.to_download(set().union(*order), work)
        if self.keep_shards:
            return {self.folder / name: size for name, size in missing.items()}
        # A job's shards lie there until it is published; by then the next job's are there too.
        together = [a | b for a, b in pairwise([*order, set()])]
        together.append(set(sorted(missing, key=lambda name: -missing[name])[:WINDOW]))
        most = max(together, key=lambda names: sum(missing.get(name, 0) for name in names))
        return {work / INCOMING / name: missing[name] for name in most if name in missing}

    def finished(self, path: str, fingerprint: str) -> Path | None:
        return None


def open_checkpoint(
    name: str, revision: str | None, cache_dir: Path | None = None, keep_shards: bool = False
) -> HubSource:
    """Get small files and headers of the Hub's repository `name` at `revision`.

    Raises CheckpointError and UnavailableError.
    """
    repo = open_repo(name, revision, cache_dir and cache_dir.absolute())
    folder = repo.fetch_checked(CONFIG_NAME).parent
    if INDEX_NAME in repo.files:
        repo.fetch_checked(INDEX_NAME)
    sizes = {file: entry.size for file, entry in repo.files.items()}
    checkpoint = assemble(
        folder,
        sizes,
        lambda names: dict(zip(names, _at_once(repo.read_header, names), strict=True)),
    )
    _at_once(repo.fetch_checked, checkpoint.small_files)
    if repo.offline:
        note = f"HF_HUB_OFFLINE: the {len(sizes)} files that the cache has are taken for all"
        checkpoint = replace(checkpoint, ignored=(*checkpoint.ignored, note))
    contents = {shard: repo.files[shard].oid for shard in checkpoint.shards}
    return HubSource(repo, folder, checkpoint, contents, keep_shards)


def _at_once(call: Callable[[str], T], names: Iterable[str]) -> list[T]:
    """The results of `call` for all names, several at once. Raises the first failure without
    waiting for the others."""
    pool = ThreadPoolExecutor(_REQUESTS)
    try:
        futures = [pool.submit(call, name) for name in names]
        for future in wait(futures, return_when=FIRST_EXCEPTION).done:
            future.result()
        return [future.result() for future in futures]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
