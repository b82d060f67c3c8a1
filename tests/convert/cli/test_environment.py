"""What the command line does in poor surroundings: streams that are closed or go away,
no threads, SIGINT ignored."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kit import KIMI_MINI, tree

from kconvert.convert import convert

KCONVERT = f"{sys.executable} -m kconvert.convert.cli"
REFUSED = f"validate {KIMI_MINI}"  # 2: no output


def shell(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True)


@pytest.mark.parametrize("streams", [">&-", "2>&-", "<&- >&- 2>&-", "2>&1 | true"])
def test_streams_do_not_change_exit_codes(streams: str) -> None:
    for command, code in ((f"inspect {KIMI_MINI}", 0), (REFUSED, 2), ("--help", 0), ("--no", 2)):
        made = shell(f"{KCONVERT} {command} {streams}")
        assert made.returncode == code
        assert "Traceback" not in made.stderr and "Exception" not in made.stderr
        if command == REFUSED and "2>" not in streams:
            assert made.stderr.startswith("kconvert: ") and made.stderr.count("\n") == 1


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_goes_away(unbuffered: str) -> None:
    """`kconvert inspect … | head -1` ends quietly, and as if all had been read."""
    process = subprocess.Popen(
        [*KCONVERT.split(), "inspect", str(KIMI_MINI)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
    )  # fmt: skip
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 0


def test_closed_streams_do_not_get_into_blobs(tmp_path: Path) -> None:
    """Without care the first files that are opened would become stdout and stderr."""
    made = shell(f"{KCONVERT} convert {KIMI_MINI} {tmp_path}/out --tp 2 <&- >&- 2>&-")
    assert made.returncode == 0
    convert(KIMI_MINI, tmp_path / "same", tp=2)
    assert tree(tmp_path / "out") == tree(tmp_path / "same")


@pytest.mark.parametrize("command", [f"inspect {KIMI_MINI}", "--help"])
def test_output_that_cannot_be_written_is_an_error(command: str) -> None:
    made = shell(f"{KCONVERT} {command} >/dev/full")
    assert made.returncode == 3
    assert made.stderr.startswith("kconvert: standard output: No space left on device")
    assert made.stderr.count("\n") == 1
    assert shell(f"{KCONVERT} {command} 2>/dev/full").returncode == 0


def few_threads(count: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """kconvert where only `count` threads can be started, as under `ulimit -u`."""
    code = (
        "import sys, threading\n"
        f"real, left = threading._start_new_thread, [{count}]\n"
        "def start(*args):\n"
        "    left[0] -= 1\n"
        '    if left[0] < 0: raise RuntimeError("can\'t start new thread")\n'
        "    return real(*args)\n"
        "threading._start_new_thread = start\n"
        f"sys.argv = ['kconvert', *{[*map(str, arguments)]}]\n"
        "from kconvert.convert.cli.main import main\n"
        "main()\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("count", [0, 2])
def test_no_more_threads(count: int, tmp_path: Path) -> None:
    convert(KIMI_MINI, tmp_path / "done", tp=2)
    for arguments in (
        ("convert", KIMI_MINI, tmp_path / "out", "--workers", 4),
        ("validate", tmp_path / "done", "--workers", 4, "--quiet"),
    ):
        made = few_threads(count, *arguments)
        assert made.returncode == 3
        assert made.stderr == (
            "kconvert: no more threads can be started: raise the limit of processes (ulimit -u, or"
            " the container's), or give fewer --workers.\n"
        )
    assert not list(tmp_path.rglob("*.partial"))
    assert convert(KIMI_MINI, tmp_path / "out").complete


def test_synth_that_fails_leaves_no_half_shard(tmp_path: Path) -> None:
    made = few_threads(0, "synth", tmp_path / "new", "--preset", "kimi-mini", "--quiet")
    assert made.returncode == 3 and "no more threads" in made.stderr
    assert list((tmp_path / "new").iterdir()) == []


def test_numpy_s_blas_starts_no_thread() -> None:
    """If it cannot start one, it raises SIGINT, which we would take for the user's."""
    code = (
        "import os, sys\n"
        "from kconvert.convert.cli.main import main\n"
        f"sys.argv = ['kconvert', 'inspect', {str(KIMI_MINI)!r}]\n"
        "try: main()\n"
        "finally: print(len(os.listdir('/proc/self/task')), file=sys.stderr)\n"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert made.returncode == 0 and made.stderr == "1\n"


def test_memory_that_runs_out_is_a_sentence(kconvert, monkeypatch) -> None:
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you")):

        def fail(*_: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr("kconvert.convert.inspect.inspect", fail)
        outcome = kconvert("inspect", "here")
        assert outcome.code == 3 and "the memory is used up" in outcome.err


def test_an_ignored_sigint_stays_ignored(tmp_path: Path) -> None:
    """`nohup kconvert …`, or in the background of a script: ^C is not for it."""
    code = (
        "import os, signal, sys\n"
        "from kconvert.convert.cli import main as cli\n"
        "from kconvert.convert import inspect\n"
        "real = inspect.inspect\n"
        "def look(*arguments):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    return real(*arguments)\n"
        "inspect.inspect = look\n"
        f"sys.argv = ['kconvert', 'inspect', {str(KIMI_MINI)!r}]\n"
        "cli.main()\n"
    )
    for action, expected in ((signal.SIG_IGN, 0), (signal.SIG_DFL, 130)):
        made = subprocess.run(
            [sys.executable, "-c", code], capture_output=True,
            preexec_fn=lambda action=action: signal.signal(signal.SIGINT, action),
        )  # fmt: skip
        assert made.returncode == expected
