"""What `kconvert doctor` finds out about a machine: read from /proc and /sys, asked of libraries,
or measured in seconds. What cannot be found out is None, with a word on why."""

import errno
import hashlib
import mmap
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from kconvert.convert.source.endpoint import shown_endpoint

ROOT = Path("/")
PACKAGES = ("kconvert", "numpy", "numba", "torch", "huggingface_hub", "hf_xet")
# What the speeds below depend on: sha256 without sha_ni (sha2 on Arm) runs at a third.
_FEATURES = {
    "flags": ("avx2", "avx512f", "avx512vbmi", "sha_ni"),
    "Features": ("asimd", "sha2"),
}
_PIECE = 8 << 20
_DISK_BYTES = 256 << 20
_DISK_SECONDS = 3.0


class Mount(NamedTuple):
    """A line of /proc/self/mountinfo."""

    root: str  # which folder of the file system is mounted
    point: Path
    kind: str
    options: frozenset[str]


def mounts(mountinfo: str) -> list[Mount]:
    """The mounts in the order they were made: later ones hide earlier ones."""

    def plain(path: str) -> str:  # a space is \040
        return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), path)

    mounted = []
    for line in mountinfo.splitlines():
        where, _, what = line.partition(" - ")
        root, point = where.split()[3:5]
        kind, options = what.split()[0], what.split()[-1]
        mounted.append(Mount(plain(root), Path(plain(point)), kind, frozenset(options.split(","))))
    return mounted


def file_system(mounted: list[Mount], folder: Path) -> str | None:
    """The type of the file system that the folder (absolute, no links) lies in."""
    around = [mount for mount in mounted if folder.is_relative_to(mount.point)]
    return max(reversed(around), key=lambda mount: len(mount.point.parts)).kind if around else None


def cgroups(controller: str, root: Path = ROOT) -> list[Path]:
    """The folders of this process's cgroup and of those around it, for v2 and v1's controller."""
    folders: list[Path] = []
    mounted = mounts(_text(root / "proc/self/mountinfo"))
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for mount in mounted:
            v2 = mount.kind == "cgroup2" and not controllers
            v1 = mount.kind == "cgroup" and controller in mount.options & {*controllers.split(",")}
            if v1 or v2:
                # In a container the path may be the host's, and the mount its lower end.
                inside = os.path.relpath(path, mount.root)
                parts = () if inside.startswith("..") else Path(inside).parts
                top = root / mount.point.relative_to("/")
                folders += [top.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]
    return folders


def memory(root: Path = ROOT) -> dict[str, int | None]:
    """Bytes: of the machine, free to be taken, and what the smallest cgroup around us allows."""
    fields = dict(re.findall(r"^(\w+): +(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE))
    total, available = (
        1024 * int(fields[name]) if name in fields else None
        for name in ("MemTotal", "MemAvailable")
    )
    limits = [
        int(text)
        for folder in cgroups("memory", root)
        for name in ("memory.max", "memory.limit_in_bytes")
        if (text := _text(folder / name).strip()).isdecimal()  # else missing, or "max"
    ]
    limit = min(limits, default=None)
    if limit is not None and total is not None and limit >= total:  # v1 writes 2^63 for none
        limit = None
    return {"total": total, "available": available, "limit": limit}


def cpu(root: Path = ROOT) -> dict[str, Any]:
    """Model, the features that matter, and the cores that this process may use."""
    fields = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", _text(root / "proc/cpuinfo"), re.MULTILINE))
    key = next((key for key in _FEATURES if key in fields), None)
    present = fields[key].split() if key else []
    return {
        "model": fields.get("model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "features": {name: name in present for name in _FEATURES.get(key or "", ())},
        "cores": len(os.sched_getaffinity(0)),
        "quota": cpu_quota(root),
    }


def cpu_quota(root: Path = ROOT) -> float | None:
    """How many cores' time the smallest cgroup around us allows."""
    quotas = []
    for folder in cgroups("cpu", root):
        v1 = [_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        for pair in (_text(folder / "cpu.max").split(), v1):
            if len(pair) == 2 and all(part.isdecimal() for part in pair):  # else "max" or -1
                quotas.append(int(pair[0]) / int(pair[1]))
    return min(quotas, default=None)


def disk(folder: Path) -> dict[str, Any]:
    """Space and file system of the folder, or of its nearest parent if it is not there yet."""
    there = nearest(folder)
    usage = shutil.disk_usage(there)
    return {
        "folder": str(folder),
        "file_system": file_system(mounts(_text(ROOT / "proc/self/mountinfo")), there),
        "total": usage.total,
        "free": usage.free,
        "writable": os.access(there, os.W_OK | os.X_OK),
    }


def device(folder: Path) -> int:
    """A number that two folders on one file system share."""
    return nearest(folder).stat().st_dev


def nearest(folder: Path) -> Path:
    """The folder itself without links, or the first of its parents that is a folder."""
    folder = Path(os.path.realpath(folder))
    return next(there for there in (folder, *folder.parents) if os.path.isdir(there))


def disk_speed(folder: Path, nbytes: int = _DISK_BYTES) -> dict[str, Any]:
    """GB/s of one stream of writes with a sync, and of reads of the same, past the page cache
    if the file system can, as the converter writes. At most 3 s each, and a quarter of what
    is free; the file has no name while it is measured, so that nothing can leave it behind."""
    speed: dict[str, Any] = {"write_gbps": None, "read_gbps": None, "direct": None, "why": None}
    there = nearest(folder)
    pieces = min(nbytes, shutil.disk_usage(there).free // 4) // _PIECE
    if not pieces:
        return {**speed, "why": "the disk is full"}
    try:
        try:
            return {**speed, **_stream(there, pieces, os.O_DIRECT), "direct": True}
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return {**speed, **_stream(there, pieces, 0), "direct": False}
    except OSError as error:
        return {**speed, "why": os.strerror(error.errno or 0).lower()}


def _stream(folder: Path, pieces: int, flags: int) -> dict[str, float]:
    """Write and read so many pieces; OSError EINVAL or EOPNOTSUPP if the flags are refused."""
    named, name = tempfile.mkstemp(prefix=".kconvert-doctor-", dir=folder)
    try:
        fd = os.open(name, os.O_RDWR | flags)
    finally:
        os.unlink(name)
        os.close(named)
    buffer = mmap.mmap(-1, _PIECE)  # on a page, as O_DIRECT wants it
    buffer.write(os.urandom(_PIECE))  # some file systems compress

    def write(at: int) -> int:
        count = os.pwrite(fd, buffer, at)
        if not flags:  # else all of the work would be left to the last sync
            os.fdatasync(fd)
        return count

    try:
        written, seconds = _until(write, pieces * _PIECE)
        start = time.perf_counter()
        os.fsync(fd)
        seconds += time.perf_counter() - start
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        read, read_seconds = _until(lambda at: os.preadv(fd, [buffer], at), written)
        return {"write_gbps": written / seconds / 1e9, "read_gbps": read / read_seconds / 1e9}
    finally:
        os.close(fd)
        buffer.close()


def _until(step: Callable[[int], int], nbytes: int) -> tuple[int, float]:
    """Bytes and seconds of steps (one at least) that say how far they came: to the end, or 3 s."""
    at, start = 0, time.perf_counter()
    while at < nbytes and (count := step(at)):
        at += count
        if time.perf_counter() - start >= _DISK_SECONDS:
            break
    return at, time.perf_counter() - start


def sha256_gbps() -> float:
    """GB/s of sha256 on one core."""
    data = bytes(64 << 20)
    return _best(lambda: hashlib.sha256(data), len(data))


def pack_gbps() -> float:
    """GB/s of one core that packs whole matrices for Marlin."""
    import numpy as np

    from kconvert.layouts.marlin import Marlin
    from kconvert.layouts.quantization import Quantization

    layout = Marlin(Quantization(32))
    n, k = 2048, 7168  # K2.6's gate_proj
    sources = np.ones((28, n, k // 8), np.int32)  # 0.2 GB: more than a cache holds
    out = np.zeros(layout.shape("code", n, k), np.int32)

    def pack() -> None:
        for source in sources:
            layout.pack_into("code", source, range(n), range(k), out, 0)

    layout.pack_into("code", sources[0], range(n), range(k), out, 0)  # compiles or loads it
    return _best(pack, sources.nbytes)


def _best(work: Callable[[], object], nbytes: int) -> float:
    """GB/s of the fastest of three runs: what it can do when nothing else is at work."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return nbytes / min(times) / 1e9


def packages() -> dict[str, str | None]:
    """Versions; None: not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions


def hub() -> dict[str, Any]:
    """How huggingface_hub is set up."""
    from huggingface_hub import constants

    return {
        "endpoint": shown_endpoint(constants.ENDPOINT),
        "offline": constants.HF_HUB_OFFLINE,
        "xet_disabled": constants.HF_HUB_DISABLE_XET,
        "token": token(),
    }


def hub_cache() -> Path:
    """Where huggingface_hub keeps what it downloads."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def token() -> dict[str, Any]:
    """Whether there is a token for the Hub, and from where; never its value."""
    import huggingface_hub

    try:
        present = bool(huggingface_hub.get_token())
    except Exception as error:  # a file, a login service: anything; its text may quote the token
        return {"present": False, "source": None, "why": type(error).__name__}
    variables = ("HF_OIDC_RESOURCE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    source = next((name for name in variables if os.environ.get(name, "").strip()), "file")
    return {"present": present, "source": source if present else None, "why": None}


def gpu() -> dict[str, Any]:
    """Driver, GPUs, NVRTC, as far as there are any."""
    found: dict[str, Any] = {"driver": None, "cuda": None, "gpus": [], "nvrtc": None, "why": None}
    try:
        from cuda.bindings import nvrtc
        from cuda.core import system
    except ImportError:
        return {**found, "why": "not looked for: pip install 'kconvert[cuda]'"}

    def ask(question: Callable[[], Any]) -> Any:
        try:
            return question()
        except Exception:  # no library, no driver, no permission: each raises its own kind
            return None

    def dotted(numbers: Any) -> str | None:
        return ".".join(map(str, numbers)) if numbers else None

    def card(device: Any) -> dict[str, Any]:
        return {
            "name": ask(lambda: device.name),
            "memory": ask(lambda: device.memory_info.total),
            "compute_capability": dotted(ask(lambda: device.cuda_compute_capability)),
        }

    driver = ask(system.get_kernel_mode_driver_version)
    found["nvrtc"] = dotted((ask(nvrtc.nvrtcVersion) or ())[1:])
    # NVIDIA writes 580.65.06
    found["driver"] = dotted(driver and [f"{number:02}" for number in driver])
    found["cuda"] = dotted(ask(system.get_user_mode_driver_version))
    found["gpus"] = [
        card(device) for device in ask(lambda: [*system.Device.get_all_devices()]) or ()
    ]
    if not found["gpus"]:
        found["why"] = "no GPU" if found["driver"] else "no NVIDIA driver"
    return found


def _text(path: Path) -> str:
    """A file of /proc or /sys; empty if it is missing or not ours to read."""
    try:
        return path.read_text()
    except OSError:
        return ""
