"""The folders that cases are tried on: made once, changed by a case, put back after it."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from formats_kit import CHECKPOINTS, FORMATS
from fuzz import headers, hostile
from kit import KIMI_MINI

from kconvert.convert import convert
from kconvert.layouts.blob import digest
from kconvert.layouts.header import read_header

TINY = Path(__file__).parents[1] / "tiny_kimi"
INDEX, CONFIG, MANIFEST = "model.safetensors.index.json", "config.json", "kconvert.json"
MOST_BYTES = 1 << 42  # a sparse file of so many bytes is still made


class Folder:
    """A folder whose files are `files`: the bytes they begin with and their sizes."""

    def __init__(self, root: Path, files: dict[str, tuple[bytes, int]]) -> None:
        self.root, self.files = root, files
        self._changed: dict[str, bool] = {}  # in order
        for name in files:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            self._write(name, *files[name])

    def put(self, name: str, head: bytes, size: int | None = None) -> None:
        """`name` with these bytes, and zeros up to `size`."""
        self._clear(name)
        self._write(name, head, len(head) if size is None else size)

    def remove(self, name: str) -> None:
        self._clear(name)

    def special(self, name: str, rng: Random) -> None:
        """Something in the place of `name` that is no ordinary file."""
        self._clear(name)
        path = self.root / name
        rng.choice((
            path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to(path.name),
            lambda: path.symlink_to("/dev/zero"), lambda: path.symlink_to("nowhere"),
            path.touch,
        ))()  # fmt: skip

    def restore(self) -> None:
        """As it was before the case."""
        for name in self._changed:
            self._clear(name)
            if name in self.files:
                self._write(name, *self.files[name])
        self._changed.clear()

    def _clear(self, name: str) -> None:
        self._changed[name] = True
        path = self.root / name
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)

    def _write(self, name: str, head: bytes, size: int) -> None:
        with open(self.root / name, "wb", buffering=0) as file:
            file.write(head)
            if size != len(head):
                file.truncate(min(max(size, 0), MOST_BYTES))


def read(folder: Path, sparse: bool = False) -> dict[str, tuple[bytes, int]]:
    """The files of a folder; `sparse`: of the shards only the headers."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and ".kconvert" not in path.parts:
            shard = sparse and path.suffix == ".safetensors"
            head = read_header(path).raw if shard else path.read_bytes()
            files[path.relative_to(folder).as_posix()] = head, path.stat().st_size
    return files


class World:
    """Every folder of a run, under `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.nowhere = root / "nowhere"
        self.real = root / "real"  # never changed: what `output` was made from
        shutil.copytree(KIMI_MINI, self.real)
        convert(self.real, root / "made", tp=2)
        small = {name: read(KIMI_MINI)[name] for name in (CONFIG, "generation_config.json")}
        drafter = (TINY / "drafter" / CONFIG).read_bytes()
        tokens = {n: (TINY / "model" / n).read_bytes() for n in ("tiktoken.model", TOKENIZER)}
        self.others = [  # formats and families beside kimi-mini's
            Folder(root / name, read(FORMATS / name, sparse=True)) for name in CHECKPOINTS
        ]
        self.source = Folder(root / "source", read(KIMI_MINI, sparse=True))
        self.output = Folder(root / "output", read(root / "made"))
        self.model = Folder(root / "model", small)
        self.drafter = Folder(root / "drafter", {CONFIG: (drafter, len(drafter))})
        self.tokenizer = Folder(root / "tokenizer", {n: (b, len(b)) for n, b in tokens.items()})
        self.loose = Folder(root / "loose", {"x.safetensors": (b"", 0)})
        self.shards = shards(self.source)
        self.blobs = shards(self.output)
        self.heads = self._heads()
        self.folders = (
            self.source, self.output, self.model, self.drafter, self.tokenizer, self.loose,
            *self.others,
        )  # fmt: skip

    def restore(self) -> None:
        for folder in self.folders:
            folder.restore()

    def _heads(self) -> list[tuple[bytes, int]]:
        """Header and size of every shard and blob."""
        paths = [self.source.root / name for name in self.shards]
        paths += [self.output.root / name for name in self.blobs]
        return [(read_header(path).raw, path.stat().st_size) for path in paths]


TOKENIZER = "tokenizer_config.json"


def shards(folder: Folder) -> list[str]:
    return [name for name in folder.files if name.endswith(".safetensors")]


def split(folder: Folder, name: str) -> tuple[bytes, bytes, int]:
    """Header, whatever data is kept in memory, and size of a shard or blob as it was made."""
    raw, size = folder.files[name]
    end = 8 + int.from_bytes(raw[:8], "little")
    return raw[:end], raw[end:], size


def put_header(
    folder: Folder, name: str, change: Callable[[bytes, int], tuple[bytes, int]]
) -> None:
    """`name` with its header changed and its data as it was."""
    head, data, size = split(folder, name)
    new, new_size = change(head, size)
    folder.put(name, (new + data)[: max(new_size, 0)], new_size)


def manifest(folder: Folder) -> dict[str, Any]:
    """kconvert.json as it was made."""
    return json.loads(folder.files[MANIFEST][0])


def put_signed(folder: Folder, table: dict[str, Any]) -> None:
    """kconvert.json with a digest that is right for what it says, so that it is believed."""
    table.pop("digest", None)
    raw = hostile.encode(table)
    try:
        text = json.dumps(json.loads(raw), sort_keys=True).encode()
    except (ValueError, RecursionError, TypeError):
        text = raw
    own = f',"digest":"{digest(text)}"}}'.encode()
    folder.put(MANIFEST, raw[:-1] + own if table else raw)


def sign_file(folder: Folder, table: dict[str, Any], name: str) -> None:
    """Make the manifest `table` say of `name` what now lies in the folder."""
    raw = (folder.root / name).read_bytes()
    entry = table["files"][name]
    entry["bytes"] = len(raw)
    if not name.endswith(".safetensors"):
        entry["digest"] = digest(raw)
        return
    head = raw[: 8 + int.from_bytes(raw[:8], "little")]
    entry["digest"] = digest(head)
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        info = json.loads(headers.table_of(head)["__metadata__"]["kconvert"])
        entry["fingerprint"] = info["fingerprint"]
