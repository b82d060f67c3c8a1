"""Where a checkpoint comes from: get a shard, release a shard."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from kconvert.convert.source.endpoint import shown_endpoint
from kconvert.convert.source.local import open_local
from kconvert.convert.source.protocol import Source
from kconvert.layouts.errors import OptionError, UnavailableError, UnsupportedError

COMMIT = re.compile(r"[0-9a-f]{40}")
_REPO_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_ADDRESS = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://.*|(huggingface\.co|hf\.co)/.+")
_OLDEST_CLIENT = (2, 4)

__all__ = ["COMMIT", "HubName", "Source", "hub_name", "open_hub", "open_local", "revision_of"]


class HubName(NamedTuple):
    """A repository of the Hub, and the revision if one is named."""

    repo: str
    revision: str | None = None


def hub_name(source: str) -> HubName | None:
    """The repository that `source` names: org/name, org/name@revision, its page's address, or
    hf://…; None if it is a folder or file here, or can only be the path of one.

    Raises UnsupportedError for the address of anything else.
    """
    if "://" not in source and Path(source).exists():
        return None
    if not _ADDRESS.fullmatch(source):
        repo, at, revision = source.rstrip("/").partition("@")
        if not _REPO_ID.fullmatch(repo):
            return None
        if at and not revision:
            raise UnsupportedError(f"{source!r} names no revision after its @: give one.")
        return HubName(repo, revision or None)
    with _client(source):
        from huggingface_hub import constants, parse_hf_uri
        from huggingface_hub.errors import HfUriError
    host = source.partition("://")[2].partition("/")[0]
    shown = shown_endpoint(source) if "@" in host else source  # a password may be in it
    try:
        named = parse_hf_uri(source.rstrip("/").removesuffix(".git"), constants.ENDPOINT)
    except (HfUriError, ValueError):
        raise UnsupportedError(
            f"{shown} is not the address of a model on {shown_endpoint(constants.ENDPOINT)}: give"
            " its name, org/name or org/name@revision."
        ) from None
    if named.type != "model" or named.path_in_repo:
        what = f"a file or folder in {named.id}" if named.path_in_repo else f"a {named.type}"
        raise UnsupportedError(
            f"{shown} is {what}, not a whole model: give a model's name, org/name or"
            " org/name@revision."
        )
    return HubName(named.id, named.revision)


def revision_of(name: HubName, asked: str | None) -> str | None:
    """The revision that is given, in the name or as an option; OptionError if they are two."""
    if name.revision is not None and asked not in (None, name.revision):
        raise OptionError(
            f"{name.repo}@{name.revision} and --revision {asked} are two revisions: give one."
        )
    return name.revision or asked


def open_hub(
    name: str, revision: str | None, cache_dir: Path | None = None, keep_shards: bool = False
) -> Source:
    """Get small files and headers of the Hub's repository `name` at `revision`.

    Raises CheckpointError and UnavailableError.
    """
    with _client(name):
        from kconvert.convert.source import hub  # takes as long to import as all else
    return hub.open_checkpoint(name, revision, cache_dir, keep_shards)


@contextmanager
def _client(name: str) -> Iterator[None]:
    """Around imports of the Hub's client, which is needed to read `name`. Raises UnavailableError
    with what to install or correct if they fail."""
    found = _client_version()
    if found < _OLDEST_CLIENT:  # an engine's; it speaks through another HTTP library
        raise _no_client(name, f"huggingface_hub {found[0]}.{found[1]} is" if found else "none is")
    try:
        yield
    except ImportError:
        raise _no_client(name, "httpx2 or huggingface_hub is not") from None
    except ValueError:  # the client's own, of an endpoint that it cannot take apart
        raise UnavailableError("HF_ENDPOINT or a proxy variable is no URL; correct it.") from None


def _client_version() -> tuple[int, ...]:
    """Major and minor of the huggingface_hub that is installed; empty: none is."""
    try:
        numbers = re.match(r"(\d+)\.(\d+)", version("huggingface_hub"))
    except PackageNotFoundError:
        return ()
    return tuple(map(int, numbers.groups())) if numbers else ()


def _no_client(name: str, found: str) -> UnavailableError:
    return UnavailableError(
        f"{name} is no folder here, and the Hub is read with huggingface_hub 2.4 or later ({found}"
        " installed): pip install 'kconvert[hub]', apart from engines that want an older one."
    )
