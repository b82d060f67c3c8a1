"""One run at a time works in an output."""

import json
import socket
import subprocess
import sys
from pathlib import Path


def test_another_run_on_the_same_output(mini: Path, tmp_path: Path, kconvert) -> None:
    out = tmp_path / "out"
    owner = "from kconvert.convert.output.lock import owned\nfrom pathlib import Path\nimport sys\n"
    owner += "with owned(Path(sys.argv[1])): print('mine', flush=True); sys.stdin.read()"
    (out / ".kconvert").mkdir(parents=True)
    with subprocess.Popen(
        [sys.executable, "-c", owner, out / ".kconvert"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as other:  # fmt: skip
        assert other.stdout.readline() == b"mine\n"
        outcome = kconvert("convert", mini, out)
        assert outcome.code == 3
        assert "another run" in outcome.err and f"pid {other.pid}" in outcome.err
        other.kill()
    assert (out / ".kconvert/owner").exists()  # it died without tidying up
    assert kconvert("convert", mini, out).code == 0


def test_owner_in_another_container_is_not_taken_over(mini, tmp_path, kconvert) -> None:
    """Of the same host name: its process ids say nothing here."""
    work = tmp_path / "out/.kconvert"
    work.mkdir(parents=True)
    host = f"{socket.gethostname()}/pid:[1]"
    (work / "owner").write_text(json.dumps({"host": host, "pid": 1, "started": "x"}))
    outcome = kconvert("convert", mini, tmp_path / "out")
    assert outcome.code == 3 and f"pid 1 on {host}" in outcome.err


def test_owner_on_another_host_is_not_taken_over(mini: Path, tmp_path: Path, kconvert) -> None:
    work = tmp_path / "out/.kconvert"
    work.mkdir(parents=True)
    (work / "owner").write_text(json.dumps({"host": "elsewhere", "pid": 1, "started": "x"}))
    outcome = kconvert("convert", mini, tmp_path / "out")
    assert outcome.code == 3
    assert "pid 1 on elsewhere" in outcome.err
