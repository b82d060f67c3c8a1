"""Tensor parallelism: at any tp the modes agree bit for bit, and all tp's logits agree."""

import json
import socket
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from kit import KIMI_MINI, torchrun

from kconvert.convert import convert
from kconvert.layouts.errors import UnavailableError
from kconvert.runtime import distributed as ranks
from kconvert.runtime.engine import Engine

PROMPT = np.random.default_rng(5).integers(0, 256, 70).tolist()  # as in test_engine


def test_smoke_generate_by_torchrun(tmp_path: Path) -> None:
    """One rank speaks."""
    convert(KIMI_MINI, tmp_path / "blobs", tp=2)
    command = ["smoke-generate", tmp_path / "blobs", "--tokens", "1,2,3", "--max-new-tokens", "4"]
    outcome = torchrun(2, ["-m", "kconvert.convert.cli", *command, "--json"])
    convert(KIMI_MINI, tmp_path / "one")
    alone = Engine.open(tmp_path / "one").generate([1, 2, 3], 4)
    assert json.loads(outcome)["tokens"] == alone.tokens


def test_ranks_that_do_not_meet(monkeypatch) -> None:
    monkeypatch.setattr(ranks, "MEETING", timedelta(seconds=1))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in where.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UnavailableError, match=f"2 ranks could not meet at 127.0.0.1:{port}"):
        ranks.ranks_from_environment()


def test_a_rank_left_alone(monkeypatch) -> None:
    def broken(*_, **__):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr("torch.distributed.all_gather", broken)
    with pytest.raises(UnavailableError, match="another rank has ended"):
        ranks.Ranks(0, 2).all_reduce(np.zeros((1, 2), np.float32))


@pytest.mark.parametrize(
    ("tp", "ep", "dtype", "layout"),
    [(2, 1, "float32", "marlin"), (2, 2, "bfloat16", "w4a16"), (4, 2, "float32", "marlin")],
)
def test_modes_and_logits(tp, ep, dtype, layout, tmp_path: Path) -> None:
    convert(KIMI_MINI, tmp_path / "blobs", tp=tp, ep=ep, layout=layout)
    out = tmp_path / "out.npz"
    torchrun(tp, [Path(__file__).parent / "tp_worker.py", tmp_path / "blobs", out, dtype])
    found = dict(np.load(out))
    assert found["same"].tolist() == [True] * 4
    assert found["forwards"] < 60  # drafts were accepted
    convert(KIMI_MINI, tmp_path / "one", layout=layout)
    alone = Engine.open(tmp_path / "one", dtype=dtype).logits(PROMPT)
    bound = 1e-5 if dtype == "float32" else 3e-2
    difference = np.linalg.norm(found["logits"] - alone) / np.linalg.norm(alone)
    assert difference <= bound
