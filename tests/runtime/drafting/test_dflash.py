"""The drafter against z-lab's own outputs over two rounds, in every setting."""

from pathlib import Path

import pytest
import torch
from dflash_kit import CASES, GOLDEN, TARGET, shard, weights_of, write_drafter
from torch import Tensor

from kconvert.runtime.drafting.dflash import (
    Drafter,
    DrafterConfig,
    rope_frequencies,
    rope_tables,
)

TOLERANCE = 5e-5
every_case = pytest.mark.parametrize("case", list(CASES))


def run(drafter: Drafter, golden: dict[str, Tensor], number: int) -> Tensor:
    """Give the drafter what it got in this round and let it draft."""
    features, block = (
        golden[f"round{number}.target_hidden"],
        golden[f"round{number}.block_token_ids"],
    )
    drafter.extend(features)
    return drafter.draft(
        int(block[0]),
        drafter.length,
        golden["target.embed_tokens.weight"],
        golden["target.lm_head.weight"],
    )


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= TOLERANCE


def assert_golden(drafter: Drafter, case: str, variant: str = "") -> None:
    golden = GOLDEN[case]
    for number in (1, 2):
        logits = run(drafter, golden, number)
        assert logits.dtype == torch.float32
        assert_near(logits, golden[f"{variant}round{number}.logits"])
        if not variant:
            drafts = golden[f"round{number}.draft_token_ids"]
            assert logits.argmax(dim=1).tolist() == drafts.tolist()


@every_case
def test_logits_of_both_rounds_are_the_references(tmp_path: Path, case: str) -> None:
    assert_golden(Drafter.open(write_drafter(tmp_path / "d", case), TARGET), case)


@every_case
def test_context_cache_and_hidden_rows_are_the_references(tmp_path: Path, case: str) -> None:
    golden = GOLDEN[case]
    drafter = Drafter.open(write_drafter(tmp_path / "d", case), TARGET)
    head, seen = golden["target.lm_head.weight"], {}

    def embed(ids: Tensor) -> Tensor:
        seen["ids"] = ids
        return golden["target.embed_tokens.weight"][ids]

    def lm_head(hidden: Tensor) -> Tensor:
        seen["hidden"] = hidden
        return hidden @ head.T

    for number, committed in ((1, 10), (2, 13)):
        features = golden[f"round{number}.target_hidden"]
        assert_near(drafter.context(features), golden[f"round{number}.ctx"])
        drafter.extend(features)
        assert drafter.length == committed
        block = golden[f"round{number}.block_token_ids"]
        logits = drafter.draft(int(block[0]), committed, embed, lm_head)
        assert seen["ids"].tolist() == block.tolist()
        assert_near(seen["hidden"], golden[f"round{number}.hidden"][1:])
        assert_near(logits, golden[f"round{number}.logits"])
        assert drafter.length == committed  # nothing of the block stays
        for layer in range(3):
            keys, values = drafter.cached(layer)
            assert_near(keys, golden[f"round{number}.layer{layer}.cache_k"])
            assert_near(values, golden[f"round{number}.layer{layer}.cache_v"])


@every_case
def test_rotary_tables_are_the_references(case: str) -> None:
    golden = GOLDEN[case]
    config = DrafterConfig.from_json(CASES[case]["config"])
    frequencies = rope_frequencies(config)
    torch.testing.assert_close(frequencies, golden["rope.inv_freq"], rtol=1e-6, atol=0)
    factor = config.yarn.amplitude if config.yarn else 1.0
    assert factor == pytest.approx(CASES[case]["attention_factor"])
    for number in (1, 2):
        positions = golden[f"round{number}.position_ids"]
        cosines, sines = rope_tables(frequencies, positions, factor)
        assert_near(cosines, golden[f"round{number}.rope_cos"])
        assert_near(sines, golden[f"round{number}.rope_sin"])


def test_windows_and_yarn_are_read(tmp_path: Path) -> None:
    assert DrafterConfig.from_json(CASES["plain"]["config"]).windows == (None, None, None)
    config = DrafterConfig.read(write_drafter(tmp_path / "d", "sliding"))
    assert config.windows == (9, 9, None)
    assert config.causal == (False, False, False)
    yarn = DrafterConfig.from_json(CASES["yarn"]["config"]).yarn
    assert yarn is not None
    assert (yarn.factor, yarn.original_positions, yarn.truncate) == (64.0, 4096, True)


def test_windows_without_layer_types_follow_max_window_layers() -> None:
    config = {**CASES["sliding"]["config"], "layer_types": None, "max_window_layers": 1}
    assert DrafterConfig.from_json(config).windows == (None, 9, 9)
    config["use_sliding_window"] = False
    assert DrafterConfig.from_json(config).windows == (None, None, None)


@pytest.mark.parametrize("way", ["option", "causal"])
def test_layers_with_a_window_can_be_causal_inside_the_block(tmp_path: Path, way: str) -> None:
    folder = write_drafter(tmp_path / "d", "sliding")
    drafter = Drafter.open(folder, TARGET, causal_windows=True)
    assert drafter.config.causal == (True, True, False)
    if way == "option":
        assert_golden(drafter, "sliding", "alt_causal.")
        return
    # What the config says goes before the option, and is of all layers.
    config = {**CASES["sliding"]["config"], "is_causal": False}
    assert DrafterConfig.from_json(config, causal_windows=True).causal == (False,) * 3
    config["dflash_config"] = {**config["dflash_config"], "causal": True}
    assert DrafterConfig.from_json(config).causal == (True,) * 3


@pytest.mark.parametrize("way", ["option", "config", "no mscales"])
def test_yarns_attention_factor_can_be_another(tmp_path: Path, way: str) -> None:
    scaling, option = dict(CASES["yarn"]["config"]["rope_scaling"]), None
    other = CASES["yarn"]["alt_attention_factor"]
    if way == "no mscales":
        del scaling["mscale"], scaling["mscale_all_dim"]
    elif way == "config":
        scaling["attention_factor"] = other
    else:
        option = other
    folder = write_drafter(tmp_path / "d", "yarn", rope_scaling=scaling)
    drafter = Drafter.open(folder, TARGET, attention_factor=option)
    assert drafter.config.yarn.amplitude == pytest.approx(other)
    assert_golden(drafter, "yarn", "alt_factor.")


def test_rotary_settings_in_transformers_5s_place(tmp_path: Path) -> None:
    config = CASES["yarn"]["config"]
    rope = {**config["rope_scaling"], "rope_theta": config["rope_theta"]}
    folder = write_drafter(
        tmp_path / "d", "yarn", rope_scaling=None, rope_theta=None, rope_parameters=rope
    )
    assert DrafterConfig.read(folder) == DrafterConfig.from_json(config)


def test_shards_with_an_index(tmp_path: Path) -> None:
    assert_golden(Drafter.open(shard(write_drafter(tmp_path / "d")), TARGET), "plain")


def test_context_given_in_parts_and_again_after_a_reset(tmp_path: Path) -> None:
    golden = GOLDEN["sliding"]
    drafter = Drafter.open(write_drafter(tmp_path / "d", "sliding"), TARGET)
    features = torch.cat([golden["round1.target_hidden"], golden["round2.target_hidden"]])
    for attempt in range(2):
        drafter.reset()
        assert drafter.length == 0
        for row in features.split([1, 5, 7] if attempt else [13]):
            drafter.extend(row)
        for layer in range(3):
            for ours, name in zip(drafter.cached(layer), ("cache_k", "cache_v"), strict=True):
                assert_near(ours, golden[f"round2.layer{layer}.{name}"])


def test_a_long_context_behind_the_window_is_not_read(tmp_path: Path) -> None:
    """A drafter of windows alone forgets: what lies far behind changes nothing."""
    kinds = ["sliding_attention"] * 3
    folder = write_drafter(tmp_path / "d", "sliding", layer_types=kinds)
    golden, logits = GOLDEN["sliding"], []
    features = torch.randn(40, 128, generator=torch.Generator().manual_seed(3))
    for scale in (1.0, -5.0):
        drafter = Drafter.open(folder, TARGET)
        changed = features.clone()
        changed[:32] *= scale  # the anchor at 40 reads 32…40
        drafter.extend(changed)
        logits.append(
            drafter.draft(
                7, 40, golden["target.embed_tokens.weight"], golden["target.lm_head.weight"]
            )
        )
    assert torch.equal(*logits)
    changed[32] += 1
    drafter = Drafter.open(folder, TARGET)
    drafter.extend(changed)
    again = drafter.draft(
        7, 40, golden["target.embed_tokens.weight"], golden["target.lm_head.weight"]
    )
    assert not torch.equal(again, logits[0])


def test_bfloat16_is_near_float32(tmp_path: Path) -> None:
    golden = GOLDEN["yarn"]
    drafter = Drafter.open(write_drafter(tmp_path / "d", "yarn"), TARGET, dtype=torch.bfloat16)
    for number in (1, 2):
        logits = run(drafter, golden, number)
        assert drafter.cached(0)[0].dtype == torch.bfloat16
        assert logits.dtype == torch.float32
        expected = golden[f"round{number}.logits"]
        assert (logits - expected).norm() / expected.norm() < 0.03


def test_weights_stored_in_bfloat16_are_the_same_weights(tmp_path: Path) -> None:
    weights = {name: tensor.bfloat16() for name, tensor in weights_of("plain").items()}
    drafter = Drafter.open(write_drafter(tmp_path / "d", weights=weights), TARGET)
    assert_golden(drafter, "plain")  # the golden weights are exact in bfloat16


def test_a_draft_without_any_context(tmp_path: Path) -> None:
    golden = GOLDEN["plain"]
    drafter = Drafter.open(write_drafter(tmp_path / "d"), TARGET)
    logits = drafter.draft(
        7, 0, golden["target.embed_tokens.weight"], golden["target.lm_head.weight"]
    )
    assert logits.shape == (7, 400) and logits.isfinite().all()


def test_calls_that_cannot_be_meant_are_mistakes(tmp_path: Path) -> None:
    golden = GOLDEN["plain"]
    drafter = Drafter.open(write_drafter(tmp_path / "d"), TARGET)
    drafter.extend(golden["round1.target_hidden"])
    tables = golden["target.embed_tokens.weight"], golden["target.lm_head.weight"]
    with pytest.raises(ValueError, match="position 11, but 10 tokens"):
        drafter.draft(7, 11, *tables)
    for token in (-1, 400):
        with pytest.raises(ValueError, match=f"anchor token {token}"):
            drafter.draft(token, 10, *tables)
    for features in (torch.zeros(2, 64), torch.zeros(128)):
        with pytest.raises(ValueError, match=r"expected \[T, 128\]"):
            drafter.extend(features)
    assert drafter.length == 10
