"""What a disk can do at best: large blocks, straight from memory, several in flight."""

import errno
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_BLOCK = 8 << 20
_IN_FLIGHT = (1, 4, 16)


def raw_rates(folder: Path, nbytes: int) -> dict[str, Any]:
    """GB/s of writing `nbytes` in blocks of 8 MiB with a sync, and of reading them back, by the
    number of blocks in flight; past the page cache if the file system can."""
    target = folder / "raw"
    direct, rows = True, []
    for in_flight in _IN_FLIGHT:
        try:
            seconds = _pass(target, nbytes, in_flight, os.O_DIRECT, write=True)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            direct = False
            seconds = _pass(target, nbytes, in_flight, 0, write=True)
        reading = _pass(target, nbytes, in_flight, os.O_DIRECT if direct else 0, write=False)
        rows.append(
            {
                "in_flight": in_flight,
                "write_gbps": nbytes / seconds / 1e9,
                "read_gbps": nbytes / reading / 1e9,
            }
        )
        target.unlink()
    return {"direct": direct, "block_bytes": _BLOCK, "rows": rows}


def _pass(target: Path, nbytes: int, in_flight: int, flags: int, write: bool) -> float:
    """Seconds of one pass over a file by `in_flight` threads, block by block in turn."""
    buffers = [mmap.mmap(-1, _BLOCK) for _ in range(in_flight)]  # on a page, as O_DIRECT wants it
    for buffer in buffers:
        buffer.write(os.urandom(_BLOCK))  # some file systems compress, and all pages are touched
    access = (os.O_CREAT | os.O_WRONLY) if write else os.O_RDONLY
    fd = os.open(target, access | flags, 0o600)
    try:

        def blocks(thread: int) -> None:
            for at in range(thread * _BLOCK, nbytes, in_flight * _BLOCK):
                if write:
                    os.pwrite(fd, buffers[thread], at)
                else:
                    os.preadv(fd, [buffers[thread]], at)

        start = time.perf_counter()
        with ThreadPoolExecutor(in_flight) as pool:
            list(pool.map(blocks, range(in_flight)))
        if write:
            os.fsync(fd)
        return time.perf_counter() - start
    finally:
        os.close(fd)
