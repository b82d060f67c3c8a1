"""What a whole output will hold: enough to end, without the source, what several runs began."""

from dataclasses import replace
from pathlib import Path

import pytest

from kconvert.convert.output.outline import OUTLINE_NAME, Outline, read_earlier, read_outline
from kconvert.layouts.blob import digest
from kconvert.layouts.errors import OutputError, UnfinishedOutputError
from kconvert.layouts.manifest import FileEntry

OUTLINE = Outline(
    "marlin", 2, 1, False, None, None, None,
    blobs={"common/outer.safetensors": "f" * 32, "common/vision.safetensors": "e" * 32},
    small_files={"config.json": digest(b"{}"), "LICENSE": digest(b"free")},
    former=("old.json",),
)  # fmt: skip


def leave(output: Path, outline: Outline) -> None:
    (output / ".kconvert").mkdir(exist_ok=True)
    (output / ".kconvert" / OUTLINE_NAME).write_bytes(outline.encode())


def test_what_is_left_is_read(tmp_path: Path) -> None:
    leave(tmp_path, OUTLINE)
    assert read_outline(tmp_path) == OUTLINE


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"blobs": []}'])
def test_a_folder_in_which_nothing_was_begun(text: str, tmp_path: Path) -> None:
    (tmp_path / ".kconvert").mkdir()
    (tmp_path / ".kconvert" / OUTLINE_NAME).write_text(text)
    with pytest.raises(UnfinishedOutputError, match="no `kconvert convert` began there"):
        read_outline(tmp_path)


def test_the_manifest_has_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"{}")
    manifest = OUTLINE.manifest(tmp_path)
    assert manifest.files == {"config.json": FileEntry(2, digest(b"{}"))}
    assert not manifest.complete
    assert OUTLINE.missing_small_files(tmp_path) == ["LICENSE"]
    assert OUTLINE.missing_blobs(tmp_path) == sorted(OUTLINE.blobs)


def test_vision_may_be_wanting_if_it_was_left_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"{}")
    (tmp_path / "LICENSE").write_bytes(b"free")
    text_only = replace(OUTLINE, text_only=True, blobs={"common/vision.safetensors": None})
    manifest = text_only.manifest(tmp_path)
    assert manifest.complete and manifest.text_only
    assert text_only.missing_blobs(tmp_path) == []


def test_another_file_of_the_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"{1}")
    with pytest.raises(OutputError, match=r"config.json is not this conversion's file"):
        OUTLINE.manifest(tmp_path)


def test_names_that_a_file_tells_never_reach_further(tmp_path: Path) -> None:
    """`--overwrite` deletes what earlier conversions left, by these names."""
    leave(tmp_path, replace(OUTLINE, former=("../x", "..", "/etc/passwd", "old.json")))
    earlier = read_earlier(tmp_path)
    assert earlier.small_files == {"config.json", "LICENSE", "old.json"}
    assert earlier.fingerprints == OUTLINE.blobs
    assert read_earlier(tmp_path / "nothing").small_files == frozenset()
