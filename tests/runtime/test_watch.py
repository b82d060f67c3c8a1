"""A rank that ends while another waits for it in a GPU's step, from which no error comes."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from kconvert.convert import convert
from kconvert.layouts.errors import UnavailableError
from kconvert.runtime.watch import Watch, process_id, watch

TINY = Path(__file__).parents[1] / "tiny_kimi"
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

# Both generate without end; rank 1 is killed in the middle of a step.
PAIR = """
import os, signal, sys, threading
from pathlib import Path
from kconvert.convert.cli.common import explained
from kconvert.runtime.distributed import ranks_from_environment
from kconvert.runtime.engine import Engine

@explained
def main():
    blobs, drafter = map(Path, sys.argv[1:])
    ranks = ranks_from_environment(blobs)
    engine = Engine.open(blobs, drafter, ranks=ranks, device="cuda")
    engine.generate([1, 2, 3], 20, "ddtree", 16)
    if ranks.rank == 1:
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGKILL)).start()
    print("begins", flush=True)
    while True:
        engine.generate([1, 2, 3], 200, "ddtree", 16)

main()
"""


def ranks_of(script: Path, *arguments: str | Path) -> list[subprocess.Popen]:
    """Without a launcher, who would end the survivor himself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}  # fmt: skip
    return [
        subprocess.Popen(
            [sys.executable, script, *arguments],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
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


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_rank_that_dies_in_a_step_of_two_gpus(tmp_path: Path) -> None:
    convert(TINY / "model", tmp_path / "two", tp=2)
    (script := tmp_path / "rank.py").write_text(PAIR)
    survivor, other = ranks_of(script, tmp_path / "two", TINY / "drafter")
    assert other.wait(240) == -signal.SIGKILL
    begin = time.monotonic()
    out, err = survivor.communicate(timeout=60)
    assert time.monotonic() - begin < 10 and out == "begins\n"
    assert survivor.returncode == 3
    assert "kconvert: another rank has ended" in err and "Traceback" not in err


@pytest.mark.gpu
@pytest.mark.parametrize("given", ["0", "0,1"], ids=["one GPU", "the same GPU"])
def test_a_pair_that_cannot_meet(given: str, tmp_path: Path, monkeypatch) -> None:
    """The second rank has no GPU, or the first one's."""
    convert(TINY / "model", tmp_path / "two", tp=2)
    same = "import os; os.environ['LOCAL_RANK'] = '0'\n" if given == "0,1" else ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    (script := tmp_path / "rank.py").write_text(same + PAIR)
    for rank in ranks_of(script, tmp_path / "two", TINY / "drafter"):
        _, err = rank.communicate(timeout=120)
        assert rank.returncode == 3 and "kconvert: " in err and "Traceback" not in err


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
