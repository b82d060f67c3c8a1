"""Several runs on one output: every one its share, and the same bytes as one run alone."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hub.server import Hub, environment
from kit import KIMI_MINI, tree

from kconvert.convert import convert
from kconvert.convert.output.lock import owned
from kconvert.convert.share import Share, parse_share, share_of_launcher
from kconvert.layouts.errors import UnsupportedError


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("whole") / "out"
    convert(KIMI_MINI, out, tp=2)
    return tree(out)


def start(*arguments: object, **environ: str) -> subprocess.Popen:
    code = [sys.executable, "-m", "kconvert.convert.cli", *map(str, arguments)]
    return subprocess.Popen(code, stderr=subprocess.PIPE, text=True, env=environ or None)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_one_after_the_other(order, whole, tmp_path: Path, kconvert) -> None:
    """Whoever is last writes the manifest; share 0 writes what is no layer."""
    out = tmp_path / "out"
    for i in order:
        outcome = kconvert("convert", KIMI_MINI, out, "--tp", 2, "--share", f"{i}/3", "--json")
        assert outcome.code == 0, outcome.err
        table = json.loads(outcome.out)
        assert table["complete"] is (i == order[-1])
        assert table["files_written"] == {0: 3, 1: 3, 2: 3}[i]
        assert (out / "kconvert.json").exists() is table["complete"]
    assert tree(out) == whole
    assert [p.name for p in (out / ".kconvert").iterdir()] == ["runs.jsonl"]


def test_all_at_once_from_the_hub(whole, tmp_path: Path) -> None:
    with Hub() as hub:
        hub.add_repo("org/mini", KIMI_MINI)
        env = environment(hub.url, tmp_path / "home")
        out = tmp_path / "out"
        command = ("convert", "org/mini", out, "--tp", 2)
        runs = [start(*command, **env, RANK=str(i), WORLD_SIZE="3") for i in range(3)]
        errors = [run.communicate(timeout=120)[1] for run in runs]
        assert [run.returncode for run in runs] == [0, 0, 0], errors
        assert start(*command, **{**env, "OUT": ""}).wait(60) == 0
        shards = [r.path for r in hub.requests if r.kind == "cdn" and not r.range]
        assert len([p for p in shards if p.endswith(".safetensors")]) == 6  # each one once
    assert tree(out).keys() == whole.keys()
    assert json.loads((out / "kconvert.json").read_text())["complete"] is True
    assert [p.name for p in (out / ".kconvert").iterdir()] == ["runs.jsonl"]


def test_finish(whole, tmp_path: Path, kconvert) -> None:
    out = tmp_path / "out"
    assert kconvert("finish", out).code == 2
    for i in range(2):
        assert kconvert("convert", KIMI_MINI, out, "--tp", 2, "--share", f"{i}/2").code == 0
        ended = kconvert("finish", out)
        if i == 0:
            assert ended.code == 2
            first = "common/layer-00001.safetensors"
            assert f"lacks {first} and 2 other files: run the shares" in ended.err
    assert ended.code == 0 and f"{out}: complete, {len(whole) - 1} files" in ended.out
    assert tree(out) == whole


def test_finish_writes_what_the_last_share_could_not(whole, tmp_path: Path, kconvert) -> None:
    """As when the last two did not see each other's files in time."""
    out = tmp_path / "out"
    assert kconvert("convert", KIMI_MINI, out, "--tp", 2, "--share", "0/2").code == 0
    outline = (out / ".kconvert/outline.json").read_bytes()
    assert kconvert("convert", KIMI_MINI, out, "--tp", 2, "--share", "1/2").code == 0
    (out / "kconvert.json").unlink()
    (out / ".kconvert/outline.json").write_bytes(outline)
    assert kconvert("finish", out).code == 0
    assert tree(out) == whole


def test_killed_share_is_resumed_beside_the_others(whole, tmp_path: Path, kconvert) -> None:
    with Hub(bandwidth=3e6) as hub:
        hub.add_repo("org/mini", KIMI_MINI)
        env = environment(hub.url, tmp_path / "home")
        out = tmp_path / "out"
        command = ("convert", "org/mini", out, "--tp", 2, "--share", "1/2")
        killed = start(*command, **env)
        incoming = out / ".kconvert/share-1-of-2/incoming"
        deadline = time.monotonic() + 60
        while not list(incoming.glob("*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        assert list(incoming.glob("*"))
        other = start(*command[:-1], "0/2", **env)
        assert other.wait(60) == 0
        assert list(incoming.glob("*"))  # not the other share's to clear
        assert start(*command, **env).wait(60) == 0
    assert json.loads((out / "kconvert.json").read_text())["complete"] is True
    assert [p.name for p in (out / ".kconvert").iterdir()] == ["runs.jsonl"]


@pytest.mark.parametrize(
    ("mine", "other", "bears"),
    [
        (Share(0, 2), Share(1, 2), True),
        (Share(0, 2), Share(0, 2), False),
        (Share(0, 2), Share(1, 3), False),
        (None, Share(0, 2), False),
        (Share(0, 2), None, False),
    ],
)
def test_who_bears_whom(mine, other, bears, tmp_path: Path, kconvert) -> None:
    work = tmp_path / "out/.kconvert"
    for share in (mine, other):
        (work / (share.name if share else "")).mkdir(parents=True, exist_ok=True)
    option = ["--share", f"{mine.index}/{mine.count}"] if mine else []
    with owned(work, other):
        outcome = kconvert("convert", KIMI_MINI, tmp_path / "out", *option)
    assert outcome.code == (0 if bears else 3)
    assert bears or "another run is at work here" in outcome.err


def test_killed_shares_of_another_count_leave_nothing(whole, tmp_path: Path, kconvert) -> None:
    out = tmp_path / "out"
    left = out / ".kconvert/share-1-of-4/incoming/model.part"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    for i in range(2):
        assert kconvert("convert", KIMI_MINI, out, "--tp", 2, "--share", f"{i}/2").code == 0
    assert tree(out) == whole
    assert [p.name for p in (out / ".kconvert").iterdir()] == ["runs.jsonl"]


def test_launcher_is_said_first(tmp_path: Path) -> None:
    run = start(
        "convert", KIMI_MINI, tmp_path / "out", "--dry-run",
        RANK="1", WORLD_SIZE="2", PATH=os.environ["PATH"],
    )  # fmt: skip
    assert run.communicate()[1] == "share-1-of-2, as the launcher says; --share 0/1 converts all\n"


def test_shares_of_different_commands(tmp_path: Path, kconvert) -> None:
    out = tmp_path / "out"
    assert kconvert("convert", KIMI_MINI, out, "--tp", 2, "--share", "1/3").code == 0
    outcome = kconvert("convert", KIMI_MINI, out, "--tp", 2, "--share", "0/3", "--text-only")
    assert outcome.code == 2 and "give all shares the same command" in outcome.err


def test_launchers() -> None:
    assert share_of_launcher({}) is None
    assert share_of_launcher({"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert share_of_launcher({"RANK": "2", "WORLD_SIZE": "4"}) == Share(2, 4)
    srun = {"SLURM_PROCID": "1", "SLURM_NTASKS": "3", "SLURM_STEP_NUM_TASKS": "3"}
    assert share_of_launcher(srun) == Share(1, 3)
    batch_script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "3"}  # runs once, for all
    assert share_of_launcher(batch_script) is None
    assert share_of_launcher({"RANK": "", "WORLD_SIZE": ""}) is None
    with pytest.raises(UnsupportedError, match="RANK=4 and WORLD_SIZE=4 in the environment are no"):
        share_of_launcher({"RANK": "4", "WORLD_SIZE": "4"})
    for text in ("4/4", "1", "-1/2", "a/b", "0/0"):
        with pytest.raises(UnsupportedError, match="is not I/N with I from 0 to N - 1"):
            parse_share(text)


def test_overwrite_is_nothing_for_a_share(tmp_path: Path, kconvert) -> None:
    outcome = kconvert("convert", KIMI_MINI, tmp_path / "out", "--share", "0/2", "--overwrite")
    assert outcome.code == 2 and "delete the old output first" in outcome.err
