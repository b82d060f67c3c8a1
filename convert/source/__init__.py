"""Where a checkpoint comes from: get a shard, release a shard."""

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kconvert.convert.source.local import open_local
from kconvert.convert.source.protocol import Source
from kconvert.layouts.errors import UnavailableError

REPO_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
COMMIT = re.compile(r"[0-9a-f]{40}")
_OLDEST_CLIENT = (2, 4)

__all__ = ["COMMIT", "REPO_ID", "Source", "open_hub", "open_local"]


def open_hub(
    name: str, revision: str | None, cache_dir: Path | None = None, keep_shards: bool = False
) -> Source:
    """Get small files and headers of the Hub's repository `name` at `revision`.

    Raises CheckpointError and UnavailableError.
    """
    found = _client_version()
    if found < _OLDEST_CLIENT:  # an engine's; it speaks through another HTTP library
        raise _no_client(name, f"huggingface_hub {found[0]}.{found[1]} is" if found else "none is")
    try:
        from kconvert.convert.source import hub  # takes as long to import as all else
    except ImportError:
        raise _no_client(name, "httpx2 or huggingface_hub is not") from None
    except ValueError:  # the client's own, of an endpoint that it cannot take apart
        raise UnavailableError("HF_ENDPOINT or a proxy variable is no URL; correct it.") from None
    return hub.open_checkpoint(name, revision, cache_dir, keep_shards)


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
