"""`kconvert smoke-generate` as a user runs it, on random weights and on small trained ones."""

import copy
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from kit import KIMI_MINI, change_json

from kconvert.convert import convert
from kconvert.convert.cli import smoke_generate as cli
from kconvert.runtime import smoke
from kconvert.runtime.engine import Engine, Generation
from kconvert.runtime.tokenizer import Tokenizer

TINY = Path(__file__).parents[1] / "tiny_kimi"
PROMPT = "And the LORD spake unto Moses"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    convert(KIMI_MINI, tmp_path_factory.mktemp("smoke") / "out")
    return tmp_path_factory.getbasetemp() / "smoke0/out"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("tiny") / "out"
    convert(TINY / "model", out)
    return out


def test_generate_and_check(folder: Path, kconvert) -> None:
    outcome = kconvert(
        "smoke-generate", folder, "--tokens", "1,2,3", "--max-new-tokens", 6, "--check-exact"
    )
    assert outcome.code == 0
    assert "\nar: 6 tokens" in outcome.out and "6 target forwards" in outcome.out
    assert "exact: every token and logit bit is ar's" in outcome.out
    arguments = ("smoke-generate", folder, "--tokens", "1,2,3", "--max-new-tokens", 6, "--json")
    table = json.loads(kconvert(*arguments).out)
    assert table["budget"] is None
    assert table["tokens"] == Engine.open(folder).generate([1, 2, 3], 6).tokens
    assert [line for line in outcome.out.splitlines() if line.startswith("[")] == [
        f"[{token}]" for token in table["tokens"]
    ]


def test_on_a_gpu_that_is_not_here(folder: Path, kconvert) -> None:
    outcome = kconvert("smoke-generate", folder, "--tokens", "1", "--device", "cuda")
    assert outcome.code == 3
    assert outcome.err.count("\n") == 1 and "run it with --device cpu" in outcome.err


def test_a_difference_is_found(folder: Path, kconvert, monkeypatch) -> None:
    """One flipped bit of one logit, another token, an early end."""
    truth = Engine.open(folder).generate([1, 2, 3], 6, keep_logits=True)
    assert smoke.first_difference(truth, truth, 3) is None
    flipped = copy.deepcopy(truth)
    flipped.logits[4].view(np.uint32)[7] ^= 1
    assert smoke.first_difference(truth, flipped, 3) == 7
    other = copy.deepcopy(truth)
    other.tokens[2] += 1
    assert smoke.first_difference(other, truth, 3) == 5
    assert (
        smoke.first_difference(
            Engine.open(folder).generate([1, 2, 3], 4, keep_logits=True), truth, 3
        )
        == 7
    )
    blind = Engine.open(folder).generate([1, 2, 3], 6)
    for pair in ((blind, truth), (truth, blind), (blind, blind)):
        with pytest.raises(ValueError, match="6 tokens have 0 rows of logits"):
            smoke.first_difference(*pair, 3)
    monkeypatch.setattr(smoke, "first_difference", lambda *_: 7)
    outcome = kconvert("smoke-generate", folder, "--tokens", "1,2,3", "--check-exact")
    assert outcome.code == 1
    assert "NOT EXACT: position 7 is the first that differs" in outcome.out


@pytest.mark.parametrize("options", [["--budget", 16], ["--chat"]])
def test_text_with_the_real_drafter(options, tiny: Path, kconvert) -> None:
    tokenizer = Tokenizer(tiny)
    ids = tokenizer.chat(PROMPT) if "--chat" in options else tokenizer.encode(PROMPT)
    truth = Engine.open(tiny).generate(ids, 40)
    command = ["smoke-generate", tiny, "--drafter", TINY / "drafter", "--prompt", PROMPT]
    command += ["--mode", "ddtree", "--max-new-tokens", 40, "--check-exact", *options]
    outcome = kconvert(*command)
    assert (outcome.code, outcome.err) == (0, "")
    budget = "auto" if "--chat" in options else 16
    assert outcome.out.startswith(
        f"{tokenizer.decode(truth.tokens)}\nddtree, budget {budget}: {len(truth.tokens)} tokens, "
    )
    assert "exact: every token and logit bit is ar's" in outcome.out
    table = json.loads(kconvert(*command, "--json").out)
    assert (table["tokens"], table["prompt_tokens"]) == (truth.tokens, len(ids))
    assert budget == "auto" or table["target_forwards"] < len(truth.tokens) / 2


@pytest.mark.parametrize("mode", ["ar", "ddtree"])
def test_text_is_shown_as_it_comes(mode: str, tiny: Path, kconvert, monkeypatch) -> None:
    events: list[str | None] = []  # what is printed, and None where a generation ends

    def generate(*args, original=Engine.generate, **options) -> Generation:
        made = original(*args, **options)
        events.append(None)
        return made

    def printed(text: str, *, end: str, flush: bool) -> None:
        assert end == "" and flush
        events.append(text)

    monkeypatch.setattr(Engine, "generate", generate)
    monkeypatch.setattr(cli, "print", printed, raising=False)
    command = ["smoke-generate", tiny, "--drafter", TINY / "drafter", "--prompt", PROMPT]
    command += ["--mode", mode, "--budget", 16]
    assert kconvert(*command).code == 0
    warmed = events.index(None)
    pieces = events[warmed + 1 : events.index(None, warmed + 1)]
    assert warmed == 0 and len(list(filter(None, pieces))) > 5
    assert "".join(filter(None, events)) == json.loads(kconvert(*command, "--json").out)["text"]


def test_a_character_cut_at_the_end_is_shown(tiny: Path, kconvert, monkeypatch) -> None:
    cut = Tokenizer(tiny).encode("x世")[:-1]

    def generate(*_, on_tokens=lambda _: None, **__) -> Generation:
        on_tokens(cut)
        return Generation(cut, seconds=1.0)

    monkeypatch.setattr(Engine, "generate", generate)
    outcome = kconvert("smoke-generate", tiny, "--prompt", PROMPT)
    assert outcome.out.startswith("x\ufffd\nar: ")


@pytest.mark.parametrize("file", ["config.json", "text_config", "generation_config.json"])
def test_every_file_s_stop_tokens_stop(file: str, tiny: Path, tmp_path: Path, kconvert) -> None:
    command = ["--prompt", PROMPT, "--max-new-tokens", 30, "--json"]
    truth = json.loads(kconvert("smoke-generate", tiny, *command).out)["tokens"]
    stop, source = truth[12], tmp_path / "source"
    shutil.copytree(TINY / "model", source)
    change_json(
        source / (file if file.endswith("json") else "config.json"),
        lambda table: table.get(file, table).update(eos_token_id=[1025, stop]),
    )
    convert(source, tmp_path / "out")
    made = json.loads(kconvert("smoke-generate", tmp_path / "out", *command).out)["tokens"]
    assert made == truth[: truth.index(stop) + 1] and len(made) < len(truth)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("chat_template.jinja", b"{% for", "chat_template.jinja cannot be rendered: Temp"),
        ("tiktoken.model", b"IQ== 0\n", "tiktoken.model has no token for 255 of the 256 bytes"),
    ],
)
def test_damaged_text_files(file, content, words: str, tmp_path: Path, kconvert) -> None:
    shutil.copytree(TINY / "model", tmp_path / "source")
    (tmp_path / "source" / file).write_bytes(content)
    convert(tmp_path / "source", tmp_path / "out")
    outcome = kconvert("smoke-generate", tmp_path / "out", "--prompt", PROMPT, "--chat")
    assert outcome.code == 2 and outcome.out == "" and outcome.err.count("\n") == 1
    assert f"{tmp_path / 'out'}/{words}" in outcome.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "give either --prompt or --tokens"),
        (["--tokens", "1,x"], "'1,x' is not a list like 1,2,3"),
        (["--prompt", "hello"], "has no tiktoken.model"),
        (["--tokens", "1,600"], "token id 600 is out of range"),
        (["--tokens", "99999999999999999999"], "token id 99999999999999999999 is out of range"),
        (["--tokens", "9" * 5000], "is not a list like 1,2,3"),
        (["--tokens", "1", "--chat"], "--chat needs a message: give --prompt"),
        (["--tokens", "1", "--seed", 2**64], "18446744073709551615"),
        (["--tokens", "1", "--seed", -1], "'--seed'"),
        (["--tokens", "1", "--budget", -1], "--budget: -1 is below 0: it must be 0 or more"),
        (["--tokens", "1", "--budget", "9" * 5000], "neither auto nor a number"),
        (["--tokens", "1", "--mode", "chain"], "needs a drafter"),
        (["--tokens", "1", "--budget", "many"], "neither auto nor a number"),
        (["--tokens", "1", "--dtype", "int8"], "'int8' is not one of 'float32', 'bfloat16'"),
        (["--tokens", "1", "--temperature", "-1"], "temperature -1"),
        (["--tokens", "1", "--drafter", KIMI_MINI], "drafter"),
    ],
)
def test_refused(options, words: str, folder: Path, kconvert) -> None:
    outcome = kconvert("smoke-generate", folder, *options)
    assert outcome.code == 2 and outcome.out == ""
    assert words in outcome.err
