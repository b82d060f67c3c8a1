"""A blob being written: its bytes whatever the order of writing, and never published in part."""

import random
import threading
from pathlib import Path

import numpy as np
import pytest
from kit import KIMI_MINI

from kconvert.convert.output import publish
from kconvert.convert.output.writer import BlobWriter, Piece, StagedFile
from kconvert.convert.planned import PlannedFile
from kconvert.convert.prepare import Options, prepare
from kconvert.layouts.blob import digest, digest_of_experts, read_blob
from kconvert.layouts.errors import KconvertError


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> PlannedFile:
    """A rank's blob of four stacked tensors."""
    out = tmp_path_factory.mktemp("plan") / "out"
    files = prepare(KIMI_MINI, out, Options(tp=2)).plan.files
    return next(file for file in files if file.rank is not None)


def content(planned: PlannedFile) -> list[list[memoryview]]:
    """Bytes for each expert and stacked tensor."""
    rng, tensors = np.random.default_rng(0), planned.stacked
    count = tensors[0].blob.experts
    sizes = [tensor.blob.nbytes // count for tensor in tensors]
    return [[memoryview(rng.bytes(size)) for size in sizes] for _ in range(count)]


def write(folder: Path, planned: PlannedFile, order: list[int]) -> bytes:
    data = content(planned)
    with publish.working_in(publish.Workspace(folder)) as workspace:
        blob = BlobWriter(workspace, planned)
        file = StagedFile(blob.staged, blob.final, planned, threading.Lock())
        for expert in order:
            for piece in file.write_expert(expert, data[expert]):
                blob.take(piece)
        file.close()
        assert not blob.final.exists()
        try:
            blob.publish()
        finally:
            blob.close()
        return blob.final.read_bytes()


def test_the_order_of_writing_changes_no_byte(planned: PlannedFile, tmp_path: Path) -> None:
    order = list(range(planned.stacked[0].blob.experts))
    turned = random.Random(0).sample(order, len(order))
    assert write(tmp_path / "a", planned, order) == write(tmp_path / "b", planned, turned)
    header, info = read_blob(tmp_path / "a" / planned.path)
    data, raw = content(planned), (tmp_path / "a" / planned.path).read_bytes()
    assert len(raw) == planned.nbytes and len(header.raw) == planned.header_bytes
    for i, tensor in enumerate(planned.stacked):
        name, entry = tensor.blob.name, header.tensors[tensor.blob.name]
        parts = [expert[i] for expert in data]
        assert raw[entry.start : entry.start + entry.nbytes] == b"".join(parts)
        assert info.expert_digests[name] == [digest(part) for part in parts]
        assert info.digests[name] == digest_of_experts(map(digest, parts))


def test_a_blob_that_lacks_an_expert_is_not_published(planned: PlannedFile, tmp_path: Path) -> None:
    order = list(range(planned.stacked[0].blob.experts - 1))
    with pytest.raises(KconvertError, match="4 tensors are not whole; this is a bug"):
        write(tmp_path, planned, order)
    assert not (tmp_path / planned.path).exists()
    assert not [*tmp_path.rglob("*.partial")]


def test_nothing_is_taken_twice(planned: PlannedFile, tmp_path: Path) -> None:
    with publish.working_in(publish.Workspace(tmp_path)) as workspace:
        blob = BlobWriter(workspace, planned)
        piece = Piece(planned.stacked[0].blob.name, 0, "1" * 32, 1)
        blob.take(piece)
        with pytest.raises(KconvertError, match="0 was written twice"):
            blob.take(piece)
        blob.close()
        assert blob.closed and not blob.staged.exists()
