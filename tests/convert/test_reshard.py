"""An output made from another one's blobs is, bit for bit, what a conversion of the source is."""

import os
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from engines import checkpoints
from formats_kit import CHECKPOINTS, FORMATS, GPT_OSS
from kit import KIMI_MINI, flip, tree

from kconvert.convert import convert
from kconvert.convert.execute import memory_bound
from kconvert.convert.output import publish
from kconvert.convert.reshard import prepare_reshard
from kconvert.convert.run import Conversion, run

LAYER = "layer-00001.safetensors"
ONE_LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "moe_intermediate_size": 512}


class Kind(NamedTuple):
    layout: str
    tp: int
    ep: int


PARALLEL = [(tp, ep) for tp in (1, 2, 4, 8) for ep in (1, 2, 4, 8) if ep <= tp]
# Of 64 columns a group, 8 ranks have one group of w2 each, whose scales marlin orders otherwise.
FEW = [Kind("marlin", 1, 1), Kind("marlin", 8, 1), Kind("w4a16", 4, 2), Kind("marlin", 8, 8)]


def reshard(output: Path, new: Path, kind: Kind) -> Conversion:
    return run(prepare_reshard(output, new, **kind._asdict()))


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory):
    """One MoE layer of 8 experts, 512 rows, groups of 32 or 64 columns or a scale a row: the
    conversion of a kind."""
    root = tmp_path_factory.mktemp("resharded")

    @cache
    def source(group_size: int | None) -> Path:
        return checkpoints.write(root / f"source-{group_size}", group_size=group_size, **ONE_LAYER)

    @cache
    def output(kind: Kind, group_size: int | None = 32) -> Path:
        folder = root / f"{'-'.join(map(str, kind))}-{group_size}"
        convert(source(group_size), folder, layout=kind.layout, tp=kind.tp, ep=kind.ep)
        return folder

    return output


@pytest.mark.parametrize("layout", ["marlin", "w4a16"])
def test_every_tp_and_ep(converted, layout: str, tmp_path: Path) -> None:
    kinds = [Kind(layout, *parallel) for parallel in PARALLEL]
    for have in kinds:
        for want in kinds:
            new = tmp_path / "new"
            done = reshard(converted(have), new, want)
            assert tree(new) == tree(converted(want)), (have, want)
            assert done.files_linked == (2 + want.tp if have == want else 2)
            shutil.rmtree(new)


@pytest.mark.parametrize("group_size", [None, 64])
def test_other_groups_and_layouts(converted, group_size: int | None, tmp_path: Path) -> None:
    for have in FEW:
        for want in FEW:
            reshard(converted(have, group_size), tmp_path / "new", want)
            assert tree(tmp_path / "new") == tree(converted(want, group_size)), (have, want)
            shutil.rmtree(tmp_path / "new")


def test_it_is_sliced_where_that_can_be(converted, tmp_path: Path, monkeypatch) -> None:
    """Also beside scales that must be ordered anew."""
    from kconvert.layouts import marlin

    unpacked = []
    real = marlin.Marlin.restore
    monkeypatch.setattr(marlin.Marlin, "restore", lambda *a: unpacked.append(a[1]) or real(*a))
    reshard(converted(Kind("marlin", 4, 1)), tmp_path / "a", Kind("marlin", 8, 2))
    assert unpacked == []
    reshard(converted(Kind("marlin", 8, 1), 64), tmp_path / "b", Kind("marlin", 4, 1))
    assert set(unpacked) == {"scale"} and len(unpacked) == 8 * 8  # of w2, of every rank


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_format(name: str, tmp_path: Path) -> None:
    have, want = Kind("marlin", 2, 1), Kind("w4a16", 2, 2)
    if name == GPT_OSS:
        have, want = Kind("w4a16", 1, 1), Kind("w4a16", 2, 2)
    for kind in (have, want):
        convert(FORMATS / name, tmp_path / kind.layout / str(kind.ep), **kind._asdict())
    reshard(tmp_path / have.layout / str(have.ep), tmp_path / "new", want)
    assert tree(tmp_path / "new") == tree(tmp_path / want.layout / str(want.ep))


def test_what_was_left_out_stays_so(tmp_path: Path) -> None:
    source = KIMI_MINI
    convert(source, tmp_path / "a", text_only=True, tp=2)
    convert(source, tmp_path / "b", text_only=True, tp=4)
    reshard(tmp_path / "a", tmp_path / "c", Kind("marlin", 4, 1))
    assert tree(tmp_path / "b") == tree(tmp_path / "c")


def test_common_blobs_are_linked_or_copied(tmp_path: Path, monkeypatch, kconvert) -> None:
    convert(KIMI_MINI, tmp_path / "a", tp=2)
    common = "common/outer.safetensors"
    linked = kconvert("reshard", tmp_path / "a", tmp_path / "b", "--tp", 4)
    assert "5 blobs are links" in linked.out
    monkeypatch.setattr(publish, "link", lambda *_: None)
    copied = kconvert("reshard", tmp_path / "a", tmp_path / "c", "--tp", 4)
    assert "13 blobs written" in copied.out and "links" not in copied.out
    assert not (tmp_path / "a" / common).samefile(tmp_path / "c" / common)
    assert tree(tmp_path / "b") == tree(tmp_path / "c")


def damage(out: Path, what: str) -> str:
    """Change one thing of an output; what it is called."""
    blob = out / f"rank-00001-of-00002/{LAYER}"
    if what == "expert":
        return flip(blob, "w2_weight_packed", 3) + ", expert 7"
    if what == "common":
        return flip(out / "common/outer.safetensors", "norm.weight")
    if what == "missing":
        blob.unlink()
        return f"rank-00001-of-00002/{LAYER} is missing"
    if what == "small":
        (out / "generation_config.json").write_text("{}" + 41 * " ")
        return "generation_config.json"
    if what == "header":
        data = bytearray(blob.read_bytes())
        data[60] ^= 1
        blob.write_bytes(data)
        return LAYER
    data = (out / "config.json").read_text().replace("256", "255", 1)
    (out / "config.json").write_text(data)
    return "config.json"


@pytest.mark.parametrize("what", ["expert", "common", "missing", "small", "header", "config"])
@pytest.mark.parametrize("command", ["reshard", "export"])
def test_damage_is_named(what: str, command: str, tmp_path: Path, kconvert) -> None:
    convert(KIMI_MINI, tmp_path / "a", tp=2, ep=2)
    words = damage(tmp_path / "a", what)
    options = ["--tp", 4] if command == "reshard" else []
    outcome = kconvert(command, tmp_path / "a", tmp_path / "b", *options)
    assert outcome.code == 2 and words in outcome.err and outcome.err.count("\n") == 1
    assert not list((tmp_path / "b").glob("kconvert.json"))
    assert not list((tmp_path / "b").glob("*.index.json"))


def test_refused_as_a_conversion_is(tmp_path: Path, kconvert) -> None:
    convert(KIMI_MINI, tmp_path / "a", tp=2)
    convert(KIMI_MINI, tmp_path / "part", layers=[1])
    for arguments, words in [
        (("a", "b", "--tp", 3), "what works: --tp 1"),
        (("a", "b", "--tp", 8), "64-column tiles; what works: --tp 8 --ep 2"),
        (("a", "a", "--tp", 4), "lies in the source"),
        (("a", "a/b", "--tp", 4), "lies in the source"),
        (("part", "b", "--tp", 4), "holds a part of the model"),
        (("nothing", "b", "--tp", 4), "nothing is not a folder: give an output"),
        (("a", "part", "--tp", 4), "is for marlin tp 1 ep 1, this run is for marlin tp 4"),
    ]:
        paths = [tmp_path / argument for argument in arguments[:2]]
        outcome = kconvert("reshard", *paths, *arguments[2:])
        assert outcome.code == 2 and words in outcome.err, outcome.err
    assert not (tmp_path / "b").exists()
    plan = kconvert("reshard", tmp_path / "a", tmp_path / "b", "--tp", 4, "--dry-run")
    assert plan.code == 0 and "tp 4" in plan.out and not (tmp_path / "b").exists()


@pytest.mark.parametrize("command", ["reshard", "export"])
def test_a_killed_run_goes_on(command: str, tmp_path: Path, kconvert) -> None:
    convert(KIMI_MINI, tmp_path / "a", tp=2)
    options = ["--tp", "4"] if command == "reshard" else []
    whole, new = tmp_path / "whole", tmp_path / "new"
    assert kconvert(command, tmp_path / "a", whole, *options).code == 0
    code = (
        "import os, signal, sys\n"
        "from kconvert.convert.output import writer\n"
        "from kconvert.convert.cli import main as cli\n"
        "real, done = writer.publish, []\n"
        "def publish(*a):\n"
        "    if len(done) == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    done.append(real(*a))\n"
        "writer.publish = publish\n"
        "cli.main()\n"
    )
    arguments = [command, str(tmp_path / "a"), str(new), *options]
    ended = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True)
    assert ended.returncode == -signal.SIGKILL
    before = {p: p.stat().st_ino for p in new.rglob("*.safetensors")}
    assert len(before) >= 3
    outcome = kconvert(*arguments, "--json")
    assert outcome.code == 0 and '"files_kept": ' in outcome.out
    assert all(os.stat(path).st_ino == inode for path, inode in before.items())
    assert tree(new) == tree(whole)


def test_two_live_runs_are_never_together(tmp_path: Path) -> None:
    convert(KIMI_MINI, tmp_path / "a", tp=2)
    prepared = prepare_reshard(tmp_path / "a", tmp_path / "b", tp=4)
    with publish.working_in(prepared.workspace), pytest.raises(OSError, match="another run"):
        run(prepared)


def test_memory_is_bounded(tmp_path: Path) -> None:
    """By one expert a worker, and unpacked three times of it; not by the layer."""
    convert(KIMI_MINI, tmp_path / "a", tp=4)
    same = prepare_reshard(tmp_path / "a", tmp_path / "b", tp=2).plan
    other = prepare_reshard(tmp_path / "a", tmp_path / "b", layout="w4a16", tp=2).plan
    expert = 3 * (256 * 256 // 2 + 256 * 8 * 2)
    assert memory_bound(other, 4) - memory_bound(same, 4) == 4 * 2 * expert
