"""The engine's weights by way of a filler: the arrays' bits, whole, cut and stacked; on a GPU
through pinned buffers."""

import shutil
from pathlib import Path

import pytest
import torch
from kit import KIMI_MINI, flip

from kconvert.convert import convert
from kconvert.layouts.errors import CheckpointError
from kconvert.runtime.backends.cuda import CudaBackend
from kconvert.runtime.config import read_config
from kconvert.runtime.distributed import Ranks
from kconvert.runtime.filling import filler as filling
from kconvert.runtime.filling.device import memory_on
from kconvert.runtime.filling.filler import Filler
from kconvert.runtime.filling.unread import UnreadBlobs
from kconvert.runtime.model import Model, Weights
from kconvert.runtime.weights import Blobs

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Alone(Ranks):
    """A rank of several that needs no other to load."""

    def shared_memory(self, size: int, device: torch.device):
        return ([0] * self.size, None) if self.size > 1 else None


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[int, Path]:
    root = tmp_path_factory.mktemp("filled")
    for tp in (1, 2):
        convert(KIMI_MINI, root / str(tp), tp=tp)
    return {tp: root / str(tp) for tp in (1, 2)}


def filled(folder: Path, ranks: Ranks, device: str, check: bool = True) -> Weights:
    blobs, where = Blobs(folder, ranks), torch.device(device)
    backend = CudaBackend(read_config(folder), ranks, where)
    with Filler(memory_on(where), check) as filler:
        weights = Model(backend.config, UnreadBlobs(blobs, filler), backend).weights
        filler.wait()
    return weights


def tensors(weights: object) -> list[torch.Tensor]:
    """All of them, in one order."""
    if isinstance(weights, torch.Tensor):
        return [weights.cpu()]
    parts = weights if isinstance(weights, list | tuple) else vars(weights).values()
    return [t for part in parts if hasattr(part, "__len__") or hasattr(part, "__dict__")
            for t in tensors(part)]  # fmt: skip


@pytest.mark.parametrize("chunk", [1000, 40_000, 8 << 20])
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("device", DEVICES)
def test_weights_have_the_arrays_bits(device, tp, rank, check, chunk, folders, monkeypatch) -> None:
    """Chunks of less than a row, of some rows, and of all experts of a tensor."""
    monkeypatch.setattr(filling, "CHUNK_BYTES", chunk)
    ranks = Alone(rank, tp)
    backend = CudaBackend(read_config(folders[tp]), ranks, torch.device("cpu"))
    wanted = tensors(Model(backend.config, Blobs(folders[tp], ranks), backend).weights)
    found = tensors(filled(folders[tp], ranks, device, check))
    assert len(found) == len(wanted) > 40
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("file", "name", "expert"),
    [
        ("common/layer-00001.safetensors", "self_attn.o_proj.weight", None),
        ("common/layer-00001.safetensors", "mlp.gate.e_score_correction_bias", None),
        ("common/outer.safetensors", "model.embed_tokens.weight", None),
        ("rank-00001-of-00002/layer-00001.safetensors", "w13_weight_packed", 3),
        ("rank-00001-of-00002/layer-00001.safetensors", "w2_weight_scale", 7),
    ],
)
def test_a_flipped_bit_is_no_weight(device, file, name, expert, folders, tmp_path: Path) -> None:
    """Also where the rank keeps another part of that tensor."""
    folder = Path(shutil.copytree(folders[2], tmp_path / "out"))
    full = flip(folder / file, name, expert)
    where = f"{folder / file}, tensor {full}" + ("" if expert is None else f", expert {expert} of")
    for rank in (0, 1) if "rank" not in file else (1,):
        with pytest.raises(CheckpointError, match="bytes were changed") as error:
            filled(folder, Alone(rank, 2), device)
        assert str(error.value).startswith(where)
        filled(folder, Alone(rank, 2), device, check=False)
