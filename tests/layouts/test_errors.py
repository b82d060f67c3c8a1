"""Errors that callers can tell apart; and what takes long is said, what does not is not."""

import errno
import pickle
import time
from pathlib import Path

import pytest
from kit import KIMI_MINI, SHARD, copy_mini

import kconvert.layouts
from kconvert.convert import convert
from kconvert.layouts.errors import KconvertError, said_if_slow

CLASSES = [
    value for value in vars(kconvert.layouts).values()
    if isinstance(value, type) and issubclass(value, KconvertError)
]  # fmt: skip


@pytest.mark.parametrize("kind", CLASSES)
def test_it_is_a_builtin_too_and_travels_between_processes(kind: type[KconvertError]) -> None:
    error = kind("shard x: 1 byte found, 2 expected.")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (kind, "shard x: 1 byte found, 2 expected.")
    builtins = {c for c in kind.__mro__ if c.__module__ == "builtins"} - set(KconvertError.__mro__)
    assert builtins or kind is KconvertError


def _truncated(folder: Path) -> None:
    shard = copy_mini(folder / "source") / SHARD
    shard.write_bytes(shard.read_bytes()[:-1])


def _missing(folder: Path) -> None:
    (copy_mini(folder / "source") / SHARD).unlink()


def _changed(folder: Path) -> None:
    convert(copy_mini(folder / "source"), folder / "out")
    (folder / "out/config.json").write_bytes(b"{}" + b" " * 100)


def _newer(folder: Path) -> None:
    convert(copy_mini(folder / "source"), folder / "out")
    manifest = folder / "out/kconvert.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))


def _occupied(folder: Path) -> None:
    convert(copy_mini(folder / "source"), folder / "out", tp=2)


def _nothing(folder: Path) -> None:
    copy_mini(folder / "source")


@pytest.mark.parametrize(
    ("prepare", "action", "kind"),
    [
        (_truncated, "convert", EOFError),
        (_missing, "convert", FileNotFoundError),
        (_nothing, "tp 7", kconvert.layouts.OptionError),
        (_nothing, "layout x", kconvert.layouts.OptionError),
        (_nothing, "reshard", FileNotFoundError),
        (_occupied, "convert", FileExistsError),
        (_newer, "reshard", kconvert.layouts.NewerFormatError),
        (_changed, "reshard", kconvert.layouts.ChangedFileError),
    ],
)
def test_callers_can_tell_them_apart(tmp_path: Path, prepare, action: str, kind) -> None:
    prepare(tmp_path)
    source, out = tmp_path / "source", tmp_path / "out"
    with pytest.raises(kind) as raised:
        if action == "reshard":
            kconvert.convert.reshard_output(out, tmp_path / "new", tp=2)
        else:
            options = {"tp 7": {"tp": 7}, "layout x": {"layout": "x"}}.get(action, {})
            convert(source, out, **options)
    assert isinstance(raised.value, KconvertError)


def test_a_full_disk_has_its_number(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1}))
    with pytest.raises(kconvert.layouts.NoSpaceError, match="1 bytes free") as raised:
        convert(KIMI_MINI, tmp_path / "out")
    assert raised.value.errno == errno.ENOSPC


def test_only_what_is_slow_is_said(caplog) -> None:
    with said_if_slow("a quick thing", 0.2):
        pass
    with said_if_slow("100 % slow", 0.05):
        time.sleep(0.3)
    time.sleep(0.2)
    assert caplog.messages == ["100 % slow"]
