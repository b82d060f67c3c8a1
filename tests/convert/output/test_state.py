"""Outputs that hold something else, and disks in the way: refused, and nothing is touched."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit import SHARD, copy_mini, published


def test_output_inside_input_and_input_inside_output(mini: Path, tmp_path: Path, kconvert) -> None:
    for source, output in [(mini, mini / "out"), (mini, mini), (mini, tmp_path)]:
        outcome = kconvert("convert", source, output)
        assert outcome.code == 2
        assert "lies in the" in outcome.err
    # A link must not hide it: the shards lie in the output.
    hub = tmp_path / "hub"
    hub.mkdir()
    for path in mini.iterdir():
        (hub / path.name).symlink_to(path)
    outcome = kconvert("convert", hub, mini)
    assert outcome.code == 2 and "lies in the output" in outcome.err


def test_output_of_another_fingerprint_is_kept(mini: Path, tmp_path: Path, kconvert) -> None:
    out = tmp_path / "out"
    assert kconvert("convert", mini, out, "--tp", 2).code == 0
    before = {path: (path.read_bytes(), path.stat().st_ino) for path in published(out)}
    other = copy_mini(tmp_path / "other")
    data = bytearray((other / SHARD).read_bytes())
    data[-5] ^= 1
    (other / SHARD).write_bytes(data)
    cases = [
        ([mini, "--tp", 4], "is for marlin tp 2 ep 1, this run is for marlin tp 4 ep 1"),
        ([mini, "--tp", 2, "--layout", "w4a16"], "this run is for w4a16"),
        ([other, "--tp", 2], "was made from other weights"),
    ]
    for (source, *options), words in cases:
        for more in ([], ["--dry-run"]):
            outcome = kconvert("convert", source, out, *options, *more)
            assert outcome.code == 2
            assert words in outcome.err and "--overwrite" in outcome.err
    assert {p: (p.read_bytes(), p.stat().st_ino) for p in published(out)} == before


def test_small_file_that_differs_is_kept(mini: Path, tmp_path: Path, kconvert) -> None:
    out = tmp_path / "out"
    assert kconvert("convert", mini, out).code == 0
    (mini / "generation_config.json").write_text("{}")
    outcome = kconvert("convert", mini, out)
    assert outcome.code == 2
    assert "generation_config.json differs from the source's" in outcome.err


@pytest.mark.parametrize(
    ("name", "make"),
    [("kconvert.json", Path.mkdir), ("common/outer.safetensors", os.mkfifo),
     ("config.json", Path.mkdir), ("common/layer-00001.safetensors", Path.mkdir)],
)  # fmt: skip
@pytest.mark.parametrize("options", [[], ["--overwrite"]])
def test_odd_things_in_the_output(
    name, make, options, mini: Path, tmp_path: Path, kconvert
) -> None:
    """Noticed before the first byte is written, whatever they are."""
    out = tmp_path / "out"
    (out / "common").mkdir(parents=True)
    make(out / name)
    outcome = kconvert("convert", mini, out, *options)
    assert outcome.code == 2
    assert name in outcome.err and "choose another output." in outcome.err
    assert [p.name for p in out.rglob("*.safetensors")] in ([], [Path(name).name])


def test_links_in_a_circle(mini: Path, tmp_path: Path, kconvert) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert kconvert("convert", mini, tmp_path / "a").code == 3
    assert kconvert("convert", tmp_path / "a", tmp_path / "out").code == 2


@pytest.mark.parametrize("arguments", [("", "out"), ("source", "")])
def test_empty_paths(arguments, tmp_path: Path, kconvert, monkeypatch) -> None:
    """An unset variable must not mean the current folder."""
    monkeypatch.chdir(tmp_path)
    outcome = kconvert("convert", *arguments)
    assert outcome.code == 2 and "it is empty" in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_output_that_is_a_checkpoint(mini: Path, tmp_path: Path, kconvert) -> None:
    out = copy_mini(tmp_path / "out")
    outcome = kconvert("convert", mini, out)
    assert outcome.code == 2
    assert "is part of another checkpoint" in outcome.err


def test_truncated_blob_is_not_taken_for_whole(mini: Path, tmp_path: Path, kconvert) -> None:
    out = tmp_path / "out"
    assert kconvert("convert", mini, out).code == 0
    blob = out / "common/outer.safetensors"
    os.truncate(blob, blob.stat().st_size - 1)
    outcome = kconvert("convert", mini, out)
    assert outcome.code == 2
    assert "outer.safetensors" in outcome.err and "truncated" in outcome.err


def test_no_space(mini: Path, tmp_path: Path, kconvert, monkeypatch) -> None:
    """The check is exact: one byte too few is refused, and nothing is written."""
    import shutil
    from collections import namedtuple

    plan = json.loads(kconvert("convert", mini, tmp_path / "out", "--dry-run", "--json").out)
    needed = plan["bytes_to_write"]
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, needed - 1))
    outcome = kconvert("convert", mini, tmp_path / "out")
    assert outcome.code == 3
    assert f"{needed:,} are needed (1 more)" in outcome.err
    assert published(tmp_path / "out") == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, needed))
    assert kconvert("convert", mini, tmp_path / "out").code == 0


def test_disk_that_fills_up_all_the_same(mini: Path, tmp_path: Path, kconvert, monkeypatch) -> None:
    """A file-size limit stands in for a full disk: the system's own error, at a real write."""
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))
    try:
        outcome = kconvert("convert", mini, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert outcome.code == 3
    assert "File too large" in outcome.err
    assert published(tmp_path / "out") == []
    assert kconvert("convert", mini, tmp_path / "out").code == 0


def test_no_permission(mini: Path, tmp_path: Path) -> None:
    """As another user where the tests run as root, who may write anywhere."""
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o755)
    for folder in (tmp_path, *tmp_path.parents):
        if "pytest" in str(folder):
            folder.chmod(0o755)
    if os.getuid() != 0:
        locked.chmod(0o555)
    code = (
        "import contextlib, os, sys, tqdm\n"
        "from kconvert.convert.cli import main as cli\n"
        f"sys.argv = ['kconvert', 'convert', {str(mini)!r}, {str(locked / 'out')!r}]\n"
        "sys.argv.append('--dry-run')  # loads all the code that the other user may not read\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(None): cli.main()\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        "sys.argv.pop(); cli.main()\n"
    )
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert outcome.returncode == 3, outcome.stderr
    assert f"{locked}/out" in outcome.stderr
    assert "Permission denied: check the permissions" in outcome.stderr
    assert "Traceback" not in outcome.stderr
