"""`bench decode` and `bench exact` on a drafter with random weights, whose drafts mostly fail."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from kit import KIMI_MINI, torchrun
from safetensors.torch import save_file

from kconvert.convert import convert
from kconvert.layouts.errors import UnsupportedError
from kconvert.runtime.bench.decode import bench_decode
from kconvert.runtime.bench.exact import _merged
from kconvert.runtime.bench.prompts import read_prompts
from kconvert.runtime.engine import Engine

HIDDEN, LAYERS, HEADS, KV_HEADS, DIM, MLP = 256, 2, 4, 2, 32, 128


def write_drafter(folder: Path) -> Path:
    folder.mkdir()
    config = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": DIM, "intermediate_size": MLP, "vocab_size": 512, "hidden_act": "silu",
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
        "attention_bias": False, "tie_word_embeddings": False, "block_size": 8,
        "num_target_layers": 3, "dflash_config": {"mask_token_id": 510, "target_layer_ids": [0, 2]},
        "layer_types": ["full_attention"] * LAYERS, "use_sliding_window": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"fc": (HIDDEN, 2 * HIDDEN), "hidden_norm": (HIDDEN,), "norm": (HIDDEN,)}
    for i in range(LAYERS):
        base = f"layers.{i}."
        shapes |= {f"{base}{n}_layernorm": (HIDDEN,) for n in ("input", "post_attention")}
        shapes |= {
            f"{base}self_attn.q_proj": (HEADS * DIM, HIDDEN),
            f"{base}self_attn.k_proj": (KV_HEADS * DIM, HIDDEN),
            f"{base}self_attn.v_proj": (KV_HEADS * DIM, HIDDEN),
            f"{base}self_attn.o_proj": (HIDDEN, HEADS * DIM),
            f"{base}self_attn.q_norm": (DIM,), f"{base}self_attn.k_norm": (DIM,),
            f"{base}mlp.gate_proj": (MLP, HIDDEN), f"{base}mlp.up_proj": (MLP, HIDDEN),
            f"{base}mlp.down_proj": (HIDDEN, MLP),
        }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    save_file(
        {
            f"{name}.weight": (torch.randn(shape, generator=generator) * 0.05).bfloat16()
            for name, shape in shapes.items()
        },
        folder / "model.safetensors",
    )
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("decode")
    convert(KIMI_MINI, root / "blobs")
    write_drafter(root / "drafter")
    tokens = np.random.default_rng(1).integers(0, 256, (3, 9)).tolist()
    (root / "prompts.json").write_text(json.dumps([{"token_ids": t} for t in tokens]))
    return {name: root / name for name in ("blobs", "drafter", "prompts.json")}


def test_bench_exact_compares_every_configuration(made, kconvert) -> None:
    outcome = kconvert(
        "bench", "exact", made["drafter"], made["prompts.json"], made["blobs"],
        "--count", 2, "--new-tokens", 5, "--longest", 0, "--json",
    )  # fmt: skip
    assert outcome.code == 0
    table = json.loads(outcome.out)
    assert table["exact"] and table["prompts"] == 2
    kinds = {(r["dtype"], r["temperature"], r["mode"], r["budget"]) for r in table["rows"]}
    assert len(kinds) == len(table["rows"]) == 2 * 2 * (3 + 6)
    assert all(row["tokens"] == 10 for row in table["rows"])


def test_bench_exact_finds_a_difference(made, kconvert, monkeypatch) -> None:
    real = Engine.generate

    def generate(self, prompt, new, mode="ar", *rest, **options):
        result = real(self, prompt, new, mode, *rest, **options)
        if mode == "ddtree" and rest[0] == 16:
            result.logits[3] = -result.logits[3]
        return result

    monkeypatch.setattr(Engine, "generate", generate)
    outcome = kconvert(
        "bench", "exact", made["drafter"], made["prompts.json"], made["blobs"],
        "--count", 1, "--new-tokens", 5, "--longest", 0,
    )  # fmt: skip
    assert outcome.code == 1
    assert "NOT EXACT: marlin float32 T 0.0 ddtree 16, prompt 0: position 12" in outcome.out


@pytest.mark.parametrize("processes", [2, 4])
def test_bench_exact_by_torchrun(processes, made, tmp_path: Path) -> None:
    """One rank speaks, of all; of four processes each two have some of the prompts."""
    convert(KIMI_MINI, tmp_path / "two", tp=2)
    arguments = ["bench", "exact", made["drafter"], made["prompts.json"], tmp_path / "two"]
    outcome = torchrun(processes, ["-m", "kconvert.convert.cli", *arguments, "--new-tokens", "3",
                                   "--longest", "0"])  # fmt: skip
    assert outcome.startswith("exact at tp 2: 324 tokens in 36 configurations, 3 prompts")


def test_bench_exact_counts_what_any_process_finds() -> None:
    """Two teams of two ranks: tokens of each team once, differences of every rank."""

    def table(tokens: int, differ: dict[int, int]) -> list[dict]:
        return [{"tokens": tokens, "target_forwards": 1, "ar_forwards": 2, "differ": differ}]

    tables = [table(5, {}), table(5, {0: 9}), table(7, {3: 1}), table(7, {3: 4})]
    assert _merged(tables, 2) == [
        {"tokens": 12, "target_forwards": 2, "ar_forwards": 4, "differ": {0: 9, 3: 1}}
    ]


def test_bench_exact_refuses_before_it_measures(made, kconvert, tmp_path: Path) -> None:
    """The last folder and the last prompt are looked at first."""
    convert(KIMI_MINI, tmp_path / "two", tp=2)
    command = ["bench", "exact", made["drafter"]]
    outcome = kconvert(*command, made["prompts.json"], made["blobs"], tmp_path / "two")
    assert outcome.code == 2 and "for 1 and 2 ranks" in outcome.err
    outcome = kconvert(*command, made["prompts.json"], tmp_path / "two")
    assert outcome.code == 2 and "1 process(es) were started" in outcome.err
    prompts = tmp_path / "prompts.json"
    prompts.write_text('[{"token_ids": [1]}, {"token_ids": [512]}]')
    outcome = kconvert(*command, prompts, made["blobs"])
    assert outcome.code == 2 and "token id 512" in outcome.err
    assert "chain" not in outcome.err  # no row


@pytest.mark.parametrize(
    "environment",
    [
        {"WORLD_SIZE": "2"},
        {"WORLD_SIZE": "two", "RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        {"WORLD_SIZE": "0", "RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        {"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "abc"},
    ],
)
def test_an_environment_that_names_no_rank(environment, made, kconvert, monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    outcome = kconvert("smoke-generate", made["blobs"], "--tokens", "1")
    assert outcome.code == 2
    assert f"WORLD_SIZE={environment['WORLD_SIZE']}" in outcome.err and "torchrun" in outcome.err


def test_bench_decode_by_torchrun(made, tmp_path: Path) -> None:
    convert(KIMI_MINI, tmp_path / "two", tp=2)
    arguments = ["bench", "decode", tmp_path / "two", made["drafter"], made["prompts.json"]]
    outcome = torchrun(2, ["-m", "kconvert.convert.cli", *arguments, "--new-tokens", "3"])
    assert outcome.startswith("3 prompts × 3 tokens, float32, tp 2\n")


def test_bench_decode_of_texts_that_end_at_once(made, monkeypatch) -> None:
    prompts = read_prompts(made["prompts.json"], None)
    real = Engine.generate
    monkeypatch.setattr(
        Engine, "generate", lambda self, prompt, new, *rest: real(self, prompt, 1, *rest)
    )
    with pytest.raises(UnsupportedError, match="nothing to measure"):
        bench_decode(made["blobs"], made["drafter"], prompts, 6, "float32", lambda _: None)


def test_bench_decode_draws(made, tmp_path: Path, kconvert) -> None:
    command = ["bench", "decode", made["blobs"], made["drafter"], made["prompts.json"]]
    short = [*command, "--count", 1, "--new-tokens", 3, "--picture"]
    assert kconvert(*short, tmp_path / "picture.pdf").code == 2
    assert kconvert(*short, tmp_path / "none/picture.svg").code == 2
    assert kconvert(*short, tmp_path / "picture.svg").code == 0
    drawn = (tmp_path / "picture.svg").read_text()
    assert drawn.startswith("<?xml") and "accepted drafts" in drawn


def test_bench_decode_accounts_for_its_time(made) -> None:
    prompts = read_prompts(made["prompts.json"], None)
    table = bench_decode(made["blobs"], made["drafter"], prompts, 6, "float32", lambda _: None)
    kinds = [(row["mode"], row["budget"]) for row in table["rows"]]
    assert kinds[0] == ("ar", 0) and kinds[-1] == ("ddtree", "auto") and len(kinds) == 11
    for row in table["rows"]:
        assert row["tokens"] == 3 * 5
        assert 0.9 < sum(row["share"].values()) <= 1.01
        assert row["reached"] == sorted(row["reached"], reverse=True)
    assert table["rows"][0]["forwards_saved"] == 1.0


@pytest.mark.parametrize(
    "text", ['[{"text": "hello"}]', '[{"token_ids": [Infinity]}]', '[{"token_ids": [1.5]}]', "[]"]
)
def test_prompts_that_cannot_be_read(text: str, tmp_path: Path, made, kconvert) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(text)
    outcome = kconvert("bench", "decode", made["blobs"], made["drafter"], path)
    assert outcome.code == 2
    assert str(path) in outcome.err and "token_ids" in outcome.err
