"""Rates, shares of the time, and how long is left."""

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
import time

import pytest

from kconvert.convert.cli.common import reporting
from kconvert.convert.progress import STAGES, Meter, Stage, Work, hours, seconds_left, status_line

GB = 10**9


def stages(**given: Stage) -> dict[str, Stage]:
    return {name: given.get(name, Stage()) for name in STAGES}


def test_the_slower_of_download_and_conversion_decides() -> None:
    work = Work(download=600 * GB, write=600 * GB)
    slow_net = stages(download=Stage(10 * GB, 50.0), write=Stage(5 * GB, 4.0), work=Stage(0, 5.0))
    assert seconds_left(slow_net, work) == pytest.approx(590 / 0.2)
    slow_disk = stages(download=Stage(10 * GB, 5.0), write=Stage(5 * GB, 50.0), work=Stage(0, 50.0))
    assert seconds_left(slow_disk, work) == pytest.approx(595 / 0.1)
    assert seconds_left(stages(), work) is None
    assert seconds_left(stages(write=Stage(5 * GB, 1), work=Stage(0, 10)), Work(0, 5 * GB)) == 0


def test_estimate_stays_true_while_rates_do() -> None:
    """A made-up run at constant rates: the estimate and the time gone add up to its length."""
    work, rate = Work(100 * GB, 100 * GB), 0.2 * GB
    for second in (10, 60, 250, 499):
        done = int(rate * second)
        now = stages(
            download=Stage(done, second), write=Stage(done, second / 10), work=Stage(0, second / 9)
        )
        assert second + seconds_left(now, work) == pytest.approx(500)


def test_busy_counts_threads_once() -> None:
    meter = Meter()

    def be_busy() -> None:
        with meter.busy("write", 10):
            time.sleep(0.2)

    threads = [threading.Thread(target=be_busy) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    assert 0 < meter.stages()["write"].busy < 0.2  # seen while it lasts
    for thread in threads:
        thread.join()
    done = meter.stages()["write"]
    assert done.nbytes == 40
    assert 0.2 <= done.busy < 0.5


def test_status_line_says_what_limits() -> None:
    now = stages(
        download=Stage(10 * GB, 50.0), write=Stage(5 * GB, 4.0), work=Stage(0, 5.0),
        convert=Stage(5 * GB, 2.5),
    )  # fmt: skip
    line = status_line(now, Work(600 * GB, 600 * GB), 51.0)
    assert line == (
        "5.0 of 600.0 GB · 49 min left · download 0.20 GB/s (98%) · convert 2.00 GB/s (5%)"
        " · write 1.25 GB/s (8%)"
    )
    assert "no estimate yet" in status_line(stages(), Work(1, 1), 0.0)
    slow = status_line(stages(download=Stage(4_000_000, 1.0)), Work(0, 5_000_000), 1.0)
    assert slow == "0.0 of 5.0 MB · 0 s left · download 4.0 MB/s (100%)"
    assert [hours(s) for s in (40, 840, 9000)] == ["40 s", "14 min", "2.5 h"]


def test_status_line_fits_the_terminal() -> None:
    """Rates go first, then what limits least; never a line of two."""
    busy = {"download": 50.0, "check": 9.0, "convert": 2.5, "write": 4.0}
    now = stages(work=Stage(0, 5.0), **{name: Stage(5 * GB, s) for name, s in busy.items()})
    work = Work(600 * GB, 600 * GB)
    whole = status_line(now, work, 51.0)
    assert status_line(now, work, 51.0, len(whole)) == whole
    start = "5.0 of 600.0 GB · 99 min left"
    for width, rest in (
        (len(whole) - 1, " · download 98% · check 18% · convert 5% · write 8%"),
        (72, " · download 98% · check 18% · write 8%"),
        (45, " · download 98%"),
        (40, ""),
    ):
        assert status_line(now, work, 51.0, width) == start + rest
    assert [status_line(now, work, 51.0, width) for width in (10, 0)] == [start[:10], ""]


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_terminal_s_width_is_asked_for(columns: int) -> None:
    """A real terminal, as a run that downloads for hours sees it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    code = (
        "import time\n"
        "from kconvert.convert.cli.common import reporting\n"
        "from kconvert.convert.progress import SHOWN, Work\n"
        "with reporting(Work(600 * 10**9, 600 * 10**9), False) as meter:\n"
        "    for stage in SHOWN: meter.add(stage, 5 * 10**9)\n"
        "    time.sleep(1.5)\n"
    )
    process = subprocess.run([sys.executable, "-c", code], stderr=theirs)
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while piece := os.read(ours, 4096):
            said += piece
    os.close(ours)
    line = said.decode().split("\r")[1].removesuffix("\x1b[K")
    assert process.returncode == 0
    assert line.startswith("convert 5.0 of 600.0 GB · ") and len(line) < columns


def test_a_log_gets_a_line_now_and_then(capsys, monkeypatch) -> None:
    waits: list[float] = []

    class Over(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout is None:  # a thread's own, at its start
                return super().wait()
            waits.append(timeout)
            return len(waits) > 2 or super().is_set()

    monkeypatch.setattr(threading, "Event", Over)
    monkeypatch.setattr(Meter, "seconds", property(lambda self: 20.0 * len(waits)))
    with reporting(Work(0, 5), quiet=False) as meter:
        meter.add("write", 5)
        while len(waits) < 3:
            time.sleep(0.01)
    assert waits == [30, 30, 300]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.startswith("convert 0.0 of 0.0 MB") for line in lines)
    with reporting(Work(0, 5), quiet=True):
        pass
    assert capsys.readouterr().err == ""
