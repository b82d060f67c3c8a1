"""The tokenizer's files, with Kimi's own split pattern and with another."""

import base64
import json
from pathlib import Path

import pytest

from kconvert.layouts.errors import CheckpointError, UnsupportedError
from kconvert.runtime.tokenizer import Tokenizer

MERGES = [b"he", b"ll", b"hell", b"hello", b" w", b"or", b" wor", b"ld", b" world", b"\xe4\xb8"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokens = [bytes([i]) for i in range(256)] + MERGES
    lines = [f"{base64.b64encode(t).decode()} {i}" for i, t in enumerate(tokens)]
    (tmp_path / "tiktoken.model").write_text("\n".join(lines) + "\n")
    first = len(tokens)
    names = {str(first): {"content": "[BOS]"}, str(first + 3): {"content": "<|im_user|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": names}))
    return tmp_path


def test_text_comes_back(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    assert tokenizer.vocabulary == 266 + 256
    assert tokenizer.encode("hello world") == [256 + MERGES.index(b"hello"), 264]
    for text in ("hello world", "Grüße, 世界! It's 12345 \r\n\n  x", "", "🙂"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_kimis_pattern_splits_han_from_letters(folder: Path) -> None:
    """`&&` at work: a merge over the border must not happen."""
    tokenizer = Tokenizer(folder)
    assert tokenizer._coder._pat_str.startswith(r"[\p{Han}]+|")
    pieces = [len(tokenizer.encode(text)) for text in ("hello", "世", "hello世")]
    assert pieces[2] == pieces[0] + pieces[1]


def test_specials(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    assert tokenizer.specials["[BOS]"] == 266
    assert tokenizer.specials["<|reserved_token_267|>"] == 267
    assert tokenizer.encode("<|im_user|>", specials=True) == [269]
    assert len(tokenizer.encode("<|im_user|>")) > 1  # a user's text is text
    assert tokenizer.decode([269]) == "<|im_user|>"


def test_another_pattern(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "pat_str": r"\S|\s"}))
    assert len(Tokenizer(folder).encode("hello")) == 5


def test_streaming_writes_whole_characters(folder: Path) -> None:
    tokenizer, written = Tokenizer(folder), []
    tell = tokenizer.printer(written.append)
    for token in tokenizer.encode("世x"):
        tell([token])
    assert "".join(written) == "世x" and "�" not in "".join(written)
    assert len(tokenizer.encode("世x")) > 2


def test_chat_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_user|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[BOS]{% endif %}"
    )
    assert Tokenizer(folder).chat("hello") == [269, 259, 266]
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UnsupportedError, match="no chat_template"):
        Tokenizer(folder).chat("hello")


@pytest.mark.parametrize("text", ["a b c\n", "!!! 0\n", "aGU= x\n", "aGU= 5\n"])
def test_damaged_ranks(text: str, folder: Path) -> None:
    (folder / "tiktoken.model").write_text(text)
    with pytest.raises(CheckpointError, match=r"tiktoken\.model"):
        Tokenizer(folder)


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="give --tokens instead"):
        Tokenizer(tmp_path)
