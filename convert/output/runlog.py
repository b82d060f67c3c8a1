"""The log of runs in an output's work folder: when, where and how they were called, and ended."""

import contextlib
import json
import socket
import time
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path

LOG_NAME = "runs.jsonl"  # never deleted, so that its lock can guard the owner files
# Set by kconvert's command line alone: another program's arguments do not belong in the log.
COMMAND: ContextVar[Sequence[str]] = ContextVar("COMMAND", default=())


def log_run(work: Path, started: float, outcome: str) -> None:
    """Add a line to the log in the work folder `work`; `started` in seconds since 1970."""
    entry = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(started)),
        "seconds": round(time.time() - started, 3),
        "host": socket.gethostname(),
        "command": COMMAND.get(),
        "outcome": outcome,
    }
    # The log must not turn a finished conversion into a failed one (a full disk, say).
    with contextlib.suppress(OSError), open(work / LOG_NAME, "a") as file:
        file.write(json.dumps(entry) + "\n")
