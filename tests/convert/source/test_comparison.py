"""Validating against a repository of the Hub: nothing of it lies in the output, and not much at a
time anywhere."""

import json
import socket
from pathlib import Path

import pytest
from hub.faults import Fault, at
from kit import KIMI_MINI, LAYER1, SHARD, copy_mini, flip, flip_byte, tree

from kconvert.convert import convert

REPO = "moonshotai/Kimi-mini"


@pytest.fixture
def output(hub, command, tmp_path: Path) -> Path:
    """Converted from the Hub."""
    assert command("convert", REPO, tmp_path / "out", "--tp", 2).code == 0
    hub.requests.clear()
    return tmp_path / "out"


def move(hub, tmp_path: Path) -> None:
    """Another checkpoint is main now: a bit of a matrix differs."""
    changed = copy_mini(tmp_path / "changed")
    flip_byte(changed / SHARD, -1)
    hub.repos[REPO].commit(changed)


def test_against_the_commit_it_was_made_from(hub, command, output, tmp_path) -> None:
    commit = hub.repos[REPO].branches["main"]
    move(hub, tmp_path)
    before, report, work = tree(output), tmp_path / "r.html", tmp_path / "work"
    work.mkdir()
    options = ("--work-dir", work, "--report", report, "--json")
    ended = command("validate", output, "--source", REPO, *options)
    assert ended.code == 0, ended.err
    table = json.loads(ended.out)
    source = table["source"]
    assert (source["name"], source["commit"], table["verified"]) == (REPO, commit, True)
    sent = hub.shards_sent()
    assert sent == {name: (KIMI_MINI / name).stat().st_size for name in sent} and len(sent) == 6
    assert tree(output) == before and list(work.iterdir()) == []
    page = report.read_text()
    assert f"--source {REPO} --revision {commit}" in page
    assert all(
        len(shard["content"]) == 64 and shard["content"] in page for shard in source["shards"]
    )


def test_another_revision_and_faults(hub, command, output, tmp_path) -> None:
    """A shard that comes damaged is got again; what a killed run left is deleted; differences are
    findings."""
    move(hub, tmp_path)
    cache = tmp_path / "home/hub"
    left = cache / f".kconvert-validate-{socket.gethostname()}-x"
    left.mkdir()
    (left / "model.part").write_bytes(b"x")
    name = flip(output / "rank-00001-of-00002/layer-00002.safetensors", "w2_weight_packed", 3)
    hub.faults = at({1: Fault("corrupt", offset=400_000)}, kind="cdn", method="GET", path=SHARD)
    ended = command("validate", output, "--source", f"{REPO}@main", "--json")
    assert ended.code == 1, ended.err
    found = [(f["check"], f["tensor"], f["expert"]) for f in json.loads(ended.out)["findings"]]
    assert found == [
        ("common", f"{LAYER1}self_attn.q_b_proj.weight", None),
        ("digests", name, 3),
        ("codes", name, 3),
    ]
    assert hub.shards_sent()[SHARD] == 2 * (KIMI_MINI / SHARD).stat().st_size
    assert [path.name for path in cache.iterdir() if path.name.startswith(".kc")] == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--source", REPO, "--work-dir", "OUT/common"), "lies in the output"),
        (("--source", REPO, "--work-dir", "OUT/none"), "is no folder here"),
        (("--source", f"{REPO}@main", "--revision", "x"), "are two revisions"),
        (("--source", KIMI_MINI, "--revision", "main"), "is a folder here"),
        (("--source", ""), "it is empty"),
        (("--work-dir", "OUT"), "--work-dir is for a source"),
    ],
)  # fmt: skip
def test_refused(options, words, kconvert, tmp_path) -> None:
    out = tmp_path / "out"
    convert(KIMI_MINI, out)
    given = [str(option).replace("OUT", str(out)) for option in options]
    ended = kconvert("validate", out, *given)
    assert ended.code == 2 and words in ended.err
