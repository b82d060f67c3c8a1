"""File systems that cannot do everything, and those that fail: the one is no error, the other is
one sentence with a path."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from kit import KIMI_MINI, tree

from kconvert.convert import convert
from kconvert.convert.output.disk import UNSUPPORTED


@pytest.fixture
def fails(monkeypatch) -> Callable[..., None]:
    """Let a call of `os` fail where `when` says so, as the system does: on a descriptor, without a
    name."""

    def set_up(name: str, code: int, when: Callable[..., bool]) -> None:
        real = getattr(os, name)

        def call(*arguments, **options):
            if when(*arguments):
                raise OSError(code, os.strerror(code))
            return real(*arguments, **options)

        monkeypatch.setattr(os, name, call)

    return set_up


def is_folder(fd: int) -> bool:
    return stat.S_ISDIR(os.fstat(fd).st_mode)


def is_blob(fd: int, *_: object) -> bool:
    return ".safetensors" in os.readlink(f"/proc/self/fd/{fd}")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("whole") / "out"
    convert(KIMI_MINI, out)
    return tree(out)


@pytest.mark.parametrize("code", sorted(UNSUPPORTED))
def test_folders_that_cannot_be_synced(code, whole, tmp_path, kconvert, fails) -> None:
    fails("fsync", code, is_folder)
    outcome = kconvert("convert", KIMI_MINI, tmp_path / "out")
    assert (outcome.code, outcome.err) == (0, "")
    assert tree(tmp_path / "out") == whole


@pytest.mark.parametrize("code", sorted(UNSUPPORTED))
@pytest.mark.parametrize("call", ["open", "pwrite"])
def test_no_writing_past_the_page_cache(call, code, whole, tmp_path, kconvert, fails) -> None:
    def direct(what: object, *arguments: object) -> bool:
        if call == "open":
            return bool(arguments[0] & os.O_DIRECT)
        with open(f"/proc/self/fdinfo/{what}") as info:
            flags = next(line.split()[1] for line in info if line.startswith("flags"))
        return bool(int(flags, 8) & os.O_DIRECT)

    fails(call, code, direct)
    assert kconvert("convert", KIMI_MINI, tmp_path / "out").code == 0
    assert tree(tmp_path / "out") == whole


@pytest.mark.parametrize(
    ("call", "code", "when", "named"),
    [
        ("fsync", errno.EIO, is_folder, "out"),
        ("fsync", errno.EIO, is_blob, "out/common/layer-00000.safetensors"),
        ("fsync", errno.EINVAL, is_blob, "out/common/layer-00000.safetensors"),
        ("fsync", errno.EIO, lambda fd: "config" in os.readlink(f"/proc/self/fd/{fd}"),
         "out/config.json"),
        ("fsync", errno.EDQUOT, lambda fd: "owner" in os.readlink(f"/proc/self/fd/{fd}"),
         "out/.kconvert/owner"),
        ("pwrite", errno.ENOSPC, is_blob, "out/common/layer-00000.safetensors"),
        ("ftruncate", errno.ENOSPC, is_blob, "out/common/layer-00000.safetensors"),
    ],
)  # fmt: skip
def test_what_fails_is_named(call, code, when, named, tmp_path, kconvert, fails) -> None:
    fails(call, code, when)
    outcome = kconvert("convert", KIMI_MINI, tmp_path / "out", "--workers", 1)
    assert outcome.code == 3
    assert outcome.err.startswith(f"kconvert: {tmp_path / named}: {os.strerror(code)}")
    assert outcome.err.count("\n") == 1
    assert not list((tmp_path / "out").rglob("*.partial"))


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077])
def test_the_umask_is_obeyed(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        convert(KIMI_MINI, tmp_path / "out", tp=2, layers=[1])
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(p.stat().st_mode) for p in tmp_path.rglob("out/**/*") if p.is_file()}
    assert modes == {0o666 & ~umask}
    folders = [tmp_path / "out", *(p for p in tmp_path.rglob("out/**/*") if p.is_dir())]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o777 & ~umask}
