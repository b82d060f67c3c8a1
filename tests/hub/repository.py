"""Repositories of the test Hub: commits that map paths to local files, and branches."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

LFS_SUFFIXES = {".bin", ".gguf", ".model", ".onnx", ".pt", ".pth", ".safetensors"}
LFS_SIZE = 10_000_000  # the Hub refuses larger files outside LFS
DATE = "2026-01-01T00:00:00.000Z"


@cache
def _sha256(path: Path, size: int, modified: int) -> str:
    """The digest of a file; size and time of change are the key under which it is kept."""
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def blob_id(content: bytes) -> str:
    """What git calls a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass(frozen=True)
class File:
    """A file at a commit. It stays on disk; only its size is read before somebody asks."""

    path: Path
    size: int
    known_sha256: str | None = None

    @property
    def is_lfs(self) -> bool:
        return self.path.suffix in LFS_SUFFIXES or self.size > LFS_SIZE

    @property
    def sha256(self) -> str:
        return self.known_sha256 or _sha256(self.path, self.size, self.path.stat().st_mtime_ns)

    @property
    def etag(self) -> str:
        return self.sha256 if self.is_lfs else self.blob_id

    @property
    def pointer(self) -> bytes:
        """What git holds in the place of an LFS file."""
        return (
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\n"
            f"size {self.size}\n"
        ).encode()

    @property
    def blob_id(self) -> str:
        return blob_id(self.pointer if self.is_lfs else self.path.read_bytes())

    def sibling(self, name: str, blobs: bool) -> dict:
        """The file in an answer to model_info."""
        if not blobs:
            return {"rfilename": name}
        entry = {"rfilename": name, "size": self.size, "blobId": self.blob_id}
        if self.is_lfs:
            sizes = {"size": self.size, "pointerSize": len(self.pointer)}
            entry["lfs"] = {"sha256": self.sha256, **sizes}
        return entry

    def entry(self, name: str) -> dict:
        """The file in an answer to list_repo_tree."""
        entry = {"type": "file", "oid": self.blob_id, "size": self.size, "path": name}
        if self.is_lfs:
            sizes = {"size": self.size, "pointerSize": len(self.pointer)}
            entry["lfs"] = {"oid": self.sha256, **sizes}
        return entry


Source = Path | str | Mapping[str, Path | str]


@dataclass
class Repository:
    """A model repository. `private` and `gated` hold the token that opens it."""

    name: str
    private: str | None = None
    gated: str | None = None
    commits: dict[str, dict[str, File]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(
        self, source: Source, branch: str = "main", sha256: Mapping[str, str] | None = None
    ) -> str:
        """Add a commit with the files of a folder, or of a mapping, and move the branch to it.

        `sha256` spares huge files the reading.
        """
        if not isinstance(source, Mapping):
            folder = Path(source)
            found = (path for path in folder.rglob("*") if path.is_file())
            source = {path.relative_to(folder).as_posix(): path for path in found}
        known = sha256 or {}
        files = {
            name: File(Path(path), Path(path).stat().st_size, known.get(name))
            for name, path in sorted(source.items())
        }
        # The count makes a commit without a change another commit, as git's dates do.
        what = f"{self.name} {len(self.commits)} {list(files)}"
        sha = hashlib.sha1(what.encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        return sha

    def resolve(self, revision: str) -> str | None:
        """The commit of a branch or of a commit's own name."""
        return self.branches.get(revision, revision if revision in self.commits else None)

    def info(self, sha: str, blobs: bool) -> dict:
        files = self.commits[sha]
        return {
            "_id": self.name,
            "id": self.name,
            "modelId": self.name,
            "author": self.name.split("/")[0],
            "sha": sha,
            "lastModified": DATE,
            "createdAt": DATE,
            "private": self.private is not None,
            "gated": "auto" if self.gated is not None else False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "siblings": [file.sibling(name, blobs) for name, file in files.items()],
        }

    def tree(self, sha: str, folder: str = "", recursive: bool = False) -> list[dict] | None:
        """The entries below a folder, None where there is no such folder."""
        prefix = f"{folder}/" if folder else ""
        entries: dict[str, dict] = {}
        for name, file in self.commits[sha].items():
            if not name.startswith(prefix):
                continue
            parts = name.removeprefix(prefix).split("/")
            for depth in range(1, len(parts) if recursive else min(2, len(parts))):
                path = prefix + "/".join(parts[:depth])
                entries.setdefault(path, directory(path))
            if recursive or len(parts) == 1:
                entries[name] = file.entry(name)
        return list(entries.values()) if entries or not folder else None

    def paths(self, sha: str, names: list[str]) -> list[dict]:
        """The entries of some paths; unknown paths are left out, as the Hub does."""
        files = self.commits[sha]
        entries = []
        for name in names:
            if name in files:
                entries.append(files[name].entry(name))
            elif any(path.startswith(f"{name}/") for path in files):
                entries.append(directory(name))
        return entries


def directory(path: str) -> dict:
    return {"type": "directory", "oid": blob_id(path.encode()), "size": 0, "path": path}


def expanded(entry: dict, sha: str) -> dict:
    """An entry with what `expand=True` adds."""
    scan = {"status": "unscanned", "avScan": None, "pickleImportScan": None}
    commit = {"id": sha, "title": "commit", "date": DATE}
    more = {"securityFileStatus": scan} if entry["type"] == "file" else {}
    return entry | {"lastCommit": commit} | more
