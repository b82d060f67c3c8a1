"""Tensor parallelism: at any tp the modes agree bit for bit, and all tp's logits agree."""

import json
import socket
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
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


@pytest.mark.parametrize("command", ["smoke-generate", "bench"])
def test_world_of_another_size_is_refused_at_once(command, tmp_path, kconvert, monkeypatch) -> None:
    """As in a shell of a launcher's container: nobody is waited for."""
    convert(KIMI_MINI, tmp_path / "one")
    convert(KIMI_MINI, tmp_path / "two", tp=2)
    (tmp_path / "prompts.json").write_text('[{"token_ids": [1]}]')
    where = {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    for name, value in where.items():
        monkeypatch.setenv(name, value)

    def run(output: str) -> tuple[int, str]:
        arguments = [tmp_path / output, "--tokens", "1"]
        if command == "bench":
            arguments = ["decode", tmp_path / output, tmp_path, tmp_path / "prompts.json"]
        outcome = kconvert(command, *arguments)
        return outcome.code, outcome.err.removeprefix(f"kconvert: {tmp_path}/{output} was ")

    said = "converted for {} rank(s), WORLD_SIZE says that 8 were started: start {}"
    said += " (torchrun --nproc-per-node {}){}, or reshard it to --tp 8.\n"
    assert run("one") == (2, said.format(1, 1, 1, ", or alone without WORLD_SIZE"))
    assert run("two") == (2, said.format(2, 2, 2, ""))
    monkeypatch.delenv("WORLD_SIZE")
    assert run("two")[1].startswith("converted for 2 rank(s), 1 was started: start 2")


def test_waiting_for_ranks_is_said(monkeypatch, caplog) -> None:
    def meet(*_: object, **__: object) -> None:
        time.sleep(0.3)
        raise RuntimeError("nobody came")

    monkeypatch.setattr("torch.distributed.init_process_group", meet)
    monkeypatch.setattr(ranks, "_PATIENCE", 0.05)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UnavailableError, match="nobody came"):
        ranks._groups(3, 3)
    assert caplog.messages == [
        "waiting up to 5 min at 127.0.0.1:9 for all 3 ranks, as WORLD_SIZE says"
    ]


def test_ranks_that_do_not_meet(monkeypatch, tmp_path) -> None:
    convert(KIMI_MINI, tmp_path / "blobs", tp=2)
    monkeypatch.setattr(ranks, "MEETING", timedelta(seconds=1))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in where.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UnavailableError, match=f"2 ranks could not meet at 127.0.0.1:{port}"):
        ranks.ranks_from_environment(tmp_path / "blobs")


def test_a_rank_left_alone(monkeypatch) -> None:
    def broken(*_, **__):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr("torch.distributed.all_gather", broken)
    with pytest.raises(UnavailableError, match="another rank has ended"):
        ranks.Ranks(0, 2).all_reduce(np.zeros((1, 2), np.float32))


def test_errors_of_a_step_on_gpus_are_sentences(monkeypatch) -> None:
    """Of one rank alone an error of CUDA's is a fault of ours, and stays what it is."""
    left: list[bool] = []
    monkeypatch.setattr(ranks, "leave_at_exit", lambda: left.append(True))

    def rounds(error: Exception):
        yield 1
        raise error

    made = ranks.Ranks(0, 2, gpus=object()).steps(rounds(RuntimeError("CUDA error: fault\nat")))
    assert next(made) == 1
    with pytest.raises(UnavailableError, match=r"^a step of 2 ranks failed \(CUDA error: fault\)"):
        next(made)
    assert left == [True]
    with pytest.raises(RuntimeError, match="CUDA error"):
        list(ranks.Ranks().steps(rounds(RuntimeError("CUDA error: fault"))))
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    with pytest.raises(UnavailableError, match="the GPU's memory is used up"):
        list(ranks.Ranks().steps(rounds(full)))
    assert left == [True]


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
