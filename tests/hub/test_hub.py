"""The test Hub, asked by the real client, and what the client makes of each fault."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest
from hub.faults import Fault, Request, always, at, first_of, random_faults
from hub.server import Hub, environment
from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import get_hf_file_metadata, http_get
from huggingface_hub.utils import close_session, http_backoff

TESTS = Path(__file__).parents[1]
REPO = "org/name"
CONFIG = '{"a": 1}\n'
CONFIG_BLOB = "cb5b2f69babc53f9145b45ad20b9a075d48717ef"  # git hash-object
WEIGHTS = "model.safetensors"
SIZE = 300_000
DATA = bytes(i * i % 251 for i in range(SIZE))
SHA256 = "fa7deae4b0504401a056ca3b1e6007902a7e681efda07fd7ca8819760caeff95"  # sha256sum


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "sub" / "deep").mkdir(parents=True)
    (folder / "config.json").write_text(CONFIG)
    (folder / "sub" / "deep" / "notes.txt").write_text("nothing\n")
    (folder / WEIGHTS).write_bytes(DATA)
    return folder


@pytest.fixture
def slept(monkeypatch) -> Iterator[list[float]]:
    """The client has nothing of the user's, and notes its pauses here instead of making them."""
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
    pauses: list[float] = []
    clock = SimpleNamespace(sleep=pauses.append)
    monkeypatch.setattr("huggingface_hub.utils._http.time", clock)
    monkeypatch.setattr("huggingface_hub.file_download.time", clock)
    close_session()
    yield pauses
    close_session()


@pytest.fixture
def hub(folder: Path, slept: list[float]) -> Iterator[Hub]:
    with Hub() as hub:
        hub.add_repo(REPO, folder)
        yield hub


@pytest.fixture
def api(hub: Hub) -> HfApi:
    return HfApi(endpoint=hub.url, token=False)


def url_of(hub: Hub, path: str = WEIGHTS, revision: str = "main") -> str:
    return hf_hub_url(REPO, path, revision=revision, endpoint=hub.url)


def seen(hub: Hub) -> list[tuple]:
    return [(request.kind, request.method, request.status) for request in hub.requests]


# -- what is there -------------------------------------------------------------------------------


def test_info_of_a_branch_and_of_a_commit(hub: Hub, api: HfApi) -> None:
    info = api.model_info(REPO, files_metadata=True)
    assert info.sha == hub.repos[REPO].branches["main"]
    files = {sibling.rfilename: sibling for sibling in info.siblings}
    assert set(files) == {"config.json", "sub/deep/notes.txt", WEIGHTS}
    assert files["config.json"].blob_id == CONFIG_BLOB and files["config.json"].lfs is None
    assert (files[WEIGHTS].size, files[WEIGHTS].lfs.sha256) == (SIZE, SHA256)
    bare = api.model_info(REPO, revision=info.sha)
    assert bare.sha == info.sha and bare.siblings[0].size is None


def test_tree(hub: Hub, api: HfApi) -> None:
    top = {entry.path: entry for entry in api.list_repo_tree(REPO)}
    assert set(top) == {"config.json", "sub", WEIGHTS}
    assert top["config.json"].blob_id == CONFIG_BLOB
    assert (top[WEIGHTS].lfs.sha256, top[WEIGHTS].lfs.size) == (SHA256, SIZE)
    assert [entry.path for entry in api.list_repo_tree(REPO, "sub")] == ["sub/deep"]
    everything = [entry.path for entry in api.list_repo_tree(REPO, recursive=True, expand=True)]
    assert sorted(everything) == sorted([*top, "sub/deep", "sub/deep/notes.txt"])
    some = api.get_paths_info(REPO, [WEIGHTS, "sub/deep", "nothing"], expand=True)
    assert [entry.path for entry in some] == [WEIGHTS, "sub/deep"]
    assert some[0].lfs.sha256 == SHA256 and some[1].last_commit is not None


def test_pages(hub: Hub, api: HfApi, folder: Path) -> None:
    hub.repos[REPO].commit({f"{i:03}.json": folder / "config.json" for i in range(25)})
    hub.page_size = 10
    names = [entry.path for entry in api.list_repo_tree(REPO)]
    assert names == [f"{i:03}.json" for i in range(25)]
    assert len(hub.requests) == 3


def test_a_branch_moves(hub: Hub, api: HfApi, folder: Path) -> None:
    repo = hub.repos[REPO]
    old = repo.branches["main"]
    other = folder.parent / "other.json"
    other.write_text("[]")
    new = repo.commit({"config.json": other})
    assert api.model_info(REPO).sha == new != old
    assert get_hf_file_metadata(url_of(hub, "config.json")).commit_hash == new
    pinned = api.hf_hub_download(REPO, "config.json", revision=old, local_dir=folder.parent / "a")
    assert Path(pinned).read_text() == CONFIG
    repo.branches["main"] = old
    assert api.model_info(REPO).sha == old


def test_download(hub: Hub, api: HfApi, tmp_path: Path) -> None:
    for name in ("config.json", WEIGHTS, "sub/deep/notes.txt"):
        local = api.hf_hub_download(REPO, name, local_dir=tmp_path / "out")
        assert Path(local).read_bytes() == (tmp_path / "source" / name).read_bytes()
    assert seen(hub)[2:4] == [("resolve", "HEAD", 302), ("cdn", "GET", 200)]
    assert [request.sent for request in hub.requests] == [0, len(CONFIG), 0, SIZE, 0, 8]


def test_metadata_and_the_link(hub: Hub) -> None:
    about = get_hf_file_metadata(url_of(hub))
    assert (about.etag, about.size) == (SHA256, SIZE)
    assert about.location.startswith(hub.cdn_url) and about.xet_file_data is None
    assert httpx2.get(about.location, trust_env=False).content == DATA
    forged = about.location.replace("Expires=", "Expires=9")
    assert httpx2.get(forged, trust_env=False).status_code == 403
    hub.link_seconds = 0.0
    with pytest.raises(HfHubHTTPError, match="expired"):
        http_get(get_hf_file_metadata(url_of(hub)).location, None)


def test_ranges(hub: Hub, tmp_path: Path) -> None:
    def ask(span: str, path: str = WEIGHTS) -> httpx2.Response:
        headers = {"Range": f"bytes={span}", "Authorization": "Bearer hf_test"}
        return http_backoff("GET", url_of(hub, path), headers=headers, timeout=5)

    middle = ask("10-19")
    assert (middle.status_code, middle.content) == (206, DATA[10:20])
    assert middle.headers["Content-Range"] == f"bytes 10-19/{SIZE}"
    assert ask("-5").content == DATA[-5:]
    assert ask(f"{SIZE - 3}-{SIZE + 9}").content == DATA[-3:]
    assert ask("2-4", "config.json").content == CONFIG[2:5].encode()
    assert ask(f"{SIZE}-").status_code == 416
    # The token goes to the Hub and not to the CDN.
    tokens = {request.kind: request.token for request in hub.requests}
    assert tokens == {"resolve": "hf_test", "cdn": None}

    part = tmp_path / "part"
    part.write_bytes(DATA[:1000])
    with part.open("ab") as file:
        http_get(url_of(hub), file, resume_size=1000, expected_size=SIZE)
    assert part.read_bytes() == DATA
    assert (hub.requests[-1].range, hub.requests[-1].sent) == ("bytes=1000-", SIZE - 1000)


def test_huge_files_are_never_read_whole(hub: Hub, tmp_path: Path) -> None:
    huge = tmp_path / "huge.safetensors"
    with huge.open("wb") as file:
        file.truncate(1 << 40)
    hub.add_repo("org/huge", {huge.name: huge}, sha256={huge.name: "ab" * 32})
    url = hf_hub_url("org/huge", huge.name, endpoint=hub.url)
    assert get_hf_file_metadata(url).etag == "ab" * 32
    tail = http_backoff("GET", url, headers={"Range": "bytes=-7"}, timeout=5)
    assert tail.content == bytes(7)


def test_what_is_not_there(hub: Hub, api: HfApi, tmp_path: Path) -> None:
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("org/none")
    with pytest.raises(RepositoryNotFoundError):
        api.hf_hub_download("org/none", WEIGHTS, local_dir=tmp_path / "out")
    with pytest.raises(RevisionNotFoundError):
        api.model_info(REPO, revision="none")
    with pytest.raises(RevisionNotFoundError):
        list(api.list_repo_tree(REPO, revision="none"))
    with pytest.raises(RevisionNotFoundError):
        api.get_paths_info(REPO, WEIGHTS, revision="none")
    with pytest.raises(RevisionNotFoundError):
        api.hf_hub_download(REPO, WEIGHTS, revision="0" * 40, local_dir=tmp_path / "out")
    with pytest.raises(EntryNotFoundError):
        api.hf_hub_download(REPO, "none.json", local_dir=tmp_path / "out")
    with pytest.raises(EntryNotFoundError):
        list(api.list_repo_tree(REPO, "none"))


def test_tokens(hub: Hub, api: HfApi, folder: Path) -> None:
    hub.add_repo("org/gated", folder, gated="hf_good")
    assert api.model_info("org/gated").gated == "auto"  # anyone may look
    for token, status in ((False, 401), ("hf_bad", 403)):
        with pytest.raises(GatedRepoError) as refused:
            api.hf_hub_download("org/gated", WEIGHTS, local_dir=folder.parent / "a", token=token)
        assert refused.value.response.status_code == status
    local = api.hf_hub_download(
        "org/gated", WEIGHTS, local_dir=folder.parent / "a", token="hf_good"
    )
    assert Path(local).read_bytes() == DATA

    hub.add_repo("org/private", folder, private="hf_good")
    for token in (False, "hf_bad"):
        with pytest.raises(RepositoryNotFoundError):
            api.model_info("org/private", token=token)
    assert api.model_info("org/private", token="hf_good").private


# -- what goes wrong -----------------------------------------------------------------------------

RECOVERED = {  # the first request to the CDN fails; what the client waits before it succeeds
    "too many": (Fault("status", status=429), [1]),
    "too many, with a time": (Fault("status", status=429, retry_after=7), [8]),
    "held before the headers": (Fault("delay"), [1]),
    "held in the body": (Fault("delay", after=1000), [1]),
    "short": (Fault("short", after=1000), [1]),
    "redirect": (Fault("redirect"), []),
}
NO_SIZE = "Consistency check failed: file should be of size 300000 but has size "
FAILED = {  # the first request to the CDN fails, and with it the download
    "500": (Fault("status", status=500), HfHubHTTPError, "500 Internal"),
    "502": (Fault("status", status=502), HfHubHTTPError, "502 Bad Gateway"),
    "503": (Fault("status", status=503, retry_after=1), HfHubHTTPError, "503 Service"),
    "504": (Fault("status", status=504), HfHubHTTPError, "504 Gateway"),
    "expired": (Fault("expired"), HfHubHTTPError, "expired"),
    "reset before the headers": (Fault("reset"), httpx2.ReadError, "reset by peer"),
    "reset in the body": (Fault("reset", after=1000), httpx2.ReadError, "reset by peer"),
    "truncated": (Fault("truncated", after=1000), OSError, NO_SIZE + "1000"),
    "smaller": (Fault("resize", delta=-9), OSError, NO_SIZE + "299991"),
    "larger": (Fault("resize", delta=9), OSError, NO_SIZE + "300009"),
}


@pytest.mark.parametrize("name", RECOVERED)
def test_the_client_recovers(name: str, hub: Hub, api: HfApi, slept: list, tmp_path: Path) -> None:
    fault, pauses = RECOVERED[name]
    hub.faults = at({0: fault}, kind="cdn")
    local = api.hf_hub_download(REPO, WEIGHTS, local_dir=tmp_path / "out")
    assert Path(local).read_bytes() == DATA
    assert slept == pauses
    assert [request.fault for request in hub.requests] == [None, fault, None]


@pytest.mark.parametrize("name", FAILED)
def test_the_client_gives_up(name: str, hub: Hub, api: HfApi, slept: list, tmp_path: Path) -> None:
    fault, error, message = FAILED[name]
    hub.faults = at({0: fault}, kind="cdn")
    with pytest.raises(error, match=message):
        api.hf_hub_download(REPO, WEIGHTS, local_dir=tmp_path / "out")
    assert slept == [] and len(hub.requests) == 2
    assert not list((tmp_path / "out").rglob("*.incomplete"))  # nothing to resume from


def test_the_client_takes_corruption(hub: Hub, api: HfApi, tmp_path: Path) -> None:
    hub.faults = always(Fault("corrupt", offset=1234), kind="cdn")
    local = api.hf_hub_download(REPO, WEIGHTS, local_dir=tmp_path / "out")
    got = Path(local).read_bytes()
    assert [i for i in range(SIZE) if got[i] != DATA[i]] == [1234]


@pytest.mark.parametrize(("kind", "right"), [("range", False), ("whole", True)])
def test_resumed_beside_the_place(kind: str, right: bool, hub: Hub, tmp_path: Path) -> None:
    """The client sees a Range that was ignored, and does not see another range than it asked."""
    hub.faults = always(Fault(kind), kind="cdn")
    part = tmp_path / "part"
    part.write_bytes(DATA[:1000])
    with part.open("ab") as file:
        http_get(url_of(hub), file, resume_size=1000, expected_size=SIZE)
    assert part.stat().st_size == SIZE
    assert (part.read_bytes() == DATA) is right


def test_looking_up_a_file(hub: Hub, api: HfApi, slept: list, tmp_path: Path) -> None:
    hub.faults = first_of(
        at({0: Fault("status", status=503)}, kind="resolve"),
        at({1: Fault("redirect")}, kind="resolve"),
        at({2: Fault("delay", seconds=0.1)}, kind="resolve"),
    )
    api.hf_hub_download(REPO, WEIGHTS, local_dir=tmp_path / "out")
    heads = [(request.status, request.method) for request in hub.requests[:3]]
    assert heads == [(503, "HEAD"), (307, "HEAD"), (302, "HEAD")]

    hub.faults = always(Fault("status", status=503), kind="resolve")
    with pytest.raises(LocalEntryNotFoundError) as failed:
        api.hf_hub_download(REPO, "config.json", local_dir=tmp_path / "out")
    assert isinstance(failed.value.__cause__, HfHubHTTPError)
    assert slept == [1, 2, 4, 8, 8]

    hub.faults = always(Fault("redirect"))
    with pytest.raises(httpx2.TooManyRedirects):
        api.hf_hub_download(REPO, "config.json", local_dir=tmp_path / "out")


def test_api_faults(hub: Hub, api: HfApi, slept: list) -> None:
    hub.faults = at({i: Fault("status", status=503) for i in range(2)}, kind="api")
    assert len(list(api.list_repo_tree(REPO))) == 3  # asked again
    assert slept == [1, 2]
    hub.faults = at({0: Fault("status", status=503), 1: Fault("short", after=9)}, kind="api")
    with pytest.raises(HfHubHTTPError, match="503"):
        api.model_info(REPO)  # never asked again
    with pytest.raises(httpx2.RemoteProtocolError):
        api.model_info(REPO)
    hub.faults = always(Fault("delay"))
    with pytest.raises(httpx2.ReadTimeout):
        api.model_info(REPO, timeout=0.1)


def test_random_faults() -> None:
    requests = [Request(n, "cdn", "GET", REPO, WEIGHTS) for n in range(1000)]
    kinds = ["reset", "short", Fault("status", status=429), "range"]
    first = list(map(random_faults(7, 0.2, kinds), requests))
    again = map(random_faults(7, 0.2, kinds), reversed(requests))
    assert first == list(again)[::-1]  # the order does not matter
    assert 100 < sum(fault is not None for fault in first) < 200  # no Range, no "range"
    assert {fault.kind for fault in first if fault} == {"reset", "short", "status"}
    assert first != list(map(random_faults(8, 0.2, kinds), requests))
    limited = list(map(random_faults(7, 0.2, kinds, limit=3), requests))
    assert sum(fault is not None for fault in limited) == 3


def test_bandwidth_is_shared(hub: Hub) -> None:
    link = get_hf_file_metadata(url_of(hub)).location
    rate = hub.bandwidth = 2 * SIZE
    began = time.monotonic()
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(httpx2.get, link, trust_env=False) for _ in range(2)]
        time.sleep(0.5)
        sent = sum(request.sent for request in hub.requests)
        assert 0 < sent <= rate * (time.monotonic() - began) + 3 * hub.throttle.piece()
    assert all(answer.result().content == DATA for answer in answers)
    assert 0.9 < time.monotonic() - began < 2
    hub.bandwidth = None
    began = time.monotonic()
    httpx2.get(link, trust_env=False)
    assert time.monotonic() - began < 0.4


def test_shuts_down_at_once(folder: Path, slept: list) -> None:
    """With a connection that is kept, one held before the headers and one in the body."""
    client = httpx2.Client(trust_env=False, timeout=None)
    with ThreadPoolExecutor() as pool:
        with Hub() as hub:
            hub.add_repo(REPO, folder)
            url = f"{hub.url}/api/models/{REPO}"
            client.get(url)
            hub.faults = at({0: Fault("delay", seconds=60), 1: Fault("delay", 5, seconds=60)})
            held = [pool.submit(httpx2.get, url, trust_env=False, timeout=None) for _ in range(2)]
            while len(hub.requests) < 3:
                time.sleep(0.01)
            began = time.monotonic()
        assert all(isinstance(answer.exception(), httpx2.TransportError) for answer in held)
    assert time.monotonic() - began < 1
    with pytest.raises(httpx2.TransportError):
        client.get(url)


def test_as_a_program(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hub", str(folder), REPO, "--bandwidth", "1e8"]
    with subprocess.Popen(command, cwd=TESTS, stdout=subprocess.PIPE, text=True) as program:
        try:
            url = program.stdout.readline().strip()
            client = "import sys, huggingface_hub as h; print(h.snapshot_download(sys.argv[1]))"
            done = subprocess.run(
                [sys.executable, "-c", client, REPO],
                env=environment(url, tmp_path / "home"),
                capture_output=True,
                text=True,
                check=True,
            )
        finally:
            program.terminate()
    assert done.stderr == ""
    snapshot = Path(done.stdout.strip())
    assert (snapshot / WEIGHTS).read_bytes() == DATA
    assert json.loads((snapshot / "config.json").read_text()) == {"a": 1}
