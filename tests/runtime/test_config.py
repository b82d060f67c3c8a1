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
def test_a_stop_token_that_is_none(file, folder: Path) -> None:
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
        ({"num_experts_per_tok": 99}, CheckpointError, "99 experts a token of 8"),
        ({"kv_lora_rank": None}, CheckpointError, "kv_lora_rank is None"),
        ({"rope_scaling": {"type": "linear"}}, UnsupportedError, "'linear', only yarn"),
    ],
)
def test_refused(values, error, words: str, folder: Path) -> None:
    change_json(folder / "config.json", text(**values))
    with pytest.raises(error, match=f"config.json: .*{words}"):
        read_config(folder)
