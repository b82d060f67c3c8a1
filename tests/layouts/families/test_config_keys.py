"""Every key of a config.json is read, known not to matter, or named."""

from pathlib import Path

import pytest
from kit import KIMI_MINI, change_json

from kconvert.layouts.checkpoint import read_json
from kconvert.layouts.families.deepseek_v3 import unknown_config_keys


def unknown(folder: Path) -> dict[str, bool]:
    keys = unknown_config_keys(read_json(folder / "config.json"))
    return {key.path: key.matters for key in keys}


def test_known_models_have_no_unknown_key(mini: Path) -> None:
    assert unknown(KIMI_MINI) == {}
    change_json(
        mini / "config.json",
        lambda c: c["text_config"].update(
            transformers_version="5.1", use_cache=True, head_dim=16, rope_interleave=True,
            rope_parameters={}, aux_loss_alpha=0.001, id2label={"0": "LABEL_0"},
        ),
    )  # fmt: skip
    assert unknown(mini) == {}


@pytest.mark.parametrize(
    ("value", "matters"),
    [(None, False), (False, False), (0, False), ("", False), ([], False), ({}, False),
     (True, True), (1e-3, True), ("llama", True), ([0], True), (-1, True)],
)  # fmt: skip
def test_an_unknown_key_matters_by_its_value(value, matters: bool, mini: Path) -> None:
    change_json(mini / "config.json", lambda c: c["text_config"].update(qk_clip=value))
    change_json(mini / "config.json", lambda c: c.update(router=value))
    assert unknown(mini) == {"text_config.qk_clip": matters, "router": matters}


def test_an_unknown_architecture_is_named(mini: Path) -> None:
    change_json(mini / "config.json", lambda c: c.update(architectures=["OtherForCausalLM"]))
    change_json(mini / "config.json", lambda c: c["text_config"].update(model_type="llama"))
    assert unknown(mini) == {"architectures": True, "text_config.model_type": True}


def test_convert_warns_and_inspect_too(mini: Path, tmp_path: Path, kconvert) -> None:
    change_json(mini / "config.json", lambda c: c["text_config"].update(qk_clip=2.0, mtp=None))
    for command in (("convert", mini, tmp_path / "out"), ("inspect", mini)):
        outcome = kconvert(*command)
        assert outcome.code == 0
        assert "text_config.qk_clip 2.0 is not known here and may change" in outcome.out
        assert "unknown, and empty: text_config.mtp" in outcome.out


def test_the_engine_refuses_unless_told_to_ignore(mini: Path, tmp_path: Path, kconvert) -> None:
    change_json(mini / "config.json", lambda c: c["text_config"].update(qk_clip=2.0, mtp=None))
    kconvert("convert", mini, tmp_path / "out")
    generate = ("smoke-generate", tmp_path / "out", "--tokens", "1,2", "--max-new-tokens", 1)
    outcome = kconvert(*generate)
    assert outcome.code == 2
    assert "text_config.qk_clip 2.0 is not known here and may change what" in outcome.err
    key = "text_config.qk_clip"
    assert f"--ignore-config-key {key}." in outcome.err
    assert kconvert(*generate, "--ignore-config-key", key).code == 0
