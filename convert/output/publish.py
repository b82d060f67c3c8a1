"""How a file gets its final name: written whole under a temporary one, synced, renamed.

What has a final name is therefore whole. One run works in an output at a time, and clears what
earlier ones left half-done. Nothing is renamed or deleted without a look at who owns the output.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kconvert.convert.output.disk import naming, read_file, sync_folder
from kconvert.convert.output.lock import Owner, owned
from kconvert.convert.output.runlog import log_run
from kconvert.convert.share import Share
from kconvert.layouts.errors import NoSpaceError
from kconvert.layouts.manifest import WORK_FOLDER

PROBE = ".kconvert-probe"  # names of test files begin with it; they are no part of an output
_PARTIAL = ".partial"
_FICLONE = 0x40049409  # linux/fs.h


@dataclass(frozen=True)
class Workspace:
    """Where a run works: the output, and its own part of the work folder if it is a share."""

    output: Path
    share: Share | None = None

    @property
    def name(self) -> str:
        """The share's, if it is one."""
        return self.share.name if self.share else ""

    @property
    def work(self) -> Path:
        """The folder for everything that is not finished."""
        return self.work_in(self.output)

    def work_in(self, folder: Path) -> Path:
        """The same in a folder whose files cannot be renamed from `work`."""
        return folder / WORK_FOLDER / self.name


@dataclass(frozen=True)
class OwnedWorkspace(Workspace):
    """A workspace that this run owns: it may change the output."""

    owner: Owner = field(kw_only=True)

    @property
    def partial(self) -> str:
        """What this run's temporary names end with, and no other run's."""
        return f".{self.owner.token}{_PARTIAL}"

    @property
    def probe(self) -> str:
        """The name of a test file, which is deleted at once."""
        return f"{PROBE}{self.name}.{self.owner.token}"


@contextlib.contextmanager
def working_in(workspace: Workspace) -> Iterator[OwnedWorkspace]:
    """Make the output, own the workspace, and clear what earlier runs left half-done; the run is
    logged.

    Raises UnavailableError if another run is at work, or takes the output over.
    """
    new = not workspace.output.exists()
    workspace.work.mkdir(parents=True, exist_ok=True)
    if new:
        with contextlib.suppress(OSError):  # it need not be ours to read
            sync_folder(workspace.output.parent)
    # A run that was killed may have made folders and not synced them.
    sync_folder(workspace.output)
    with owned(workspace.output / WORK_FOLDER, workspace.share) as owner:
        _clear(workspace, f"*{_PARTIAL}", f"{PROBE}{workspace.name}*")
        _clear_others(workspace)
        mine = OwnedWorkspace(workspace.output, workspace.share, owner=owner)
        started, outcome = time.time(), "done"
        try:
            yield mine
        except BaseException as error:
            outcome = type(error).__name__
            if isinstance(error, OSError | KeyboardInterrupt):
                owner.check()  # if the output is lost, that is the cause
            raise
        finally:
            _clear(mine, f"*{mine.partial}", mine.probe)
            log_run(workspace.output / WORK_FOLDER, started, outcome)
    if workspace.share:
        with contextlib.suppress(OSError):  # what was downloaded may lie there
            workspace.work.rmdir()


def _clear(workspace: Workspace, partials: str, probes: str) -> None:
    """Delete unfinished files with names like these, and work folders that are empty then."""
    for folder in _folders(workspace):
        work = workspace.work_in(folder)
        for path in (*work.glob(partials), *folder.glob(probes)):
            path.unlink(missing_ok=True)
        if folder != workspace.output:
            for emptied in (work, folder / WORK_FOLDER):
                with contextlib.suppress(OSError):  # somebody else's files may lie there
                    emptied.rmdir()


def _clear_others(workspace: Workspace) -> None:
    """Delete what is left of runs that cannot work beside this one: shares of another count (of any
    if this run is no share), and runs that were no share. The owner files say that none lives."""
    siblings = f"-of-{workspace.share.count}" if workspace.share else ""
    for folder in _folders(workspace):
        for path in (folder / WORK_FOLDER).glob("share-*-of-*"):
            if not (siblings and path.name.endswith(siblings)):
                shutil.rmtree(path)
        for path in (*(folder / WORK_FOLDER).glob(f"*{_PARTIAL}"), *folder.glob(f"{PROBE}.*")):
            path.unlink(missing_ok=True)
        if folder != workspace.output:
            with contextlib.suppress(OSError):
                (folder / WORK_FOLDER).rmdir()


def _folders(workspace: Workspace) -> list[Path]:
    """Those in which temporary files may lie: the output, and mounts in it."""
    inner = (path for path in workspace.output.glob("*") if path.name != WORK_FOLDER)
    return [workspace.output, *(path for path in inner if path.is_dir())]


def check_space(output: Path, sizes: dict[str, int]) -> None:
    """Raise NoSpaceError unless the files `sizes` (path → bytes) fit, on each file system."""
    for folder, needed in needed_by_device(output, sizes).items():
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise NoSpaceError(
                f"{folder} has {free:,} bytes free, {needed:,} are needed"
                f" ({needed - free:,} more): free some space or choose another output."
            )


def needed_by_device(output: Path, sizes: dict[str, int]) -> dict[Path, int]:
    """Bytes to be written on each file system, by one folder that is on it."""
    needed: dict[int, int] = {}
    folder_of: dict[int, Path] = {}
    for name, size in sizes.items():
        folder = (output / name).parent
        while not folder.exists():
            folder = folder.parent
        device = folder.stat().st_dev
        folder_of.setdefault(device, folder)
        needed[device] = needed.get(device, 0) + size
    return {folder_of[device]: size for device, size in needed.items()}


def staging_path(workspace: OwnedWorkspace, name: str) -> Path:
    """The temporary name for the file `name`: in OUT/.kconvert, or in a `.kconvert` of its own
    folder if a rename from there would cross file systems or mounts (as with a disk for each
    rank)."""
    workspace.owner.check()
    folder, work = (workspace.output / name).parent, workspace.work
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(workspace.output)
    if not _can_rename(work / f"probe{workspace.partial}", folder / workspace.probe):
        work = workspace.work_in(folder)
        work.mkdir(parents=True, exist_ok=True)
    return work / (name.replace("/", "--") + workspace.partial)


def _can_rename(probe: Path, there: Path) -> bool:
    """Whether a file can be renamed from `probe` to `there`: tried, as devices do not tell."""
    probe.touch()
    try:
        os.rename(probe, there)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return False
    there.unlink()
    return True


def publish(workspace: OwnedWorkspace, staged: Path, final: Path) -> None:
    """Give a written and synced file its final name, durably."""
    workspace.owner.check()
    os.rename(staged, final)
    sync_folder(final.parent)


def link(workspace: OwnedWorkspace, source: Path, name: str) -> Path | None:
    """The temporary name of the file `name`, which is now a copy of `source` that takes no space
    (a reflink) or is that file itself (a hard link); None if the file system can do neither."""
    staged = staging_path(workspace, name)
    for way in (_reflink, os.link):
        try:
            way(source.resolve(), staged)
            return staged
        except OSError:  # another file system, or one that cannot, or a file we may not link
            staged.unlink(missing_ok=True)
    return None


def _reflink(source: Path, target: Path) -> None:
    with open(source, "rb") as theirs, open(target, "xb") as ours:
        fcntl.ioctl(ours, _FICLONE, theirs.fileno())
        os.fsync(ours.fileno())


def write_file(workspace: OwnedWorkspace, name: str, content: bytes) -> None:
    """Publish a small file, unless it is there with the same bytes."""
    final = workspace.output / name
    if final.is_file() and read_file(final) == content:
        return
    staged = staging_path(workspace, name)
    with naming(final), open(staged, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    publish(workspace, staged, final)


def remove(workspace: OwnedWorkspace, names: Iterable[str]) -> None:
    """Delete files of the output, durably, and the folders that are empty then."""
    paths = [workspace.output / name for name in names]
    for path in paths:
        workspace.owner.check()
        path.unlink(missing_ok=True)
    for folder in {path.parent for path in paths}:
        sync_folder(folder)
        if folder != workspace.output and not folder.is_symlink():
            with contextlib.suppress(OSError):  # not empty, or a mount
                folder.rmdir()
