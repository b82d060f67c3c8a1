"""A rank that ends while another waits for it where no error comes from: in a GPU's step."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kconvert.layouts.errors import UnavailableError
from kconvert.runtime.watch import Watch, process_id, watch

# Two ranks; rank 1 ends as it is told to, rank 0 is in a step, or comes to one later.
RANK = """
import os, signal, sys, time
from kconvert.runtime import distributed
from kconvert.layouts.errors import KconvertError

how = sys.argv[1]
here = distributed.all_ranks_from_environment()
ranks = distributed.replace(here, watch=distributed._watch(here))
if ranks.rank == 1:
    time.sleep(0.5)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit("one sentence")
print("begins", flush=True)
if how == "ended before":
    while not ranks.watch._ended:
        time.sleep(0.01)
    try:
        with ranks.waiting():
            time.sleep(60)
    except KconvertError as error:
        sys.exit(f"kconvert: {error}")
with ranks.waiting():
    while True:  # as the decoder waits for a step
        pass
"""


def ranks_of(script: Path, how: str) -> list[subprocess.Popen]:
    """Without a launcher, who would end the survivor himself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}  # fmt: skip
    return [
        subprocess.Popen(
            [sys.executable, script, how], env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip


@pytest.mark.parametrize("how", ["killed", "ended before"])
def test_the_survivor_ends_in_a_sentence(how: str, tmp_path: Path) -> None:
    (script := tmp_path / "rank.py").write_text(RANK)
    survivor, other = ranks_of(script, how)
    assert other.wait(60) == (-signal.SIGKILL if how == "killed" else 1)
    begin = time.monotonic()
    out, err = survivor.communicate(timeout=30)
    assert time.monotonic() - begin < 10
    assert survivor.returncode == (1 if how == "ended before" else 3)
    assert err == "kconvert: another rank has ended, what it said tells why.\n"
    assert out == "begins\n"


def test_who_is_not_waited_for_may_end() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watched = Watch([child.pid])
    with watched.waiting():
        pass
    child.communicate(b"\n")
    time.sleep(0.3)  # nothing ends us
    with pytest.raises(UnavailableError, match="another rank has ended"), watched.waiting():
        pass


def test_ranks_of_other_machines_are_not_watched() -> None:
    boot, space, number = process_id()
    assert number == os.getpid()
    assert watch([process_id(), (boot + 1, space, 1)]) is None
    assert watch([process_id(), (boot, space + 1, 1)]) is None
    assert watch([process_id(), (boot, space, 1 << 30)]) is None  # it has ended already
