"""What is asked of the Hub: a repository's files at a commit, and their bytes.

Everything goes through huggingface_hub's own client, which reads HF_TOKEN, HF_ENDPOINT and
HF_HUB_OFFLINE itself. It checks sizes, not contents: that is done here (`oid_of`).
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
from huggingface_hub import (
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    try_to_load_from_cache,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

from kconvert.convert.source.endpoint import shown_endpoint
from kconvert.convert.source.hashes import oid_of
from kconvert.convert.source.retry import ContentError, Patience, TransferError
from kconvert.layouts.errors import CheckpointError, HubError, UnavailableError
from kconvert.layouts.fields import CONFIG_NAME
from kconvert.layouts.header import Header, header_from, read_header

_TIMEOUT = 30.0  # seconds without a byte; these calls have no limit of their own
_FIRST_BYTES = 1 << 20  # K2.6's headers have 0.4 MB: one request each
_XET = not constants.HF_HUB_DISABLE_XET and find_spec("hf_xet") is not None


class RemoteFile(NamedTuple):
    """A file of a repository. `oid`: sha256 of a large file, git's sha1 of a small one."""

    size: int
    oid: str


@dataclass(frozen=True)
class Repo:
    """The repository `name` at `commit`; `files` are those at its top."""

    name: str
    commit: str
    cache_dir: Path | None
    files: dict[str, RemoteFile]
    offline: bool = False  # all comes from the cache

    def cached(self, file: str) -> Path | None:
        """Where a file lies whole in huggingface_hub's cache, if it does."""
        path = self._in_cache(file)
        return path if path and path.stat().st_size == self.files[file].size else None

    def _in_cache(self, file: str) -> Path | None:
        path = try_to_load_from_cache(self.name, file, self.cache_dir, self.commit)
        return Path(path) if isinstance(path, str) else None

    def fetch(self, file: str, bar: Any, patience: Patience, again: bool = False) -> Path:
        """Get a whole file into the cache, `again` if it is there; its path. The caller has to
        check its content. `bar` is a tqdm class, which is told the bytes as they come."""
        return patience(self._what(file), lambda _: self._fetch(file, bar, again))

    def fetch_checked(self, file: str) -> Path:
        """Get a small file into the cache; its path."""

        def attempt(number: int) -> Path:
            path = self._fetch(file, None, again=number > 0)
            self.check(file, path)
            return path

        return Patience()(self._what(file), attempt)

    def _fetch(self, file: str, bar: Any, again: bool) -> Path:
        # The client looks at names alone, and would keep a damaged file.
        damaged = self._in_cache(file) != self.cached(file)
        with _named_failures():
            path = hf_hub_download(
                self.name, file, revision=self.commit, cache_dir=self.cache_dir, tqdm_class=bar,
                force_download=(again or damaged) and not self.offline,
            )  # fmt: skip
        return Path(path)

    def part(self, folder: Path, file: str) -> Path:
        """Where a download into `folder` lies until it is whole; the hash in its name keeps it
        apart from other contents."""
        return folder / f"{file}.{self.files[file].oid[:12]}.part"

    def download(self, file: str, folder: Path, bar: Any, patience: Patience) -> Path:
        """As `fetch`, but into `folder`, resuming what is there of the file."""
        final, part, size = folder / file, self.part(folder, file), self.files[file].size
        url = hf_hub_url(self.name, file, revision=self.commit)

        def attempt(_: int) -> Path:
            headers = build_hf_headers()
            if _XET and get_hf_file_metadata(url, headers=headers).xet_file_data:
                # Its transfers are parallel and retried by themselves; they cannot be resumed.
                part.unlink(missing_ok=True)
                with _named_failures():
                    hf_hub_download(
                        self.name, file, revision=self.commit, local_dir=folder, tqdm_class=bar
                    )
                return final
            if _size(part) > size:
                part.unlink()
            with open(part, "ab") as out:
                http_get(
                    url, out, resume_size=out.tell(), headers=headers, expected_size=size,
                    tqdm_class=bar,
                )  # fmt: skip
            part.rename(final)
            return final

        if _size(final) == size:
            return final
        return patience(self._what(file), attempt, lambda: _size(part))

    def bytes_there(self, folder: Path, file: str) -> int:
        """Bytes of a file that an earlier run downloaded: all of it or a part."""
        return max(_size(folder / file), _size(self.part(folder, file)))

    def check(self, file: str, path: Path, go_on: Callable[[], object] = lambda: None) -> None:
        """Raise TransferError unless `path` has the content the Hub names; `go_on` may raise."""
        expected = self.files[file].oid
        found = oid_of(path, expected, go_on)
        if found != expected:
            raise ContentError(expected, found)

    def read_header(self, file: str) -> Header:
        """The header of a shard, read by ranges even if the file is in the cache: that copy may be
        damaged, which shows only when it is checked."""
        path, size = self.cached(file), self.files[file].size
        if self.offline and path is not None:
            return read_header(path)

        def attempt(number: int) -> Header:
            known = b""

            def read_first(count: int) -> bytes:
                nonlocal known
                if len(known) < min(count, size):
                    known += self._range(file, len(known), min(max(count, _FIRST_BYTES), size))
                return known[:count]

            try:
                return header_from(read_first, size, self._what(file))
            except CheckpointError as error:
                if number > 0:
                    raise
                raise TransferError(str(error)) from None  # once more: it may be the transfer

        return Patience()(self._what(file), attempt)

    def _what(self, file: str) -> str:
        return f"{self.name}, {file}"

    def _range(self, file: str, start: int, stop: int) -> bytes:
        """Bytes start … stop − 1 of a file."""
        url = hf_hub_url(self.name, file, revision=self.commit)
        headers = {**build_hf_headers(), "Range": f"bytes={start}-{stop - 1}"}
        with http_stream_backoff(
            "GET", url, headers=headers, timeout=_TIMEOUT, max_retries=0
        ) as response:
            hf_raise_for_status(response)
            if response.status_code == 200:  # all of it: stop reading in time
                start, skip = 0, start
            elif response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                skip = 0
            else:
                raise TransferError("another range than was asked for")
            data = bytearray()
            for piece in response.iter_bytes():
                data += piece
                if len(data) >= stop - start:
                    break
        if len(data) < stop - start:
            raise TransferError(f"{len(data):,} bytes of {stop - start:,}")
        return bytes(data[skip : stop - start])


def open_repo(name: str, revision: str | None, cache_dir: Path | None) -> Repo:
    """The repository at the commit that `revision` (a branch, tag or commit; None: main) is now.

    Raises CheckpointError if there is none, UnavailableError if the Hub cannot be asked. With
    HF_HUB_OFFLINE everything is taken from the cache.
    """
    if constants.HF_HUB_OFFLINE:
        return _cached_repo(name, revision, cache_dir)
    info = Patience()(
        f"{name} (no folder here)",  # it may be a path with a slip in it
        lambda _: huggingface_hub.HfApi().model_info(
            name, revision=revision, files_metadata=True, timeout=_TIMEOUT
        ),
    )
    commit, files = info.sha, {}
    for file in info.siblings or ():
        oid = file.lfs.sha256 if file.lfs else file.blob_id
        if oid is None or file.size is None or commit is None:
            raise HubError(
                f"{name}, {file.rfilename}: {shown_endpoint(constants.ENDPOINT)} does not tell"
                " commit, size and hash; set HF_ENDPOINT to a Hub that does."
            )
        if "/" not in file.rfilename:
            files[file.rfilename] = RemoteFile(file.size, oid)
    if commit is None or CONFIG_NAME not in files:
        raise CheckpointError(f"{name} has no {CONFIG_NAME} at {commit}: it is no checkpoint.")
    if revision != commit:  # so that the cache knows the branch in a later run without a network
        Patience()(
            f"{name}, {CONFIG_NAME}",
            lambda _: hf_hub_download(name, CONFIG_NAME, revision=revision, cache_dir=cache_dir),
        )
    return Repo(name, commit, cache_dir, files)


def _cached_repo(name: str, revision: str | None, cache_dir: Path | None) -> Repo:
    config = try_to_load_from_cache(name, CONFIG_NAME, cache_dir, revision)
    if not isinstance(config, str):
        raise UnavailableError(
            f"{name} is not in the cache and HF_HUB_OFFLINE is set: unset it to download."
        )
    folder = Path(config).parent  # named by the commit; its files are links to blobs named by oid
    files = {
        path.name: RemoteFile(path.stat().st_size, _blob_of(path))
        for path in folder.iterdir()
        if path.is_file()
    }
    copied = next((file for file in files.items() if file[0] == file[1].oid), None)
    if copied is not None:
        raise UnavailableError(
            f"{folder / copied[0]} is no link, so its hash is not known: give {folder} as the"
            " source."
        )
    return Repo(name, folder.name, cache_dir, files, offline=True)


def _blob_of(path: Path) -> str:
    """The name of the blob that a snapshot's file links to. The blob may be a link too, into a
    shared store."""
    return os.readlink(path).rpartition("/")[2] if path.is_symlink() else path.name


@contextmanager
def _named_failures() -> Iterator[None]:
    """Make TransferErrors of hf_xet's failures, which are plain RuntimeErrors."""
    try:
        yield
    except RuntimeError as error:
        if "start new thread" in str(error):  # Python's, not the network's
            raise
        raise TransferError(str(error)) from None


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
