"""A source that is only read, to be compared with what was made from it. What has to be downloaded
lies in a folder of its own, apart from the output, two shards at a time."""

import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kconvert.convert.output.publish import needed_by_device
from kconvert.convert.progress import Meter
from kconvert.convert.source import hub_name, open_hub, revision_of
from kconvert.convert.source.local import read_local
from kconvert.convert.source.protocol import Deliveries, Source
from kconvert.layouts.errors import NoSpaceError, OptionError

_PREFIX = f".kconvert-validate-{socket.gethostname()}-"


@dataclass(frozen=True)
class Comparison:
    """A source that was opened; `work_dir`: where shards are downloaded to. None: they are here."""

    source: Source
    work_dir: Path | None

    @contextmanager
    def deliveries(
        self, order: list[set[str]], downloaded: Callable[[int], None]
    ) -> Iterator[Deliveries]:
        """The shards of one job after another; `downloaded` is told the bytes as they come. Raises
        NoSpaceError if they do not fit, and what `Source.deliveries` does."""
        meter = _Told(downloaded)
        if self.work_dir is None:
            with self.source.deliveries(order, Path(), meter) as shards:
                yield shards
            return
        with _folder_in(self.work_dir) as work:
            for folder, needed in needed_by_device(work, self._sizes(order, work)).items():
                free = shutil.disk_usage(folder).free
                if needed > free:
                    raise NoSpaceError(
                        f"{self.work_dir} has {free:,} bytes free, {needed:,} are needed for the"
                        " shards that are held at a time: give another --work-dir."
                    )
            with self.source.deliveries(order, work, meter) as shards:
                yield shards

    def _sizes(self, order: list[set[str]], work: Path) -> dict[str, int]:
        return {str(path): size for path, size in self.source.disk_for(order, work).items()}


class _Told(Meter):
    """A meter that passes on what is downloaded."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        super().__init__()
        self._tell = tell

    def add(self, stage: str, nbytes: int) -> None:
        super().add(stage, nbytes)
        if stage == "download":
            self._tell(nbytes)


def open_comparison(
    source: str | Path,
    output: Path,
    made_from: tuple[str | None, str | None],
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
    work_dir: Path | None = None,
    verify: bool = False,
) -> Comparison:
    """The source of a comparison with `output`: a folder, or a repository of the Hub at `revision`.
    If none is given, at the commit that the output was `made_from`, if it is the same repository.

    Raises CheckpointError, UnavailableError; OptionError for options that do not fit.
    """
    name = hub_name(str(source))
    if name is None:
        if Path(source).is_dir() and (revision or cache_dir or work_dir):
            raise OptionError(
                f"{source} is a folder here: --revision, --cache-dir and --work-dir are for a"
                " repository of the Hub."
            )
        return Comparison(read_local(Path(source), verify), None)
    repo, commit = made_from
    revision = revision_of(name, revision) or (commit if repo == name.repo else None)
    if work_dir is not None:
        _refuse_unfit(work_dir, output)
    opened = open_hub(name.repo, revision, cache_dir)
    cache = opened.folder.parents[2]  # of …/models--org--name/snapshots/commit
    if work_dir is None:
        _refuse_unfit(cache, output)
    return Comparison(opened, work_dir or cache)


def _refuse_unfit(work_dir: Path, output: Path) -> None:
    if not work_dir.is_dir():
        raise OptionError(f"--work-dir {work_dir} is no folder here: make it, or give another.")
    if work_dir.resolve().is_relative_to(output.resolve()):
        raise OptionError(
            f"{work_dir} lies in the output, which is only read: give another --work-dir."
        )


@contextmanager
def _folder_in(parent: Path) -> Iterator[Path]:
    """A new folder, deleted after use; what killed runs of this machine left is deleted first. A
    lock on each tells whether its run lives."""
    for left in parent.glob(f"{_PREFIX}*"):
        fd = _lock(left)
        if fd is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(fd)
    with tempfile.TemporaryDirectory(
        prefix=_PREFIX, dir=parent, ignore_cleanup_errors=True
    ) as made:
        fd = _lock(Path(made))  # None: nobody can have locks here
        try:
            yield Path(made)
        finally:
            if fd is not None:
                os.close(fd)


def _lock(folder: Path) -> int | None:
    """Lock a folder: the descriptor to close, or None if another run has it."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd
