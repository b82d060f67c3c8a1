"""Carrying out: bytes read once, memory bounded, the same bytes always, resumed after anything."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kit import KIMI_MINI, LAYER1, SHARD, change_json, copy_mini, load, tree, write

from kconvert.convert import convert, execute
from kconvert.convert.output.writer import BlobWriter
from kconvert.convert.prepare import Options, prepare
from kconvert.convert.run import run
from kconvert.layouts.checkpoint import read_checkpoint
from kconvert.layouts.errors import CheckpointError, KconvertError, OutputError
from kconvert.validate import validate


def test_every_source_byte_is_read_once(tmp_path: Path, monkeypatch) -> None:
    """Counted at the system call: ranges do not overlap and cover every indexed tensor."""
    prepared = prepare(KIMI_MINI, tmp_path / "out", Options(tp=2, ep=2))
    ranges: list[tuple[str, int, int]] = []
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        count = real(fd, buffers, offset)
        name = Path(os.readlink(f"/proc/self/fd/{fd}")).name
        for buffer in buffers:  # a tensor each, where several lie side by side
            ranges.append((name, offset, offset + len(buffer)))
            offset += len(buffer)
        assert count == sum(map(len, buffers))
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    result = run(prepared)
    tensors = read_checkpoint(KIMI_MINI).tensors.values()
    wanted = sorted((t.shard, t.start, t.start + t.nbytes) for t in tensors)
    assert sorted(ranges) == wanted
    assert result.bytes_read == sum(t.nbytes for t in tensors) == 4_627_328


@pytest.mark.parametrize("workers", [1, 3, 16])
def test_same_bytes_on_any_number_of_workers(workers: int, tmp_path: Path) -> None:
    convert(KIMI_MINI, tmp_path / "a", tp=4)
    convert(KIMI_MINI, tmp_path / "b", tp=4, workers=workers)
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_same_bytes_from_another_folder_and_in_parts(tmp_path: Path) -> None:
    """Path, time and order of the parts leave no trace; the manifest is the same too."""
    convert(KIMI_MINI, tmp_path / "whole", tp=2)
    source = copy_mini(tmp_path / "elsewhere")
    steps = [{"layers": [2]}, {"ranks": [1]}, {"layers": [0, 1], "ranks": [0]}]
    for step in steps:
        part = convert(source, tmp_path / "parts", tp=2, **step)
        manifest = json.loads((tmp_path / "parts/kconvert.json").read_text())
        assert manifest["complete"] is part.complete
    assert part.complete
    assert tree(tmp_path / "whole") == tree(tmp_path / "parts")


def test_shard_by_shard(tmp_path: Path) -> None:
    """Each deleted after use: what one does without room for the whole."""
    convert(KIMI_MINI, tmp_path / "whole", tp=2)
    source = copy_mini(tmp_path / "source")
    kept = {path.name: path.read_bytes() for path in source.glob("model-0000[123]*")}
    for path in source.glob("model-0000[123]*"):
        path.unlink()
    for layer, name in enumerate(sorted(kept)):
        (source / name).write_bytes(kept[name])
        assert not convert(source, tmp_path / "out", tp=2, layers=[layer]).complete
        (source / name).unlink()
    last = convert(source, tmp_path / "out", tp=2)  # outer and vision, whose shards are here
    assert (last.files_written, last.complete) == (2, True)
    assert len(last.trusted) == 7  # blobs that cannot be compared, as their shards are gone
    assert tree(tmp_path / "whole") == tree(tmp_path / "out")


def test_published_files_are_not_written_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(KIMI_MINI, out, tp=2)
    before = {path: path.stat().st_ino for path in out.rglob("*.safetensors")}
    lost = out / "rank-00001-of-00002/layer-00002.safetensors"
    whole = lost.read_bytes()
    lost.unlink()
    result = convert(KIMI_MINI, out, tp=2)
    assert (result.files_written, result.files_kept) == (1, len(before) - 1)
    assert lost.read_bytes() == whole
    del before[lost]
    assert {path: path.stat().st_ino for path in before} == before


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.usefixtures("interruptible")
def test_interrupted_and_resumed(sign: signal.Signals, tmp_path: Path) -> None:
    """Stopped in the middle of a layer; the same command ends in the same bytes."""
    convert(KIMI_MINI, tmp_path / "whole", tp=2)
    out = tmp_path / "out"
    slow = (
        "import sys, time\n"
        "from kconvert.convert.cli import main as cli\n"
        "from kconvert.convert.output import writer\n"
        "real = writer.StagedFile.write_expert\n"
        "def write(self, *a):\n"
        "    time.sleep(0.08); return real(self, *a)\n"
        "writer.StagedFile.write_expert = write\n"
        f"sys.argv = ['kconvert', 'convert', {str(KIMI_MINI)!r}, {str(out)!r}, '--tp', '2']\n"
        "cli.main()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", slow], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(out.glob(".kconvert/rank-*.partial")) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(sign)
    _, err = process.communicate(timeout=60)
    if sign == signal.SIGKILL:
        assert list(out.glob(".kconvert/*.partial"))
    else:
        assert process.returncode == 130
        assert (
            err == f"kconvert: interrupted; to resume: kconvert convert {KIMI_MINI} {out} --tp 2\n"
        )
        assert not list(out.glob(".kconvert/*.partial"))
    assert not (out / "kconvert.json").exists()
    inodes = {path: path.stat().st_ino for path in out.rglob("*.safetensors")}
    assert convert(KIMI_MINI, out, tp=2).complete
    assert tree(out) == tree(tmp_path / "whole")
    assert {path: path.stat().st_ino for path in inodes} == inodes
    assert not list(out.glob(".kconvert/*.partial"))


def test_shard_cut_while_it_is_read(tmp_path: Path) -> None:
    source = copy_mini(tmp_path / "source")
    prepared = prepare(source, tmp_path / "out", Options(tp=2))
    os.truncate(source / "model-00003-of-000006.safetensors", 700_000)
    with pytest.raises(CheckpointError, match="cut while it was being read"):
        run(prepared)
    assert not list((tmp_path / "out").rglob("layer-00002.safetensors"))
    assert not list((tmp_path / "out/.kconvert").glob("*.partial"))


def test_shard_rewritten_while_it_is_read(tmp_path: Path) -> None:
    """Its blobs would bear the fingerprint of what it was before."""
    source = copy_mini(tmp_path / "source")
    prepared = prepare(source, tmp_path / "out", Options(tp=2))
    shard = source / "model-00003-of-000006.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-3] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(CheckpointError, match="was changed while it was being read"):
        run(prepared)
    assert not list((tmp_path / "out").rglob("layer-00002.safetensors"))
    assert convert(source, tmp_path / "out", tp=2).complete
    assert validate(tmp_path / "out", source).ok


def test_index_that_points_elsewhere_is_another_source(tmp_path: Path) -> None:
    """The same shards, but a tensor taken from the other of two copies that differ."""
    source = copy_mini(tmp_path / "source")
    index, name = source / "model.safetensors.index.json", f"{LAYER1}mlp.gate.weight"
    other = "model-00003-of-000006.safetensors"
    router = load(source / SHARD)[name]
    twin = router._replace(data=bytes(len(router.data)))
    write(source / other, {**load(source / other), name: twin})
    convert(source, tmp_path / "out", tp=2)
    change_json(index, lambda table: table["weight_map"].update({name: other}))
    with pytest.raises(OutputError, match="made from other weights"):
        convert(source, tmp_path / "out", tp=2)
    convert(source, tmp_path / "out", tp=2, overwrite=True)
    assert validate(tmp_path / "out", source).ok


def test_mount_of_the_same_disk(tmp_path: Path, monkeypatch) -> None:
    """A bind mount has its folder's device number, and yet no rename reaches it."""
    real, out = os.rename, tmp_path / "out"
    disk = (out, out / ".kconvert")  # the other folders of the output are mounts

    def rename(old: Path, new: Path) -> None:
        if (Path(old).parent in disk) != (Path(new).parent in disk):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(old))
        real(old, new)

    monkeypatch.setattr(os, "rename", rename)
    convert(KIMI_MINI, tmp_path / "out", tp=2)
    monkeypatch.undo()
    convert(KIMI_MINI, tmp_path / "plain", tp=2)
    assert tree(tmp_path / "out") == tree(tmp_path / "plain")
    assert not list(tmp_path.glob("out/*/.kconvert"))


def test_output_below_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch) -> None:
    """Only the output's own folders are synced."""
    out = tmp_path / "closed/out"
    out.mkdir(parents=True)
    opened: list[str] = []
    real = os.open
    try:
        os.open = lambda path, *rest, **more: (opened.append(str(path)), real(path, *rest, **more))[
            1
        ]
        convert(KIMI_MINI, out, tp=2)
    finally:
        os.open = real
    assert str(out) in opened and str(out.parent) not in opened


def test_a_tensor_not_written_is_not_published(tmp_path: Path, monkeypatch) -> None:
    """The books are checked: a forgotten or doubled piece stops the run."""
    real = BlobWriter.take
    forgetful = lambda self, piece: None if piece.expert == 3 else real(self, piece)  # noqa: E731
    monkeypatch.setattr(BlobWriter, "take", forgetful)
    with pytest.raises(KconvertError, match="bytes were written and 4 tensors are not whole"):
        convert(KIMI_MINI, tmp_path / "a", tp=2)
    monkeypatch.setattr(BlobWriter, "take", lambda *a: (real(*a), real(*a)))
    with pytest.raises(KconvertError, match="written twice"):
        convert(KIMI_MINI, tmp_path / "b", tp=2)
    assert not list(tmp_path.rglob("rank-*/*.safetensors"))


def test_overwrite_replaces_and_leaves_nothing_behind(tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(KIMI_MINI, out, tp=4)
    ranks = {p.relative_to(out).as_posix(): p.stat().st_size for p in out.glob("rank-*/*")}
    result = convert(KIMI_MINI, out, tp=2, overwrite=True)
    convert(KIMI_MINI, tmp_path / "fresh", tp=2)
    assert tree(out) == tree(tmp_path / "fresh")
    assert result.replaced == ranks and result.files_kept == 5  # what is common suits any tp
    assert {p.name for p in out.glob("rank-*")} == {"rank-00000-of-00002", "rank-00001-of-00002"}


def test_overwrite_does_not_touch_what_is_not_ours(tmp_path: Path, kconvert) -> None:
    """A checkpoint in the output folder, or somebody else's blob, is not ours to delete."""
    out = copy_mini(tmp_path / "out")
    (out / "common").mkdir()
    (out / "model-00002-of-000006.safetensors").rename(out / "common/layer-00001.safetensors")
    before = tree(out)
    outcome = kconvert("convert", KIMI_MINI, out, "--overwrite")
    assert outcome.code == 2
    assert "was not written by this version of kconvert (and 6 more): choose another" in outcome.err
    assert "--overwrite" not in outcome.err
    assert tree(out) == before


def test_text_only_leaves_vision_out(tmp_path: Path) -> None:
    result = convert(KIMI_MINI, tmp_path / "out", tp=2, text_only=True)
    assert result.complete
    assert result.left_out == ("vision",)
    assert not (tmp_path / "out/common/vision.safetensors").exists()
    assert json.loads((tmp_path / "out/kconvert.json").read_text())["text_only"] is True
    assert convert(KIMI_MINI, tmp_path / "out", tp=2).files_written == 1
    assert validate(tmp_path / "out", KIMI_MINI).ok
    before = tree(tmp_path / "out")
    with pytest.raises(OutputError, match=r"vision\.safetensors would be left out by --text-only"):
        convert(KIMI_MINI, tmp_path / "out", tp=2, text_only=True)
    assert tree(tmp_path / "out") == before
    again = convert(KIMI_MINI, tmp_path / "out", tp=2, text_only=True, overwrite=True)
    assert again.replaced.keys() == {"common/vision.safetensors"} and again.files_kept == 8
    convert(KIMI_MINI, tmp_path / "fresh", tp=2, text_only=True)
    assert tree(tmp_path / "out") == tree(tmp_path / "fresh")


def test_text_only_stays_complete(tmp_path: Path) -> None:
    """A later run of a part does not take that away, nor is a part without vision `text_only`."""
    assert convert(KIMI_MINI, tmp_path / "out", tp=2, text_only=True).complete
    assert convert(KIMI_MINI, tmp_path / "out", tp=2, layers=[1]).complete
    convert(KIMI_MINI, tmp_path / "part", tp=2, layers=[1])
    assert json.loads((tmp_path / "part/kconvert.json").read_text())["text_only"] is False


def test_rank_folder_on_another_disk(tmp_path: Path) -> None:
    """A disk a rank: temporary files lie on the disk they will stay on."""
    shm = Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system at /dev/shm")
    out, disk = tmp_path / "out", shm / f"kconvert-test-{os.getpid()}"
    disk.mkdir()
    out.mkdir()
    (out / "rank-00001-of-00002").symlink_to(disk)
    try:
        convert(KIMI_MINI, out, tp=2)
        convert(KIMI_MINI, tmp_path / "plain", tp=2)
        name = "layer-00001.safetensors"
        plain = tmp_path / "plain/rank-00001-of-00002" / name
        assert (disk / name).read_bytes() == plain.read_bytes()
        assert sorted(p.name for p in disk.iterdir()) == [name, name.replace("1", "2")]
    finally:
        subprocess.run(["rm", "-r", disk], check=True)


def test_memory_stays_within_the_stated_bound(tmp_path: Path) -> None:
    """True-size experts, few and many layers: the buffers are what `memory_bound` says."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from kconvert.convert.bench.machine import PeakMemory\n"
        "from kconvert.convert.execute import memory_bound\n"
        "from kconvert.convert.prepare import Options, prepare\n"
        "from kconvert.convert.run import run\n"
        "options = Options(tp=8, workers=2, layers=[int(n) for n in sys.argv[3].split(',')])\n"
        "prepared = prepare(sys.argv[1], sys.argv[2], options)\n"
        "warm = Options(tp=2, workers=2)\n"
        "run(prepare(sys.argv[4], sys.argv[2] + '-warm', warm))  # numba and the threads' own\n"
        "with PeakMemory() as memory: run(prepared)\n"
        "print(memory.peak - memory.start, memory_bound(prepared.plan, 2))\n"
    )
    from kconvert.convert.synth.write import synth

    synth(tmp_path / "source", "k2.6", layers=[1, 2, 3, 4], experts=4)
    grown = []
    for layers in ("1", "1,2,3,4"):
        outcome = subprocess.run(
            [sys.executable, "-c", code, tmp_path / "source", tmp_path / f"out{layers}", layers,
             KIMI_MINI],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        used, bound = map(int, outcome.stdout.split())
        grown.append(used)
        assert bound == 2 * (24_772_632 + 3_096_576 + 2 * execute.CHUNK_BYTES)
        assert 0.5 * bound < used <= bound + 25_000_000
    assert grown[1] <= grown[0] + 20_000_000  # two jobs are under way: one more does not count
