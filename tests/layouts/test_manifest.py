"""kconvert.json: what was written is read, later keys are kept, and a change of it shows."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kconvert.layouts.errors import NewerFormatError, OutputError, UnfinishedOutputError
from kconvert.layouts.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    encode_manifest,
    read_manifest,
)

FILES = {"b": FileEntry(7, "0" * 32, "f" * 32), "a": FileEntry(3, "1" * 32, None, {"later": 1})}
MANIFEST = Manifest("marlin", 4, 2, True, False, "org/name", None, FILES, unknown={"mirror": [1]})


def write(folder: Path, manifest: Manifest = MANIFEST) -> Path:
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(manifest))
    return folder / MANIFEST_NAME


def test_what_is_written_is_read_with_what_a_later_version_adds(tmp_path: Path) -> None:
    write(tmp_path)
    assert read_manifest(tmp_path) == MANIFEST
    assert encode_manifest(replace(MANIFEST, files=dict(sorted(FILES.items())))) == encode_manifest(
        MANIFEST
    )


def test_a_folder_without_one(tmp_path: Path) -> None:
    with pytest.raises(UnfinishedOutputError, match=r"has no kconvert\.json"):
        read_manifest(tmp_path)


def test_a_later_format(tmp_path: Path) -> None:
    write(tmp_path, replace(MANIFEST, format=2))
    with pytest.raises(NewerFormatError, match="has format 2, this version reads up to 1"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("value", [8, "marlin", True])
def test_any_change_shows(value: object, tmp_path: Path) -> None:
    path = write(tmp_path)
    table = json.loads(path.read_text())
    path.write_text(json.dumps({**table, "tp": value}))
    with pytest.raises(OutputError, match="was changed after it was written"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{}", "{", '{"format": 1, "digest": "", "files": []}'])
def test_what_is_not_a_manifest(text: str, tmp_path: Path) -> None:
    (tmp_path / MANIFEST_NAME).write_text(text)
    with pytest.raises(OutputError, match=MANIFEST_NAME):
        read_manifest(tmp_path)
