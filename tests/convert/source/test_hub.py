"""Converting from a repository of the Hub: the real client against the test Hub."""

import hashlib
import json
import shutil
import subprocess
import sys
import threading
import time

import pytest
from hub.faults import Fault, always, at, first_of
from hub.server import environment
from kit import KIMI_MINI, change_json, copy_mini, tree

from kconvert.convert import convert
from kconvert.convert.synth.write import synth

REPO = "moonshotai/Kimi-mini"


@pytest.fixture(scope="module")
def blobs_of_folder(tmp_path_factory) -> dict[str, bytes]:
    """What the same checkpoint becomes from a folder; only headers and manifest differ."""
    out = tmp_path_factory.mktemp("folder") / "out"
    convert(KIMI_MINI, out, tp=2)
    return tree(out)


def data_of(blobs: dict[str, bytes]) -> dict[str, bytes]:
    return {
        name: raw[8 + int.from_bytes(raw[:8], "little") :]
        for name, raw in blobs.items()
        if name.endswith(".safetensors")
    }


def test_from_the_hub(hub, command, tmp_path, blobs_of_folder) -> None:
    out = tmp_path / "out"
    ended = command("convert", REPO, out, "--tp", 2, "--json")
    assert ended.code == 0, ended.err
    table = json.loads(ended.out)
    commit = hub.repos[REPO].branches["main"]
    assert (table["repo"], table["commit"], table["complete"]) == (REPO, commit, True)
    made = tree(out)
    assert made.keys() == blobs_of_folder.keys()
    assert data_of(made) == data_of(blobs_of_folder)
    manifest = json.loads(made["kconvert.json"])
    assert (manifest["repo"], manifest["commit"]) == (REPO, commit)
    assert command("validate", out, "--source", KIMI_MINI).code == 0
    sent, files = hub.shards_sent(), {p.name: p.stat().st_size for p in KIMI_MINI.iterdir()}
    assert sent == {name: files[name] for name in sent} and len(sent) == 6
    assert not (out / ".kconvert/incoming").exists()
    cached = [p.name for p in (tmp_path / "home").rglob("*") if p.name.endswith(".safetensors")]
    assert cached == []


def test_dry_run_downloads_no_shard(hub, command, tmp_path) -> None:
    ended = command("convert", REPO, tmp_path / "out", "--tp", 2, "--dry-run")
    assert ended.code == 0, ended.err
    total = sum(p.stat().st_size for p in KIMI_MINI.glob("*.safetensors"))
    assert f"to download 6 shards, {total:,} B" in ended.out
    assert f"from {REPO} at {hub.repos[REPO].branches['main']}" in ended.out
    assert hub.shards_sent() == {} and not (tmp_path / "out").exists()


def test_never_more_than_two_shards(hub, command, tmp_path) -> None:
    """Downloads overlap with conversion and yet wait for room."""
    incoming, seen, over = tmp_path / "out/.kconvert/incoming", [], threading.Event()

    def watch() -> None:
        while not over.wait(0.001):
            names = {path.name.removesuffix(".part") for path in incoming.glob("model-*")}
            seen.append(len(names))

    watcher = threading.Thread(target=watch)
    watcher.start()
    hub.bandwidth = 4e6
    try:
        assert command("convert", REPO, tmp_path / "out", "--tp", 2).code == 0
    finally:
        over.set()
        watcher.join()
    assert max(seen) == 2


def test_a_full_disk_is_seen_before_anything_is_downloaded(hub, command, tmp_path) -> None:
    """Two shards lie beside the output for a while: they are part of what is needed."""
    plan = json.loads(command("convert", REPO, tmp_path / "out", "--dry-run", "--json").out)
    largest = sorted(p.stat().st_size for p in KIMI_MINI.glob("*.safetensors"))[-2:]
    needed = plan["bytes_to_write"] + sum(largest)
    assert plan["disks"][0]["needed"] == needed
    code = (
        "import shutil, sys\n"
        f"usage = shutil.disk_usage('/')._replace(free={needed - 1})\n"
        "shutil.disk_usage = lambda _: usage\n"
        f"sys.argv = ['kconvert', 'convert', {REPO!r}, {str(tmp_path / 'out')!r}]\n"
        "from kconvert.convert.cli.main import main\n"
        "main()\n"
    )
    env = environment(hub.url, tmp_path / "home")
    ended = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert ended.returncode == 3 and f"{needed:,} are needed (1 more)" in ended.stderr
    assert hub.shards_sent() == {}


def test_layers_download_their_shards_only(hub, command, tmp_path) -> None:
    assert command("convert", REPO, tmp_path / "out", "--tp", 2, "--layers", "1").code == 0
    assert list(hub.shards_sent()) == ["model-00002-of-000006.safetensors"]


def test_shards_in_the_cache_are_used_and_stay(hub, command, tmp_path) -> None:
    first = command("convert", REPO, tmp_path / "a", "--tp", 2, "--keep-shards")
    assert first.code == 0, first.err
    kept = sorted((tmp_path / "home/hub").rglob("snapshots/*/*.safetensors"))
    assert len(kept) == 6
    hub.requests.clear()
    assert command("convert", REPO, tmp_path / "b", "--tp", 2).code == 0
    assert hub.shards_sent() == {}
    assert all(path.exists() for path in kept)
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_offline_all_comes_from_the_cache(hub, command, tmp_path) -> None:
    assert command("convert", REPO, tmp_path / "a", "--tp", 2, "--keep-shards").code == 0
    hub.requests.clear()
    ended = command("convert", REPO, tmp_path / "b", "--tp", 2, HF_HUB_OFFLINE="1")
    assert ended.code == 0, ended.err
    assert hub.requests == []
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_offline_without_a_cache(command, tmp_path) -> None:
    ended = command("convert", REPO, tmp_path / "out", HF_HUB_OFFLINE="1")
    assert ended.code == 3
    assert f"{REPO} is not in the cache and HF_HUB_OFFLINE is set" in ended.err


def test_the_recorded_commit_wins_over_a_moved_branch(hub, command, tmp_path) -> None:
    out, begun = tmp_path / "out", hub.repos[REPO].branches["main"]
    assert command("convert", REPO, out, "--tp", 2, "--layers", "1").code == 0
    other = copy_mini(tmp_path / "other")
    change_json(other / "config.json", lambda table: table.update({"moved": True}))
    hub.repos[REPO].commit(other)
    (out / "kconvert.json").unlink()
    ended = command("convert", REPO, out, "--tp", 2, "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["commit"] == begun
    assert command("convert", REPO, tmp_path / "whole", "--tp", 2, "--revision", begun).code == 0
    assert tree(out) == tree(tmp_path / "whole")
    moved = hub.repos[REPO].branches["main"]
    refused = command("convert", REPO, out, "--tp", 2, "--revision", moved)
    assert refused.code == 2
    assert f"was made from {REPO} at {begun}" in refused.err


def test_another_revision_is_not_ignored(hub, command, tmp_path) -> None:
    out, begun = tmp_path / "out", hub.repos[REPO].branches["main"]
    assert command("convert", REPO, out, "--tp", 2).code == 0
    other = copy_mini(tmp_path / "other")
    change_json(other / "config.json", lambda table: table.update({"moved": True}))
    hub.repos[REPO].commit(other, branch="v2")
    assert command("convert", REPO, out, "--tp", 2).code == 0
    refused = command("convert", REPO, out, "--tp", 2, "--revision", "v2")
    assert refused.code == 2 and f"was made from {REPO} at {begun}" in refused.err
    assert command("convert", REPO, out, "--tp", 2, "--revision", "v3").code == 2
    ended = command("convert", REPO, out, "--tp", 2, "--revision", "v2", "--overwrite", "--json")
    assert json.loads(ended.out)["commit"] == hub.repos[REPO].branches["v2"]
    assert command("convert", REPO, tmp_path / "fresh", "--tp", 2, "--revision", "v2").code == 0
    assert tree(out) == tree(tmp_path / "fresh")


def test_what_two_commits_share_is_downloaded_once(hub, command, tmp_path) -> None:
    assert command("convert", REPO, tmp_path / "a", "--tp", 2, "--keep-shards").code == 0
    other = copy_mini(tmp_path / "other")
    change_json(other / "config.json", lambda table: table.update({"moved": True}))
    hub.repos[REPO].commit(other)
    hub.requests.clear()
    ended = command("convert", REPO, tmp_path / "b", "--tp", 2, "--keep-shards")
    assert ended.code == 0, ended.err
    assert hub.shards_sent() == {}


def test_damaged_shards_in_the_cache(hub, command, tmp_path) -> None:
    """Too short, a flipped byte of the header or the data: got again, and left as they are."""
    assert command("convert", REPO, tmp_path / "a", "--tp", 2, "--keep-shards").code == 0
    shards = sorted((tmp_path / "home/hub").rglob("snapshots/*/*.safetensors"))
    for shard, place in zip(shards, (-100, 20, 200_000), strict=False):
        raw = bytearray(shard.read_bytes())
        raw[place] ^= 1
        shard.resolve().write_bytes(raw[:place] if place < 0 else raw)
    damaged = {shard: shard.read_bytes() for shard in shards}
    ended = command("convert", REPO, tmp_path / "b", "--tp", 2)
    assert ended.code == 0, ended.err
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    assert {shard: shard.read_bytes() for shard in shards} == damaged
    offline = command("convert", REPO, tmp_path / "c", "--tp", 2, HF_HUB_OFFLINE="1")
    assert (offline.code in (2, 3) and "is damaged" in offline.err) or "truncated" in offline.err


def test_store_that_others_share(hub, command, tmp_path) -> None:
    """The cache's blobs may be links in turn: they are followed, and named by the Hub's hash."""
    assert command("convert", REPO, tmp_path / "a", "--tp", 2, "--keep-shards").code == 0
    store = tmp_path / "store"
    store.mkdir()
    for i, blob in enumerate(sorted((tmp_path / "home/hub").rglob("blobs/*"))):
        shutil.move(blob, store / f"object-{i}")
        blob.symlink_to(store / f"object-{i}")
    ended = command("convert", REPO, tmp_path / "b", "--tp", 2, HF_HUB_OFFLINE="1")
    assert ended.code == 0, ended.err
    assert "the 9 files that the cache has are taken for all" in ended.out
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_a_failed_run_waits_for_no_other_request(hub, command, tmp_path) -> None:
    """One shard's header is refused while another's server says nothing."""
    first, second = "model-00001-of-000006.safetensors", "model-00002-of-000006.safetensors"
    hub.faults = first_of(
        always(Fault("delay", seconds=60), kind="cdn", path=first),
        always(Fault("status", status=401), kind="resolve", path=second),
    )
    begin = time.monotonic()
    ended = command("convert", REPO, tmp_path / "out", "--tp", 2)
    assert ended.code == 3 and "the Hub wants a token" in ended.err
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("http://user:s3cret@host:9x", "HF_ENDPOINT or a proxy variable is no URL"),
        ("nonsense", "HF_ENDPOINT or a proxy variable is no URL"),
    ],
)
def test_endpoints_that_are_not_addresses(endpoint, words, command, tmp_path) -> None:
    ended = command("convert", REPO, tmp_path / "out", HF_ENDPOINT=endpoint)
    assert ended.code == 3 and words in ended.err and "s3cret" not in ended.err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (
            ["no/such"],
            2,
            "no/such (no folder here): the Hub has no such repository",
        ),
        ([REPO, "--revision", "nope"], 2, "no such revision; check --revision"),
        (["nothing-here"], 2, "neither a folder here nor the name of a repository"),
        ([KIMI_MINI, "--revision", "main"], 2, "--revision, --cache-dir and --keep-shards are for"),
        ([f"{REPO}@nope"], 2, "no such revision"),
        ([f"{REPO}@main", "--revision", "v2"], 2, "are two revisions: give one"),
    ],
)
def test_refused(arguments, code, words, command, tmp_path) -> None:
    source, *options = arguments
    ended = command("convert", source, tmp_path / "out", *options)
    assert ended.code == code
    assert words in ended.err and ended.err.count("\n") == 1


def test_gated(hub, command, tmp_path) -> None:
    hub.add_repo("closed/model", KIMI_MINI, gated="hf_right")
    refused = command("convert", "closed/model", tmp_path / "out", HF_TOKEN="hf_wrong")
    assert refused.code == 3 and "gated" in refused.err and "hf_wrong" not in refused.err
    ended = command("convert", "closed/model", tmp_path / "out", "--tp", 2, HF_TOKEN="hf_right")
    assert ended.code == 0, ended.err


def test_corruption_of_the_same_size_is_got_again(hub, command, tmp_path) -> None:
    shard = "model-00003-of-000006.safetensors"
    # The header's range is request 0 of the shard; flip a byte of the body, request 1.
    hub.faults = at({1: Fault("corrupt", offset=400_000)}, kind="cdn", method="GET", path=shard)
    assert command("convert", REPO, tmp_path / "a", "--tp", 2).code == 0
    assert sum(r.fault is not None for r in hub.requests) == 1
    assert command("convert", REPO, tmp_path / "b", "--tp", 2).code == 0
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_corruption_that_does_not_end(hub, command, tmp_path) -> None:
    shard = "model-00003-of-000006.safetensors"
    hub.faults = always(Fault("corrupt", offset=400_000), kind="cdn", method="GET", path=shard)
    ended = command("convert", REPO, tmp_path / "out", "--tp", 2)
    assert ended.code == 3
    sha = hashlib.sha256((KIMI_MINI / shard).read_bytes()).hexdigest()
    assert f"{shard}: content {sha} expected" in ended.err
    assert "twice the same: the Hub's copy is damaged" in ended.err and "network" not in ended.err
    fetched = [r for r in hub.requests if (r.kind, r.path, r.range) == ("cdn", shard, None)]
    assert len(fetched) == 2
    assert not list((tmp_path / "out").rglob("layer-00002.safetensors"))
    assert list((tmp_path / "out").rglob("layer-00001.safetensors"))


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        (Fault("status", status=404), 3, "127.0.0.1 answered 404, it does not have that"),
        (Fault("status", status=410), 3, "127.0.0.1 answered 410, it does not have that"),
    ],
)
def test_an_answer_that_stays_is_not_the_network(fault, code, words, hub, command, tmp_path):
    for kind, path in (("api", None), ("cdn", "model-00003-of-000006.safetensors")):
        hub.faults = always(fault, kind=kind, path=path)
        hub.requests.clear()
        ended = command("convert", REPO, tmp_path / kind)
        assert ended.code == code and ended.err.count("\n") == 1
        assert words in ended.err and "network" not in ended.err
        assert sum(r.fault is not None for r in hub.requests) == 1


def test_names_and_addresses_of_a_repository(hub, command, tmp_path, blobs_of_folder) -> None:
    hub.repos[REPO].commit(KIMI_MINI, branch="v2")
    v2 = hub.repos[REPO].branches["v2"]
    for source in (f"{REPO}@v2", f"{hub.url}/{REPO}/tree/v2"):
        ended = command("convert", source, tmp_path / "out", "--tp", 2, "--json")
        assert ended.code == 0, ended.err
        assert json.loads(ended.out)["commit"] == v2
    assert data_of(tree(tmp_path / "out")) == data_of(blobs_of_folder)


def test_a_revision_in_the_name_is_recorded(hub, command, tmp_path) -> None:
    """A branch that moves between two runs changes nothing, as with --revision."""
    hub.repos[REPO].commit(KIMI_MINI, branch="v2")
    begun, out = hub.repos[REPO].branches["v2"], tmp_path / "out"
    assert command("convert", f"{REPO}@v2", out, "--tp", 2, "--layers", "1").code == 0
    hub.repos[REPO].commit(KIMI_MINI, branch="v2")
    ended = command("convert", f"https://huggingface.co/{REPO}/tree/v2", out, "--tp", 2, "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["commit"] == begun != hub.repos[REPO].branches["v2"]


def test_inspect_of_a_repository(hub, command) -> None:
    table = json.loads(command("inspect", f"{REPO}@main", "--json").out)
    assert (table["kind"], table["repo"]) == ("checkpoint on the Hub", REPO)
    assert (table["tensors"], table["routed_experts"]) == (204, 8)
    assert hub.shards_sent() == {}
    missing = command("inspect", "org/none")
    assert missing.code == 2 and "the Hub has no such repository" in missing.err


def test_a_broken_download_goes_on_where_it_was(hub, command, tmp_path) -> None:
    synth(tmp_path / "source", "k2.6", layers=[1], experts=2)
    hub.add_repo("big/model", tmp_path / "source")
    (shard,) = (tmp_path / "source").glob("*.safetensors")
    faults = {1: Fault("reset", after=25 << 20), 2: Fault("reset", after=25 << 20)}
    hub.faults = at(faults, kind="cdn", method="GET", path=shard.name)
    ended = command("convert", "big/model", tmp_path / "out", "--layers", "1")
    assert ended.code == 0, ended.err
    gets = [r for r in hub.requests if r.path == shard.name and r.kind == "cdn"]
    assert [r.range for r in gets[1:]] == [None, f"bytes={20 << 20}-", f"bytes={40 << 20}-"]


def test_disk_that_fills_up_while_downloading(hub, command, tmp_path) -> None:
    """A file-size limit stands in for a full disk: the system's own error, at a real write."""
    code = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, resource.RLIM_INFINITY))\n"
        f"sys.argv = ['kconvert', 'convert', {REPO!r}, {str(tmp_path / 'out')!r}, '--tp', '2']\n"
        "from kconvert.convert.cli.main import main\n"
        "main()\n"
    )
    env = environment(hub.url, tmp_path / "home")
    ended = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert ended.returncode == 3
    assert (
        ended.stderr.startswith(f"kconvert: {REPO}, model-0000")
        and "File too large" in ended.stderr
    )
    assert ended.stderr.count("\n") == 1
    assert command("convert", REPO, tmp_path / "out", "--tp", 2).code == 0
    assert command("convert", REPO, tmp_path / "fresh", "--tp", 2).code == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "fresh")
