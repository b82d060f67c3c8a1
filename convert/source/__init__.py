"""Where a checkpoint comes from: get a shard, release a shard."""

import re
from pathlib import Path

from kconvert.convert.source.local import open_local
from kconvert.convert.source.protocol import Source
from kconvert.layouts.errors import UnavailableError

REPO_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
COMMIT = re.compile(r"[0-9a-f]{40}")

__all__ = ["COMMIT", "REPO_ID", "Source", "open_hub", "open_local"]


def open_hub(
    name: str, revision: str | None, cache_dir: Path | None = None, keep_shards: bool = False
) -> Source:
    """Get small files and headers of the Hub's repository `name` at `revision`.

    Raises CheckpointError and UnavailableError.
    """
    try:
        from kconvert.convert.source import hub  # takes as long to import as all else
    except ValueError:  # the client's own, of an endpoint that it cannot take apart
        raise UnavailableError("HF_ENDPOINT or a proxy variable is no URL; correct it.") from None
    return hub.open_checkpoint(name, revision, cache_dir, keep_shards)
