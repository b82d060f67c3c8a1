"""Worker processes: the same bytes as threads make, and nothing left of them, however it ends."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from kit import KIMI_MINI, SHARD, copy_mini, tree

from kconvert.convert import convert, crew
from kconvert.convert.output.writer import StagedFile
from kconvert.convert.prepare import Options, prepare
from kconvert.convert.run import run
from kconvert.layouts.errors import CheckpointError, UnavailableError


@pytest.fixture
def forked(monkeypatch) -> None:
    """Also a small conversion is done by processes."""
    monkeypatch.setattr(crew, "WORTH_PROCESSES", 0)


@pytest.fixture(autouse=True)
def nobody_is_left():
    yield
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("options", [{"tp": 4}, {"tp": 4, "ep": 2, "layout": "w4a16"}])
def test_processes_make_the_bytes_that_threads_make(options, forked, tmp_path, monkeypatch) -> None:
    made = convert(KIMI_MINI, tmp_path / "forked", workers=3, **options)
    monkeypatch.undo()
    threads = convert(KIMI_MINI, tmp_path / "threads", workers=3, **options)
    assert tree(tmp_path / "forked") == tree(tmp_path / "threads")
    assert made.bytes_read == threads.bytes_read == 4_627_328
    assert made.warnings == threads.warnings and len(made.warnings) == 2
    for stage in ("read", "convert", "write"):
        assert made.stages[stage].nbytes > 0 and made.stages[stage].thread_seconds > 0
        assert made.stages[stage].busy <= made.seconds


def test_a_fault_in_a_worker_is_the_runs(forked, mini: Path, tmp_path: Path) -> None:
    prepared = prepare(mini, tmp_path / "out", Options(tp=2, workers=3))
    os.truncate(mini / "model-00003-of-000006.safetensors", 700_000)
    with pytest.raises(CheckpointError, match=r"model-00003.*cut while it was being read"):
        run(prepared)
    assert not list((tmp_path / "out").rglob("layer-00002.safetensors"))
    assert not list((tmp_path / "out/.kconvert").glob("*.partial"))


def test_an_error_of_the_system_keeps_its_kind(forked, tmp_path: Path, monkeypatch) -> None:
    def full(self, index, packed):
        raise OSError(28, "No space left on device", "a/b")

    monkeypatch.setattr(StagedFile, "write_expert", full)
    with pytest.raises(OSError, match="No space left") as raised:
        convert(KIMI_MINI, tmp_path / "out", workers=2)
    assert (raised.value.errno, raised.value.filename) == (28, "a/b")


def test_a_worker_that_is_killed(forked, tmp_path: Path, monkeypatch, kconvert) -> None:
    def killed(self, index, packed):
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(StagedFile, "write_expert", killed)
    with pytest.raises(UnavailableError, match="a worker process ended before its work was done"):
        convert(KIMI_MINI, tmp_path / "out", workers=2)
    assert not list((tmp_path / "out/.kconvert").glob("*.partial"))
    monkeypatch.undo()
    assert convert(KIMI_MINI, tmp_path / "out", workers=2).complete


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupt_reaches_all(sign: signal.Signals, tmp_path: Path) -> None:
    """Also where the terminal sends it to every process; and workers outlive nobody."""
    convert(KIMI_MINI, tmp_path / "whole", tp=2)
    out = tmp_path / "out"
    slow = (
        "import sys, time\n"
        "from kconvert.convert import crew\n"
        "from kconvert.convert.cli import main as cli\n"
        "from kconvert.convert.output import writer\n"
        "crew.WORTH_PROCESSES = 0\n"
        "real = writer.StagedFile.write_expert\n"
        "def write(self, *a):\n"
        "    time.sleep(0.08); return real(self, *a)\n"
        "writer.StagedFile.write_expert = write\n"
        f"sys.argv = ['kconvert', 'convert', {str(KIMI_MINI)!r}, {str(out)!r}, '--tp', '2',"
        " '--workers', '3']\n"
        "cli.main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", slow], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not list(out.glob(".kconvert/rank-*.partial")) and time.monotonic() < deadline:
        time.sleep(0.005)
    if sign == signal.SIGKILL:
        process.kill()
    else:
        os.killpg(process.pid, sign)
    _, err = process.communicate(timeout=60)
    if sign != signal.SIGKILL:
        assert process.returncode == 130 and err.startswith("kconvert: interrupted; to resume")
    while time.monotonic() < deadline:  # they notice that nobody asks any more
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.01)
    else:
        pytest.fail("a worker is left")
    assert convert(KIMI_MINI, out, tp=2).complete
    assert tree(out) == tree(tmp_path / "whole")


def test_shards_are_given_up_with_their_jobs(tmp_path: Path) -> None:
    """A deleted shard takes no space: the files of a job are closed when the next ones begin."""
    source = copy_mini(tmp_path / "source")
    prepared = prepare(source, tmp_path / "out", Options(tp=2))
    staged = {}
    for job in prepared.plan.jobs[:3]:
        for file in job.files:
            staged[file.path] = tmp_path / file.path.replace("/", "--")
            staged[file.path].write_bytes(bytes(file.nbytes))
    from kconvert.convert.progress import Recorder

    worker = crew.Worker(prepared.plan, Recorder(), crew._turns(prepared.plan, threading.Lock))

    def begin(index: int) -> None:
        job = prepared.plan.jobs[index]
        files = crew.JobFiles(
            {file.path: (staged[file.path], tmp_path / file.path) for file in job.files},
            {shard: source / shard for shard in job.shards},
        )
        worker.do(index, 0, files, (index - 1, index, index + 1))

    def opened() -> set[str]:
        links = Path("/proc/self/fd").iterdir()
        names = {os.path.basename(os.readlink(link)) for link in links if os.path.lexists(link)}
        return {name for name in names if name.endswith(".safetensors")}

    for index in range(3):
        begin(index)
    assert SHARD in opened() and "model-00001-of-000006.safetensors" not in opened()
    worker.close()
    assert not opened()
