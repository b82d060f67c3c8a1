"""ModelConfig: what config.json and generation_config.json say, or one sentence."""

from pathlib import Path

import pytest
from kit import change_json, copy_mini

from kconvert.layouts.errors import CheckpointError, UnsupportedError
from kconvert.runtime.config import read_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copy_mini(tmp_path / "model")


def text(**values: object):
    return lambda config: config["text_config"].update(values)


def test_stop_tokens_are_those_of_both_files(folder: Path) -> None:
    change_json(folder / "config.json", text(eos_token_id=[7, 8]))
    (folder / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert read_config(folder).stop_tokens >= {7, 8, 9}


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_stop_token_that_is_no_id(file, folder: Path) -> None:
    (folder / "generation_config.json").write_text("{}")
    change_json(folder / file, lambda config: config.update(eos_token_id="</s>"))
    with pytest.raises(CheckpointError, match=f"^{folder / file}: eos_token_id is ..</s>"):
        read_config(folder)


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ({"scoring_func": "softmax"}, UnsupportedError, "scoring_func is 'softmax', only 'sigmo"),
        ({"n_group": 8}, UnsupportedError, "n_group is 8, only 1"),
        ({"attention_bias": True}, UnsupportedError, "attention_bias is True"),
        ({"num_experts_per_tok": 99}, CheckpointError, "num_experts_per_tok is 99, expected"),
        ({"kv_lora_rank": None}, CheckpointError, "kv_lora_rank is None"),
        (
            {"rope_scaling": {"type": "linear"}},
            UnsupportedError,
            "rope_type is 'linear', only 'yarn'",
        ),
    ],
)
def test_refused(values, error, words: str, folder: Path) -> None:
    change_json(folder / "config.json", text(**values))
    with pytest.raises(error, match=f"config.json: .*{words}"):
        read_config(folder)


def test_rotary_settings_where_transformers_5_writes_them(folder: Path) -> None:
    """All in rope_parameters: the same theta and YaRN as in the two old places."""
    before = read_config(folder)

    def move(config: dict) -> None:
        table = config["text_config"]
        scaling = table.pop("rope_scaling")
        kind = scaling.pop("type")
        theta = {"rope_theta": table.pop("rope_theta"), "rope_type": kind}
        table["rope_parameters"] = scaling | theta

    change_json(folder / "config.json", move)
    assert read_config(folder) == before and before.yarn is not None
    change_json(folder / "config.json", text(rope_theta=10000.0))
    with pytest.raises(CheckpointError, match=r"rope_theta is .* in one place and .* in another"):
        read_config(folder)


@pytest.mark.parametrize("key", ["rope_theta", "routed_scaling_factor", "rms_norm_eps"])
def test_what_has_no_safe_default_must_be_there(key: str, folder: Path) -> None:
    change_json(folder / "config.json", lambda c: c["text_config"].pop(key))
    with pytest.raises(CheckpointError, match=rf"{key} is None"):
        read_config(folder)


@pytest.mark.parametrize(
    "rope",
    [{"rope_theta": 1e4, "llama3_factor": 2}, {"factor": 4.0}, {"rope_type": "yarn"},
     {"rope_type": "dynamic", "factor": 2.0}, [1], "yarn"],
)  # fmt: skip
def test_rotary_settings_that_are_half_understood(rope, folder: Path) -> None:
    change_json(folder / "config.json", text(rope_scaling=None, rope_parameters=rope))
    with pytest.raises((CheckpointError, UnsupportedError)):
        read_config(folder)
