"""A file has its final name when it is whole and synced, or not at all; every run is logged."""

import json
import os
from pathlib import Path

import pytest

from kconvert.convert.output import publish
from kconvert.convert.output.runlog import COMMAND, LOG_NAME
from kconvert.convert.share import Share
from kconvert.layouts.errors import LockedOutputError, NoSpaceError


@pytest.fixture
def workspace(tmp_path: Path) -> publish.Workspace:
    return publish.Workspace(tmp_path / "out")


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def log(workspace: publish.Workspace) -> list[dict]:
    text = (workspace.output / ".kconvert" / LOG_NAME).read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_a_small_file_is_whole_or_not_there(workspace: publish.Workspace, monkeypatch) -> None:
    def broken(fd: int) -> None:
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output"), publish.working_in(workspace) as mine:
        publish.write_file(mine, "a.json", b"one")
        monkeypatch.setattr(os, "fsync", broken)
        publish.write_file(mine, "b.json", b"two")
    assert names(workspace.output) == {"a.json", f".kconvert/{LOG_NAME}"}
    assert [entry["outcome"] for entry in log(workspace)] == ["OSError"]


def test_a_file_with_the_same_bytes_is_left_alone(workspace: publish.Workspace) -> None:
    with publish.working_in(workspace) as mine:
        publish.write_file(mine, "a.json", b"one")
        before = (workspace.output / "a.json").stat().st_ino
        publish.write_file(mine, "a.json", b"one")
        assert (workspace.output / "a.json").stat().st_ino == before
        publish.write_file(mine, "a.json", b"two")
        assert (workspace.output / "a.json").read_bytes() == b"two"


def test_what_a_killed_run_left_is_cleared(workspace: publish.Workspace) -> None:
    workspace.work.mkdir(parents=True)
    (workspace.work / "layer.safetensors.1234.partial").write_bytes(b"half")
    (workspace.output / ".kconvert-probe.1234").touch()
    with publish.working_in(workspace):
        assert names(workspace.output) <= {".kconvert/owner", f".kconvert/{LOG_NAME}"}


def test_nothing_is_published_once_another_run_owns_the_output(
    workspace: publish.Workspace,
) -> None:
    with pytest.raises(LockedOutputError), publish.working_in(workspace) as mine:
        staged = publish.staging_path(mine, "a.json")
        staged.write_bytes(b"one")
        (workspace.output / ".kconvert/owner").unlink()  # as the other one does
        publish.publish(mine, staged, workspace.output / "a.json")
    assert not (workspace.output / "a.json").exists()


def test_a_share_works_in_a_folder_of_its_own(tmp_path: Path) -> None:
    first, second = (publish.Workspace(tmp_path / "out", Share(i, 2)) for i in (0, 1))
    with publish.working_in(first) as one, publish.working_in(second) as two:
        assert publish.staging_path(one, "a").parent != publish.staging_path(two, "a").parent


def test_room_is_counted_on_every_file_system(tmp_path: Path, monkeypatch) -> None:
    sizes = {"a": 600, "common/b": 500}
    assert publish.needed_by_device(tmp_path, sizes) == {tmp_path: 1100}
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(NoSpaceError, match=r"1,000 bytes free, 1,100 are needed \(100 more\)"):
        publish.check_space(tmp_path, sizes)


def test_a_link_takes_no_space_and_what_is_removed_is_gone(workspace: publish.Workspace) -> None:
    with publish.working_in(workspace) as mine:
        publish.write_file(mine, "rank/a", b"one")
        staged = publish.link(mine, workspace.output / "rank/a", "b")
        assert staged is not None and staged.read_bytes() == b"one"
        publish.publish(mine, staged, workspace.output / "b")
        publish.remove(mine, ["rank/a"])
        assert not (workspace.output / "rank").exists()
        assert (workspace.output / "b").read_bytes() == b"one"


def test_the_log_has_the_command_line_of_kconvert_alone(workspace: publish.Workspace) -> None:
    with publish.working_in(workspace):
        pass
    token = COMMAND.set(["kconvert", "convert"])
    with publish.working_in(workspace):
        pass
    COMMAND.reset(token)
    assert [entry["command"] for entry in log(workspace)] == [[], ["kconvert", "convert"]]
