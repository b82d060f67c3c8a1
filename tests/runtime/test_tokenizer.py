"""The tokenizer's files, with Kimi's own split pattern and with another."""

import base64
import json
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from kconvert.layouts.errors import CheckpointError, UnsupportedError
from kconvert.runtime.tokenizer import Tokenizer

TINY = Path(__file__).parents[1] / "tiny_kimi/model"
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


def test_streaming_ends_with_what_was_cut(folder: Path) -> None:
    tokenizer, written = Tokenizer(folder), []
    tell, cut = tokenizer.printer(written.append), tokenizer.encode("x世")[:-1]
    tell(cut)
    assert "".join(written) == "x"
    tell([], last=True)
    assert "".join(written) == tokenizer.decode(cut) == "x\ufffd"


def test_ids_that_only_pad_the_vocabulary(folder: Path) -> None:
    tokenizer, written = Tokenizer(folder), []
    tokens = [259, tokenizer.vocabulary, 10**6, -1, tokenizer.vocabulary - 1]
    tokenizer.printer(written.append)(tokens)
    expected = "hello\ufffd\ufffd\ufffd<|reserved_token_521|>"
    assert tokenizer.decode(tokens) == "".join(written) == expected


def test_chat_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_user|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[BOS]{% endif %}"
    )
    assert Tokenizer(folder).chat("hello") == [269, 259, 266]
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UnsupportedError, match="no chat_template"):
        Tokenizer(folder).chat("hello")


def test_kimis_chat_template() -> None:
    tokenizer = Tokenizer(TINY)
    user, text, assistant = (tokenizer.encode(t) for t in ("user", "And it came", "assistant"))
    expected = [1027, *user, 1041, *text, 1026, 1028, *assistant, 1041, 1046]
    assert tokenizer.chat("And it came") == expected


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}\n  {% if m.role == 'user' %}\n[{{ m.content }}]\n  {% endif %}\n"
        "{% endfor %}\n\n",
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        "{{ messages[0].content | tojson }}{{ {'b': '<é>', 'a': 1} | tojson }}"
        "{{ {'b': '<é>', 'a': 1} | tojson(indent=2, sort_keys=true, ensure_ascii=true) }}",
        "{{ strftime_now('%Y') }}{{ bos_token }}{{ eos_token is defined }}",
        "{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}",
    ],
)
def test_templates_say_what_they_say_in_transformers(template: str, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(template)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"bos_token": {"content": "[BOS]"}, "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    message, tokenizer = '<it\'s> 世 & "x"\n', Tokenizer(folder)
    (expected,), _ = render_jinja_template(
        [[{"role": "user", "content": message}]],
        chat_template=template, add_generation_prompt=True, bos_token="[BOS]",
    )  # fmt: skip
    assert tokenizer.chat(message) == tokenizer.encode(expected, specials=True)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (b"{% for", "TemplateSyntaxError: "),
        (b"\xff", "UnicodeDecodeError: .*0xff"),
        (b"{{ raise_exception('roles must alternate') }}", "TemplateError: roles must alternate;"),
        (b"{{ messages[0].content.x.y }}", "UndefinedError: "),
        (b"{{ 1 // 0 }}", "ZeroDivisionError: "),
        (b"{{ ''.__class__.__mro__ }}", "SecurityError: "),
        (b"{{ messages.append(1) }}", "SecurityError: "),
    ],
)
def test_chat_templates_that_fail(template: bytes, words: str, folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(template)
    with pytest.raises(UnsupportedError, match=rf"chat_template\.jinja cannot be .*: {words}"):
        Tokenizer(folder).chat("hello")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a b c\n", "line 1 is b'a b c', expected a base64 token and its rank"),
        ("!!! 0\n", "line 1"),
        ("aGU= 0\naGU= x\n", "line 2"),
        ("aGU= 0\naGV", "line 2"),
        ("aGU= 5\n", "the ranks are not 0 to 0"),
        ("", "has no token for 256 of the 256 bytes, 0x00"),
    ],
)
def test_damaged_ranks(text: str, words: str, folder: Path) -> None:
    (folder / "tiktoken.model").write_text(text)
    with pytest.raises(CheckpointError, match=rf"tiktoken\.model.* {words}"):
        Tokenizer(folder)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (50, r"tiktoken\.model has no token for 206 of the 256 bytes, 0x32 for one"),
        (300, "'\\[BOS]' token 1024, but the 300 ranks of .* special tokens at 300 to 555"),
        (1023, "'\\[PAD]' token 1279, but the 1023 ranks"),
    ],
)
def test_ranks_cut_short(lines: int, words: str, folder: Path) -> None:
    ranks = (TINY / "tiktoken.model").read_text().splitlines(keepends=True)
    (folder / "tiktoken.model").write_text("".join(ranks[:lines]))
    (folder / "tokenizer_config.json").write_bytes((TINY / "tokenizer_config.json").read_bytes())
    with pytest.raises(CheckpointError, match=words):
        Tokenizer(folder)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"added_tokens_decoder": []}, "added_tokens_decoder is not an object"),
        ({"added_tokens_decoder": {"266": {"content": 5}}}, "token 266 is 5, expected a text"),
        ({"added_tokens_decoder": {"x": {"content": "[BOS]"}}}, "token x, but the 266 ranks"),
        (
            {"added_tokens_decoder": {"266": {"content": "a"}, "267": {"content": "a"}}},
            "the same name",
        ),
        ({"pat_str": "("}, "pat_str or a name cannot be used"),
        ({"added_tokens_decoder": {"266": {"content": "\ud800"}}}, "name cannot be used"),
        ({"pat_str": 5}, "pat_str or a name cannot be used"),
        ({"pat_str": "b*"}, "pat_str fits the empty text"),
    ],
)
def test_damaged_config(config: dict, words: str, folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=rf"tokenizer_config\.json.* {words}"):
        Tokenizer(folder).encode("abba")


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="give --tokens instead"):
        Tokenizer(tmp_path)
