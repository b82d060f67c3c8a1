"""Hashes of a checkpoint's files: computed, and known from how the files came here."""

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path

_PIECE = 8 << 20
_SHA256_DIGITS = 64
_OID = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
# Where huggingface_hub notes what it downloaded into a plain folder: commit, hash, time, in lines.
_METADATA = ".cache/huggingface/download"


def oid_of(path: Path, like: str, go_on: Callable[[], object] = lambda: None) -> str:
    """The file's sha256 in hex, or git's sha1 if `like` is one. `go_on` is called in between."""
    large = len(like) == _SHA256_DIGITS
    state = hashlib.sha256() if large else hashlib.sha1(usedforsecurity=False)
    if not large:
        state.update(b"blob %d\0" % path.stat().st_size)
    buffer = memoryview(bytearray(_PIECE))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            go_on()
            state.update(buffer[:count])
    return state.hexdigest()


def known_oid(path: Path) -> str | None:
    """The hash that a file had when it was downloaded, if that is noted here: in the name of the
    blob in huggingface_hub's cache that it links to, or in the note beside a download."""
    if path.is_symlink():
        name = os.readlink(path).rpartition("/")[2]
        if _OID.fullmatch(name):
            return name
    try:
        lines = (path.parent / _METADATA / f"{path.name}.metadata").read_text().splitlines()
    except (OSError, ValueError):
        return None
    return lines[1] if len(lines) > 1 and _OID.fullmatch(lines[1]) else None
