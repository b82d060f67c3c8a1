"""`bench decode` and `bench exact` on a drafter with random weights, whose drafts mostly fail."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from kit import KIMI_MINI, torchrun
from safetensors.torch import save_file

from kconvert.convert import convert
from kconvert.runtime import bench_decode
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
        "--count", 2, "--new-tokens", 5, "--json",
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
        "--count", 1, "--new-tokens", 5,
    )  # fmt: skip
    assert outcome.code == 1
    assert "NOT EXACT: marlin float32 T 0.0 ddtree 16, prompt 0: position 12" in outcome.out


def test_bench_exact_by_torchrun(made, tmp_path: Path) -> None:
    """One rank speaks, of both."""
    convert(KIMI_MINI, tmp_path / "two", tp=2)
    arguments = ["bench", "exact", made["drafter"], made["prompts.json"], tmp_path / "two"]
    outcome = torchrun(
        2, ["-m", "kconvert.convert.cli", *arguments, "--count", "1", "--new-tokens", "3"]
    )
    assert outcome.startswith("exact at tp 2: 108 tokens in 36 configurations, 1 prompts")


def test_bench_decode_draws(made, tmp_path: Path, kconvert) -> None:
    command = ["bench", "decode", made["blobs"], made["drafter"], made["prompts.json"]]
    short = [*command, "--count", 1, "--new-tokens", 3, "--picture"]
    assert kconvert(*short, tmp_path / "picture.pdf").code == 2
    assert kconvert(*short, tmp_path / "picture.svg").code == 0
    drawn = (tmp_path / "picture.svg").read_text()
    assert drawn.startswith("<?xml") and "accepted drafts" in drawn


def test_bench_decode_accounts_for_its_time(made) -> None:
    prompts = bench_decode.read_prompts(made["prompts.json"], None)
    table = bench_decode.bench_decode(
        made["blobs"], made["drafter"], prompts, 6, "float32", lambda _: None
    )
    kinds = [(row["mode"], row["budget"]) for row in table["rows"]]
    assert kinds[0] == ("ar", 0) and kinds[-1] == ("ddtree", "auto") and len(kinds) == 11
    for row in table["rows"]:
        assert row["tokens"] == 3 * 5
        assert 0.9 < sum(row["share"].values()) <= 1.01
        assert row["reached"] == sorted(row["reached"], reverse=True)
    assert table["rows"][0]["forwards_saved"] == 1.0


def test_prompts_that_are_none(tmp_path: Path, made, kconvert) -> None:
    path = tmp_path / "prompts.json"
    path.write_text('[{"text": "hello"}]')
    outcome = kconvert("bench", "decode", made["blobs"], made["drafter"], path)
    assert outcome.code == 2
    assert str(path) in outcome.err and "token_ids" in outcome.err
