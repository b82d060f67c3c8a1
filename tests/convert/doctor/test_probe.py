"""What `kconvert doctor` reads and measures, on machines made up of files."""

import errno
import os
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from kconvert.convert.doctor import probe

SECRET = "hf_" + "aBcDeFgH" * 4


def tree(root: Path, **files: str) -> Path:
    """A machine: its /proc and /sys, by path with __ for /."""
    for name, content in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


# --- memory and processor time that cgroups leave

V2 = "30 23 0:27 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "30 23 0:27 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
    "31 30 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "32 30 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
)
MEMINFO = "MemTotal:       64000 kB\nMemFree: 1 kB\nMemAvailable:   60000 kB\n"


def test_smallest_limit_on_the_way_up_v2(tmp_path: Path) -> None:
    tree(
        tmp_path, proc__meminfo=MEMINFO, proc__self__mountinfo=V2,
        proc__self__cgroup="0::/slice/job/step\n",
        **{
            "sys__fs__cgroup__slice__memory.max": "30000000\n",
            "sys__fs__cgroup__slice__job__memory.max": "20000000\n",
            "sys__fs__cgroup__slice__job__step__memory.max": "max\n",
            "sys__fs__cgroup__other__memory.max": "1\n",
            "sys__fs__cgroup__slice__cpu.max": "150000 100000\n",
            "sys__fs__cgroup__slice__job__cpu.max": "max 100000\n",
        },
    )  # fmt: skip
    assert probe.memory(tmp_path) == {
        "total": 64000 << 10, "available": 60000 << 10, "limit": 20_000_000,
    }  # fmt: skip
    assert probe.cpu_quota(tmp_path) == 1.5


def test_smallest_limit_on_the_way_up_v1(tmp_path: Path) -> None:
    tree(
        tmp_path, proc__meminfo=MEMINFO, proc__self__mountinfo=V1,
        proc__self__cgroup="4:memory:/a/b\n3:cpu,cpuacct:/c\n0::/\n",
        **{
            "sys__fs__cgroup__memory__memory.limit_in_bytes": "9223372036854771712\n",
            "sys__fs__cgroup__memory__a__memory.limit_in_bytes": "9000000\n",
            "sys__fs__cgroup__memory__a__b__memory.limit_in_bytes": "9223372036854771712\n",
            "sys__fs__cgroup__cpu__c__cpu.cfs_quota_us": "200000\n",
            "sys__fs__cgroup__cpu__c__cpu.cfs_period_us": "50000\n",
            "sys__fs__cgroup__cpu__cpu.cfs_quota_us": "-1\n",
            "sys__fs__cgroup__cpu__cpu.cfs_period_us": "100000\n",
        },
    )  # fmt: skip
    assert probe.memory(tmp_path)["limit"] == 9_000_000
    assert probe.cpu_quota(tmp_path) == 4


def test_cgroup_of_a_container_whose_path_is_the_hosts(tmp_path: Path) -> None:
    mount = V1.replace("0:28 / /sys", "0:28 /docker/abc /sys")
    limit = {"sys__fs__cgroup__memory__memory.limit_in_bytes": "5000000\n"}
    for number, path in enumerate(("/docker/abc", "/../../elsewhere", "/kube/pod")):
        root = tree(
            tmp_path / str(number), proc__meminfo=MEMINFO, proc__self__mountinfo=mount,
            proc__self__cgroup=f"4:memory:{path}\n", **limit,
        )  # fmt: skip
        assert probe.memory(root)["limit"] == 5_000_000


def test_limits_that_limit_nothing(tmp_path: Path) -> None:
    root = tree(
        tmp_path, proc__meminfo=MEMINFO, proc__self__mountinfo=V2, proc__self__cgroup="0::/\n",
        **{"sys__fs__cgroup__memory.max": "70000000000\n"},  # more than there is
    )  # fmt: skip
    assert probe.memory(root)["limit"] is None and probe.cpu_quota(root) is None
    nothing = tmp_path / "no proc at all"
    assert probe.memory(nothing) == {"total": None, "available": None, "limit": None}


# --- processor and disks


def test_features_of_x86_of_arm_and_of_neither(tmp_path: Path) -> None:
    x86 = tree(
        tmp_path / "x86",
        proc__cpuinfo="processor\t: 0\nmodel name\t: A CPU\nflags\t\t: fpu avx2 sha_ni\n",
    )
    found = probe.cpu(x86)
    assert found["model"] == "A CPU"
    assert found["features"] == {
        "avx2": True, "avx512f": False, "avx512vbmi": False, "sha_ni": True,
    }  # fmt: skip
    arm = tree(tmp_path / "arm", proc__cpuinfo="processor\t: 0\nFeatures\t: fp asimd sha2\n")
    assert probe.cpu(arm)["features"] == {"asimd": True, "sha2": True}
    assert probe.cpu(tmp_path / "none")["features"] == {}


def test_file_system_is_the_deepest_and_latest_mount() -> None:
    mounted = probe.mounts(
        "1 0 8:1 / / rw - ext4 /dev/a rw\n"
        "2 1 8:2 / /data rw shared:1 master:2 - ext4 /dev/b rw\n"
        "3 1 8:3 / /data rw - xfs /dev/c rw\n"
        "4 1 8:4 / /with\\040space rw - nfs4 host:/x rw\n"
    )
    kinds = {
        "/": "ext4", "/data/out": "xfs", "/database": "ext4", "/with space/out": "nfs4",
    }  # fmt: skip
    assert {path: probe.file_system(mounted, Path(path)) for path in kinds} == kinds
    assert probe.file_system([], Path("/")) is None


def test_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert probe.nearest(tmp_path / "a/b") == tmp_path.resolve()
    (tmp_path / "file").touch()
    assert probe.nearest(tmp_path / "file/b") == tmp_path.resolve()
    found = probe.disk(tmp_path / "a/b")
    assert found["folder"] == str(tmp_path / "a/b") and found["writable"]
    assert 0 < found["free"] <= found["total"]


def test_disk_speed_leaves_nothing_behind(tmp_path: Path) -> None:
    speed = probe.disk_speed(tmp_path / "new", 16 << 20)
    assert speed["why"] is None and speed["write_gbps"] > 0 and speed["read_gbps"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("answer", [errno.EINVAL, errno.EOPNOTSUPP])
def test_disk_without_o_direct(answer: int, tmp_path: Path, monkeypatch) -> None:
    real = os.open

    def refusing(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(answer, os.strerror(answer))
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refusing)
    speed = probe.disk_speed(tmp_path, 16 << 20)
    assert speed["direct"] is False and speed["write_gbps"] > 0
    assert list(tmp_path.iterdir()) == []


def test_disk_that_fails_or_is_full(tmp_path: Path, monkeypatch) -> None:
    def full(*_):
        raise OSError(errno.ENOSPC, "whatever")

    monkeypatch.setattr(os, "pwrite", full)
    assert probe.disk_speed(tmp_path, 16 << 20)["why"] == "no space left on device"
    assert list(tmp_path.iterdir()) == []
    assert probe.disk_speed(tmp_path, 1 << 20)["why"] == "the disk is full"


def test_slow_disk_is_asked_for_one_piece(tmp_path: Path, monkeypatch) -> None:
    written, real = [], os.pwrite

    def pwrite(fd: int, data: memoryview, at: int) -> int:
        written.append(at)
        return real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(probe, "_DISK_SECONDS", 0.0)
    speed = probe.disk_speed(tmp_path, 64 << 20)
    assert written == [0] and speed["write_gbps"] > 0 and speed["read_gbps"] > 0


# --- the Hub: never a secret


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://huggingface.co", "https://huggingface.co"),
        ("http://127.0.0.1:8080/hub", "http://127.0.0.1:8080/hub"),
        (f"https://user:{SECRET}@hub.example/api?key={SECRET}#{SECRET}", "https://hub.example/api"),
        (f"https://user:1/{SECRET}@hub.example", "not a URL"),
        (f"https://user:{SECRET}/@hub.example", "not a URL"),
        (f"user:{SECRET}@hub.example", "not a URL"),
        (f"https://[{SECRET}", "not a URL"),
    ],
)
def test_endpoint_without_credentials(url: str, shown: str) -> None:
    assert probe.shown_endpoint(url) == shown


@pytest.fixture
def no_token(monkeypatch) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(name, raising=False)


def test_token_and_where_it_is_from(tmp_path: Path, monkeypatch, no_token) -> None:
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    assert probe.token() == {"present": False, "source": None, "why": None}
    (tmp_path / "token").write_text(SECRET)
    assert probe.token() == {"present": True, "source": "file", "why": None}
    monkeypatch.setenv("HF_TOKEN", SECRET)
    assert probe.token() == {"present": True, "source": "HF_TOKEN", "why": None}


def test_an_error_does_not_quote_the_token(monkeypatch) -> None:
    def fail() -> str:
        raise ValueError(f"{SECRET} is malformed")

    monkeypatch.setattr(huggingface_hub, "get_token", fail)
    assert probe.token() == {"present": False, "source": None, "why": "ValueError"}


# --- the GPU


def test_no_cuda_extra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    found = probe.gpu()
    assert found["why"] == "not looked for: pip install 'kconvert[cuda]'" and found["gpus"] == []


def test_no_driver(monkeypatch) -> None:
    system = pytest.importorskip("cuda.core.system", exc_type=ImportError)

    def fail() -> None:
        raise RuntimeError("nvml is a driver library")

    for name in ("get_kernel_mode_driver_version", "get_user_mode_driver_version"):
        monkeypatch.setattr(system, name, fail)
    monkeypatch.setattr(system, "Device", None)
    found = probe.gpu()
    assert (found["driver"], found["gpus"], found["why"]) == (None, [], "no NVIDIA driver")


def test_a_gpu_as_nvidia_writes_it(monkeypatch) -> None:
    system = pytest.importorskip("cuda.core.system", exc_type=ImportError)

    class Card:
        name, cuda_compute_capability = "NVIDIA H200", (9, 0)

        @property
        def memory_info(self) -> None:
            raise RuntimeError("no permission")

    class Device:
        get_all_devices = staticmethod(lambda: iter([Card()]))

    monkeypatch.setattr(system, "get_kernel_mode_driver_version", lambda: (580, 65, 6))
    monkeypatch.setattr(system, "get_user_mode_driver_version", lambda: (13, 0))
    monkeypatch.setattr(system, "Device", Device)
    found = probe.gpu()
    assert (found["driver"], found["cuda"], found["why"]) == ("580.65.06", "13.0", None)
    assert found["gpus"] == [
        {"name": "NVIDIA H200", "memory": None, "compute_capability": "9.0"}
    ]  # fmt: skip
