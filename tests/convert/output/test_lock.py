"""One run at a time works in an output, on one host or several; a dead one is in nobody's way."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from kit import KIMI_MINI, tree

from kconvert.convert import convert
from kconvert.convert.output import lock, publish
from kconvert.convert.output.lock import Owner, Pace, owned
from kconvert.convert.output.writer import BlobWriter
from kconvert.convert.share import Share
from kconvert.layouts.errors import UnavailableError


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "out/.kconvert"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def looks(monkeypatch) -> Callable[..., list[float]]:
    """Nobody sleeps: the pauses between looks are taken down, and `during` is told their number."""

    def set_up(during: Callable[[int], object] = lambda number: None) -> list[float]:
        pauses: list[float] = []

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            during(len(pauses))

        monkeypatch.setattr(lock, "PACE", Pace(pause=pause))
        return pauses

    return set_up


def left_by(host: str, path: Path, seen_from: str | None = "another boot/1") -> bytes:
    """An owner file of a run that is not here."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = {"token": host, "host": host, "pid": 7, "lock_seen_from": seen_from}
    path.write_text(json.dumps({**table, "beats": f"{1:012d}"}))
    return path.read_bytes()


def seen_from_here(work: Path) -> str | None:
    with open(work / lock.LOG_NAME, "a") as file:
        return lock._lock_seen_from(file.fileno())


@pytest.fixture
def holder(work: Path) -> Iterator[subprocess.Popen]:
    """A process that owns `work`, as long as it lives."""
    code = "from kconvert.convert.output.lock import owned\nfrom pathlib import Path\nimport sys\n"
    code += "with owned(Path(sys.argv[1])): print('mine', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, work], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"mine\n"
        yield process
        process.kill()


# -- one boot: the lock tells at once -------------------------------------------------------------


def test_a_run_that_lives_and_one_that_was_killed(work, holder, kconvert, looks) -> None:
    pauses = looks()
    outcome = kconvert("convert", KIMI_MINI, work.parent)
    assert outcome.code == 3
    assert f"says that another run is at work here (pid {holder.pid} on " in outcome.err
    assert kconvert("finish", work.parent).code == 2  # nothing was begun
    holder.send_signal(signal.SIGSTOP)  # suspended, it beats no more, and yet it is not dead
    assert kconvert("convert", KIMI_MINI, work.parent).code == 3
    holder.kill()
    holder.wait()
    assert (work / "owner").exists()  # it died without tidying up
    assert kconvert("convert", KIMI_MINI, work.parent).code == 0
    assert pauses == [] and not (work / "owner").exists()


def test_other_host_names_and_processes_of_this_boot_do_not_matter(work, looks, kconvert) -> None:
    """What a container leaves to the next one."""
    pauses = looks()
    left_by("container-1", work / "owner", seen_from_here(work))
    assert kconvert("convert", KIMI_MINI, work.parent).code == 0
    assert pauses == []


@pytest.mark.parametrize("shares", [(None, None), (Share(0, 2), None), (Share(0, 2), Share(0, 2))])
def test_of_many_that_start_at_once_exactly_one_goes_on(shares, work: Path, looks) -> None:
    """Also where all find the same dead owner."""
    pauses = looks()
    for round_ in range(20):
        for share in filter(None, shares):
            (work / share.name).mkdir(exist_ok=True)
        if round_ % 2:
            left_by("dead", work / "owner", seen_from_here(work))
        gate, over, ends = threading.Barrier(4), threading.Barrier(4), []

        def attempt(share: Share | None, gate=gate, over=over, ends=ends) -> None:
            with ExitStack() as stack:
                gate.wait()
                try:
                    stack.enter_context(owned(work, share))
                    ends.append("owner")
                except UnavailableError as error:
                    ends.append(str(error))
                over.wait()

        threads = [threading.Thread(target=attempt, args=(shares[i % 2],)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(end == "owner" for end in ends) == [False, False, False, True], ends
        assert not list(work.rglob("owner"))
    assert pauses == []


# -- elsewhere: the beat tells --------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [None, b"", b"\0" * 90, b'{"host": "x', b"[1]", b"\xff\xfe"],
    ids=["whole", "empty", "zeros", "torn", "list", "no text"],
)  # fmt: skip
def test_owner_of_another_host_that_is_silent_is_dead(content, work, looks, kconvert) -> None:
    pauses = looks()
    left_by("elsewhere", work / "owner")
    if content is not None:
        (work / "owner").write_bytes(content)
    outcome = kconvert("convert", KIMI_MINI, work.parent)
    assert outcome.code == 0
    assert pauses == [1.0] * 60


def test_the_waiter_says_so(work: Path, looks, caplog) -> None:
    looks()
    left_by("elsewhere", work / "owner")
    left_by("elsewhere", work / "share-0-of-3/owner")
    with owned(work):
        pass
    assert caplog.messages == [
        f"{work}/owner and 1 more may be of a run that died (pid 7 on elsewhere): waiting for a"
        " sign of life, 60 s at most"
    ]


@pytest.mark.parametrize("look", [1, 59, 60])
def test_owner_of_another_host_that_beats_lives(look, work: Path, looks, kconvert) -> None:
    def during(number: int) -> None:
        if number == look:
            table = json.loads((work / "owner").read_text())
            (work / "owner").write_text(json.dumps({**table, "beats": f"{2:012d}"}))

    pauses = looks(during)
    before = left_by("elsewhere", work / "owner")
    outcome = kconvert("convert", KIMI_MINI, work.parent)
    assert outcome.code == 3 and "another run is at work here (pid 7 on elsewhere)" in outcome.err
    assert len(pauses) == look
    assert (work / "owner").read_bytes() != before  # and it is still there


def test_owner_that_ends_meanwhile(work: Path, looks) -> None:
    pauses = looks(lambda number: number == 5 and (work / "owner").unlink())
    left_by("elsewhere", work / "owner")
    with owned(work) as owner:
        owner.check()
    assert len(pauses) == 5


def test_of_two_waiters_one_goes_on(work: Path, looks) -> None:
    """The other sees that it was replaced."""
    stack = ExitStack()

    def during(number: int) -> None:
        if number == 30:  # the other one began to wait earlier
            looks()
            stack.enter_context(owned(work))

    looks(during)
    left_by("elsewhere", work / "owner")
    with stack, pytest.raises(UnavailableError, match="another run is at work"), owned(work):
        pass


def test_share_that_died_on_another_host(work: Path, looks, kconvert) -> None:
    pauses = looks()
    for i in range(2):
        left_by("elsewhere", work / f"share-{i}-of-2/owner")
    command = ("convert", KIMI_MINI, work.parent, "--tp", 2, "--share")
    assert kconvert(*command, "0/2").code == 0
    assert (work / "share-1-of-2/owner").exists()  # not this one's business
    assert kconvert(*command, "1/2").code == 0
    assert len(pauses) == 120 and not (work / "share-1-of-2").exists()
    left_by("elsewhere", work / "share-0-of-3/owner")
    left_by("elsewhere", work / "share-1-of-3/owner")
    assert kconvert("convert", KIMI_MINI, work.parent, "--tp", 2).code == 0
    assert len(pauses) == 180  # for both at once


def test_finish_waits_too(work: Path, looks, kconvert) -> None:
    out = work.parent
    assert kconvert("convert", KIMI_MINI, out, "--tp", 2, "--share", "0/2").code == 0
    outline = (work / "outline.json").read_bytes()
    assert kconvert("convert", KIMI_MINI, out, "--tp", 2, "--share", "1/2").code == 0
    (out / "kconvert.json").unlink()
    (work / "outline.json").write_bytes(outline)
    pauses = looks()
    left_by("elsewhere", work / "owner")
    assert kconvert("finish", out).code == 0 and len(pauses) == 60


def test_interrupt_while_waiting(work: Path) -> None:
    before = left_by("elsewhere", work / "owner")
    command = [sys.executable, "-m", "kconvert.convert.cli", "convert", KIMI_MINI, work.parent]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert "waiting for a sign of life, 60 s at most" in process.stderr.readline()
    sent = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130 and "kconvert: interrupted; to resume: " in err
    assert time.monotonic() - sent < 5
    assert (work / "owner").read_bytes() == before


@pytest.mark.parametrize("broken", ["nothing", "refused"])
def test_where_locks_do_nothing_the_beat_tells(broken, work: Path, looks, monkeypatch) -> None:
    """Some network file systems take every lock for got, others know no locks."""

    def flock(fd: int, how: int) -> None:
        if broken == "refused":
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    pauses = looks(lambda number: number == 3 and first._write())
    first = Owner(work / "owner")
    with pytest.raises(UnavailableError, match="another run is at work"), owned(work):
        pass
    assert len(pauses) == 3
    pauses = looks()
    with owned(work) as second:
        assert len(pauses) == 60
        second.check()
        with pytest.raises(UnavailableError, match="is not this run's any more"):
            first.check()
        first._write()  # it does not know yet
        second.check()
        first.release()
        second.check()
    assert not (work / "owner").exists()


# -- the owner -----------------------------------------------------------------------------------


def test_the_owner_beats(work: Path, monkeypatch) -> None:
    """Also after a beat that failed; always as many bytes, so that no part of an old one stays."""
    monkeypatch.setattr(lock, "PACE", Pace(beat=0.005))
    real, fail = os.pwrite, threading.Event()

    def pwrite(*arguments) -> int:
        if fail.is_set():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*arguments)

    monkeypatch.setattr(os, "pwrite", pwrite)

    def beats() -> int:
        content = (work / "owner").read_bytes()
        sizes.add(len(content))
        return int(json.loads(content)["beats"])

    def moved() -> bool:
        before, deadline = beats(), time.monotonic() + 10
        while beats() == before and time.monotonic() < deadline:
            time.sleep(0.001)
        return beats() != before

    sizes: set[int] = set()
    with owned(work):
        assert moved() and moved()
        fail.set()
        time.sleep(0.05)
        before = beats()
        time.sleep(0.05)
        assert beats() == before
        fail.clear()
        assert moved()
    assert len(sizes) == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "owner"]


def test_no_owner_file_stays_where_no_thread_can_be_started(work, monkeypatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError), owned(work):
        pass
    assert not (work / "owner").exists()


def taken_over(out: Path) -> None:
    """As another host's run does it: what is half-done is cleared, and the owner file replaced."""
    (out / ".kconvert/owner").unlink()
    left_by("elsewhere", out / ".kconvert/owner")
    for path in out.rglob("*.partial"):
        path.unlink()


@pytest.mark.parametrize("moment", ["before a blob is renamed", "as it is renamed", "before one"])
def test_run_that_was_taken_over_publishes_nothing_more(moment, tmp_path, kconvert, monkeypatch):
    """It was suspended, say, and wakes up; the other's owner file stays."""
    out, done = tmp_path / "out", []
    if moment == "as it is renamed":
        real_rename = os.rename

        def rename(old: Path, new: Path) -> None:
            if Path(new).name == "layer-00002.safetensors" and not done:
                done.append(tree(out))
                taken_over(out)
            real_rename(old, new)

        monkeypatch.setattr(os, "rename", rename)
    elif moment == "before a blob is renamed":
        real_publish = BlobWriter.publish

        def publish_blob(writer: BlobWriter) -> None:
            if writer.planned.path.endswith("layer-00002.safetensors") and not done:
                done.append(tree(out))
                taken_over(out)
            real_publish(writer)

        monkeypatch.setattr(BlobWriter, "publish", publish_blob)
    else:
        real_file = publish.write_file

        def write_file(workspace, name: str, content: bytes) -> None:
            if name == "config.json":
                done.append(tree(out))
                taken_over(out)
            real_file(workspace, name, content)

        monkeypatch.setattr(publish, "write_file", write_file)
    outcome = kconvert("convert", KIMI_MINI, out, "--tp", 2)
    assert outcome.code == 3
    assert f"{out}/.kconvert/owner is not this run's any more" in outcome.err
    assert len(done) == 1 and tree(out) == done[0]
    assert json.loads((out / ".kconvert/owner").read_text())["host"] == "elsewhere"
    assert not list(out.rglob("*.partial"))


def test_run_that_was_taken_over_leaves_the_others_temporary_files(tmp_path, kconvert, monkeypatch):
    out = tmp_path / "out"
    theirs = out / ".kconvert/a.0123456789abcdef.partial"
    real = BlobWriter.publish

    def publish_blob(writer: BlobWriter) -> None:
        if not theirs.exists():
            taken_over(out)
            theirs.touch()
        real(writer)

    monkeypatch.setattr(BlobWriter, "publish", publish_blob)
    assert kconvert("convert", KIMI_MINI, out).code == 3
    assert theirs.exists()


def test_temporary_names_hold_the_token(tmp_path: Path, monkeypatch) -> None:
    seen: list[tuple[str, str]] = []
    real = os.rename

    def rename(old: Path, new: Path) -> None:
        token = json.loads((tmp_path / "out/.kconvert/owner").read_text())["token"]
        seen.append((Path(old).name, token))
        real(old, new)

    monkeypatch.setattr(os, "rename", rename)
    convert(KIMI_MINI, tmp_path / "out")
    assert seen and all(token in name for name, token in seen)


@pytest.mark.parametrize("left", ["", "share-0-of-2/", "share-1-of-3/"])
@pytest.mark.parametrize("share", ["0/1", "0/2"])
def test_whoever_takes_over_clears_what_could_still_be_renamed(left, share, work, kconvert) -> None:
    """Whatever kind of run the former owner was."""
    partial = work / left / "a.0123456789abcdef.partial"
    partial.parent.mkdir(exist_ok=True)
    partial.touch()
    assert kconvert("convert", KIMI_MINI, work.parent, "--share", share).code == 0
    assert not partial.exists()
