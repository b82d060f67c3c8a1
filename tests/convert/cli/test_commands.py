"""What a user of the command line sees."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import pytest
import torch
from kit import KIMI_MINI, SHARD

from kconvert.convert.cli import common, smoke_generate, synth
from kconvert.convert.doctor import diagnose
from kconvert.convert.synth.presets import PRESETS
from kconvert.layouts.registry import NAMES
from kconvert.runtime.backends.device import DEVICES
from kconvert.runtime.backends.protocol import DTYPES
from kconvert.runtime.engine import MODES


def test_convert_says_what_it_did(tmp_path: Path, kconvert) -> None:
    out = tmp_path / "out"
    first = kconvert("convert", KIMI_MINI, out, "--tp", 2)
    assert first.code == 0 and first.err == ""
    assert f"{out}: 9 blobs written, 4,663,808 B; 0 were there already\n" in first.out
    assert re.search(r"took \d s: read \(\d+% busy\), convert \(", first.out)  # no rate: tiny
    again = kconvert("convert", KIMI_MINI, out, "--tp", 2)
    assert again.out.splitlines() == [
        f"{out}: 0 blobs written, 0 B; 9 were there already",
        "warning: the source has no tokenizer (tiktoken.model, tokenizer.json, tokenizer.model):"
        " text cannot be read or made",
        "contents were not compared with hashes: --verify does, if hashes came with them",
    ]
    quiet = kconvert("convert", KIMI_MINI, out, "--tp", 2, "-q")
    assert (quiet.out, quiet.err) == ("", "")
    table = json.loads(kconvert("convert", KIMI_MINI, out, "--tp", 2, "--json").out)
    assert table["files_kept"] == 9 and table["complete"] is True


def test_part_says_how_to_finish(tmp_path: Path, kconvert) -> None:
    outcome = kconvert("convert", KIMI_MINI, tmp_path / "out", "--layers", "0-1", "--tp", 2)
    assert "not complete yet" in outcome.out
    assert "left out: layers 2, outer, vision" in outcome.out


def test_dry_run_prints_the_plan_and_touches_nothing(tmp_path: Path, kconvert) -> None:
    out = tmp_path / "out"
    outcome = kconvert("convert", KIMI_MINI, out, "--tp", 4, "--dry-run")
    assert outcome.code == 0
    assert "plan: 204 tensors → 13 files, marlin, tp 4, ep 1" in outcome.out
    assert "rank-00003-of-00004/  2 files  450,560 B" in outcome.out
    assert "to read  4,627,328 B" in outcome.out
    assert " free, enough" in outcome.out
    assert not out.exists()


def test_inspect_checkpoint_and_output(tmp_path: Path, kconvert) -> None:
    text = kconvert("inspect", KIMI_MINI).out
    for line in (
        "kind: checkpoint", "model type: kimi_k2", "layers: 3", "dense layers: 1",
        "routed experts: 8", "quantization: INT4, symmetric, group_size 32", "tensors: 204",
        "shards: 6 of 6 are here", "groups here: layers 0-2, outer, vision",
    ):  # fmt: skip
        assert line in text.splitlines()
    kconvert("convert", KIMI_MINI, tmp_path / "out", "--tp", 2, "--layout", "w4a16")
    table = json.loads(kconvert("inspect", tmp_path / "out", "--json").out)
    assert (table["layout"], table["tp"], table["files"]) == ("w4a16", 2, 11)
    assert table["folders"]["rank-00001-of-00002"]["files"] == 2


def test_inspect_part_of_a_checkpoint(mini: Path, kconvert) -> None:
    (mini / SHARD).unlink()
    text = kconvert("inspect", mini).out
    assert f"missing shards: {SHARD}" in text
    assert "groups here: layers 0,2, outer, vision" in text


def test_synth_and_its_refusals(tmp_path: Path, kconvert) -> None:
    made = kconvert("synth", tmp_path / "a", "--preset", "kimi-mini", "--experts", 4)
    assert made.code == 0 and "6 shard(s)" in made.out
    assert kconvert("convert", tmp_path / "a", tmp_path / "out", "--tp", 2).code == 0
    for arguments, words in [
        ((tmp_path / "a",), "is not an empty folder"),
        ((tmp_path / "b", "--preset", "gpt"), "'gpt' is not one of 'k2.6', "),
        ((tmp_path / "b", "--preset", "kimi-mini", "--layers", "3"), "layers 0 to 2"),
        ((tmp_path / "b", "--preset", "kimi-mini", "--experts", "9"), "1 to 8"),
    ]:
        outcome = kconvert("synth", *arguments)
        assert outcome.code == 2 and words in outcome.err


def test_sparse_synth_takes_no_space(tmp_path: Path, kconvert) -> None:
    kconvert("synth", tmp_path / "a", "--sparse", "--layers", "1")
    (shard,) = (tmp_path / "a").glob("*.safetensors")
    assert shard.stat().st_size == 9_809_047_464
    assert shard.stat().st_blocks * 512 < 2_000_000


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is said where there is no GPU")
def test_bench_moe_without_a_gpu(kconvert) -> None:
    outcome = kconvert("bench", "moe")
    assert outcome.code == 3 and "needs an NVIDIA GPU" in outcome.err
    assert kconvert("bench", "moe", "--shapes", "tp3").code == 2


def test_version(kconvert) -> None:
    assert kconvert("--version").out == f"kconvert {version('kconvert')}\n"


def test_completion_of_a_shell_knows_commands_and_choices() -> None:
    """As bash asks for it; nothing heavy is loaded between two keys."""
    code = (
        "import sys\n"
        "from kconvert.convert.cli import main as cli\n"
        "try: cli.main()\n"
        "finally: print(sorted({'numba', 'numpy', 'torch'} & set(sys.modules)), file=sys.stderr)\n"
    )
    for words, expected in (
        ("kconvert ins", ["inspect"]),
        ("kconvert convert --layout ", ["marlin", "w4a16"]),
        ("kconvert smoke-generate --mode ", ["ar", "chain", "ddtree"]),
    ):
        asked = {"_KCONVERT_COMPLETE": "complete_bash", "COMP_WORDS": words}
        env = os.environ | asked | {"COMP_CWORD": str(words.count(" "))}
        made = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        assert (made.stdout.split(), made.stderr) == (expected, "[]\n")


def test_help_shows_choices_and_no_twins(kconvert, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    commands = ["convert", "synth", "smoke-generate", "validate", "doctor", "inspect", "finish"]
    text = "".join(kconvert(command, "--help").out for command in commands)
    assert "<marlin|w4a16>" in text and "<k2.6|k2.6-layer|kimi-mini|" in text
    assert "<ar|chain|ddtree>" in text and "float32|bfloat16" in text
    assert "/ --no-" not in text and "--chain-seed" in text
    assert "--version" in (first := kconvert("--help").out) and "--show-completion" in first


def test_choices_are_what_there_is() -> None:
    """The command line names them by itself, as the modules that know them are slow to load."""
    assert get_args(common.LayoutName) == NAMES
    assert get_args(synth.Preset) == tuple(PRESETS)
    assert get_args(smoke_generate.Mode) == MODES
    assert get_args(common.DtypeName) == DTYPES
    assert get_args(common.DeviceName) == DEVICES


def test_doctor_with_problems_exits_1(kconvert, monkeypatch) -> None:
    found: dict = {"problems": ["No room."]}
    monkeypatch.setattr(diagnose, "diagnose", lambda *_: found)
    monkeypatch.setattr(diagnose, "doctor_text", lambda table: str(table["problems"]))
    assert kconvert("doctor")[:2] == (1, "['No room.']\n")
    found["problems"] = []
    assert kconvert("doctor", "--json")[:2] == (0, '{"schema": 1, "problems": []}\n')


def test_dry_run_without_room_exits_3(tmp_path: Path, kconvert, monkeypatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    outcome = kconvert("convert", KIMI_MINI, tmp_path / "out", "--dry-run")
    assert outcome.code == 3
    assert "1,000 B free, NOT ENOUGH" in outcome.out
    assert outcome.err.count("\n") == 1 and "has 1,000 bytes free" in outcome.err


@pytest.mark.parametrize("command", ["convert", "validate", "inspect", "synth", "bench"])
def test_every_command_has_help(command: str, kconvert) -> None:
    outcome = kconvert(command, "--help")
    assert outcome.code == 0 and "Usage: kconvert" in outcome.out
