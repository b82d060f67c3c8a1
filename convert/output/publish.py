"""How a file gets its final name: written whole under a temporary one, synced, renamed.

What has a final name is therefore whole. One run works in an output at a time, and clears what
earlier ones left half-done.
"""

import contextlib
import errno
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kconvert.convert.output.lock import owned
from kconvert.convert.share import Share
from kconvert.layouts.errors import UnavailableError
from kconvert.layouts.manifest import WORK_FOLDER

_LOG_NAME = "runs.jsonl"
_PARTIAL = ".partial"
_PROBE = ".kconvert-probe"


@dataclass(frozen=True)
class Workspace:
    """Where a run works: the output, and its own part of the work folder if it is a share."""

    output: Path
    share: Share | None = None

    @property
    def name(self) -> str:
        """Of the share, if it is one."""
        return self.share.name if self.share else ""

    @property
    def work(self) -> Path:
        """For all that is not finished."""
        return self.work_in(self.output)

    def work_in(self, folder: Path) -> Path:
        """The same in a folder whose files cannot be renamed from `work`."""
        return folder / WORK_FOLDER / self.name


@contextlib.contextmanager
def working_in(workspace: Workspace) -> Iterator[None]:
    """Make the output, own the workspace, and clear what earlier runs left half-done; the run is
    logged."""
    new = not workspace.output.exists()
    workspace.work.mkdir(parents=True, exist_ok=True)
    if new:
        with contextlib.suppress(OSError):  # it need not be ours to read
            _sync_folder(workspace.output.parent)
    _sync_folder(
        workspace.output
    )  # a run that was killed may have made folders and not synced them
    with owned(workspace.output / WORK_FOLDER, workspace.share):
        _clear(workspace)
        started, outcome = time.time(), "done"
        try:
            yield
        except BaseException as error:
            outcome = type(error).__name__
            raise
        finally:
            _clear(workspace)
            _log(workspace.output / WORK_FOLDER, started, outcome)
    if workspace.share:
        with contextlib.suppress(OSError):  # what was downloaded may lie there
            workspace.work.rmdir()


def _log(work: Path, started: float, outcome: str) -> None:
    entry = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(started)),
        "seconds": round(time.time() - started, 3),
        "host": socket.gethostname(),
        "command": sys.argv,
        "outcome": outcome,
    }
    # The log must not turn a finished conversion into a failed one (a full disk, say).
    with contextlib.suppress(OSError), open(work / _LOG_NAME, "a") as file:
        file.write(json.dumps(entry) + "\n")


def _clear(workspace: Workspace) -> None:
    """Delete what was not finished here: of this share and of shares of another count, or of any
    where this run is no share. None of those is at work: the owner files say so."""
    folders = [path for path in workspace.output.glob("*") if path.name != WORK_FOLDER]
    for folder in (workspace.output, *(path for path in folders if path.is_dir())):
        work = workspace.work_in(folder)
        for path in (*work.glob(f"*{_PARTIAL}"), *folder.glob(f"{_PROBE}{workspace.name}*")):
            path.unlink(missing_ok=True)
        siblings = f"-of-{workspace.share.count}" if workspace.share else ""
        for path in (folder / WORK_FOLDER).glob("share-*-of-*"):
            if not (siblings and path.name.endswith(siblings)):
                shutil.rmtree(path)
        if folder != workspace.output:
            for emptied in (work, folder / WORK_FOLDER):
                with contextlib.suppress(OSError):  # somebody else's files may lie there
                    emptied.rmdir()


def check_space(output: Path, sizes: dict[str, int]) -> None:
    """Raise UnavailableError unless the files `sizes` (path → bytes) fit, on each file system."""
    for folder, needed in needed_by_device(output, sizes).items():
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise UnavailableError(
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


def staging_path(workspace: Workspace, name: str) -> Path:
    """The temporary name for the file `name`: in OUT/.kconvert, or in a `.kconvert` of its own
    folder where a rename from there would cross file systems or mounts (a disk a rank)."""
    folder, work = (workspace.output / name).parent, workspace.work
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        _sync_folder(workspace.output)
    if not _can_rename(work, folder / f"{_PROBE}{workspace.name}"):
        work = workspace.work_in(folder)
        work.mkdir(parents=True, exist_ok=True)
    return work / (name.replace("/", "--") + _PARTIAL)


def _can_rename(work: Path, there: Path) -> bool:
    """Whether a file can be renamed from `work` to `there`: tried, as devices do not tell."""
    probe = work / f"probe{_PARTIAL}"
    probe.touch()
    try:
        os.rename(probe, there)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return False
    there.unlink()
    return True


def publish(staged: Path, final: Path) -> None:
    """Give a written and synced file its final name, durably."""
    os.rename(staged, final)
    _sync_folder(final.parent)


def withdraw(path: Path) -> None:
    """Delete a file, durably: before what it tells of is changed."""
    path.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file(workspace: Workspace, name: str, content: bytes) -> None:
    """Publish a small file; one that is there with the same bytes is left as it is."""
    final = workspace.output / name
    if final.is_file() and final.read_bytes() == content:
        return
    staged = staging_path(workspace, name)
    with open(staged, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    publish(staged, final)


def remove(output: Path, paths: Iterable[Path]) -> None:
    """Delete files of `output`, and the folders that are empty then."""
    for path in paths:
        path.unlink()
        if path.parent != output and not path.parent.is_symlink():
            with contextlib.suppress(OSError):  # not empty, or a mount
                path.parent.rmdir()
