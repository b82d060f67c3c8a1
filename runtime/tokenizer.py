"""Kimi's tokenizer from its own files: tiktoken.model, tokenizer_config.json, chat template."""

import base64
import codecs
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kconvert.layouts.checkpoint import read_json
from kconvert.layouts.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

RANKS_NAME = "tiktoken.model"
CONFIG_NAME = "tokenizer_config.json"
TEMPLATE_NAME = "chat_template.jinja"
SPECIALS = 256
_UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()
_CASE = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# Kimi's split pattern, which its repository keeps in tokenization_kimi.py. tiktoken's regex engine
# knows `&&`, Python's does not.
KIMI_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_CASE}+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_CASE}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


class Tokenizer:
    """Text ↔ token ids. The 256 ids after the ranks are special tokens; tokenizer_config.json names
    them, or they are `<|reserved_token_{id}|>`. Its `pat_str`, if it has one, replaces Kimi's split
    pattern."""

    def __init__(self, folder: Path) -> None:
        """Raises UnsupportedError if `folder` has no tiktoken.model, CheckpointError if its
        files are damaged."""
        import tiktoken

        path = folder / RANKS_NAME
        if not path.is_file():
            raise UnsupportedError(
                f"{folder} has no {RANKS_NAME}, so text cannot be read: give --tokens instead."
            )
        ranks = _read_ranks(path)
        config_path = folder / CONFIG_NAME
        config = read_json(config_path) if config_path.is_file() else {}
        self.specials = _specials(config_path, config, len(ranks))
        self.vocabulary = len(ranks) + SPECIALS
        self._folder, self._config = folder, config
        try:
            self._coder = tiktoken.Encoding(
                "kconvert",
                pat_str=config.get("pat_str", KIMI_PATTERN),
                # A pattern may fit where there is no text, and tiktoken panics without a rank.
                mergeable_ranks={**ranks, b"": self.vocabulary},
                special_tokens=self.specials,
            )
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"{config_path}: pat_str or a name cannot be used: {error}."
            ) from None

    def encode(self, text: str, specials: bool = False) -> list[int]:
        """The token ids of `text`. Names of special tokens are plain text unless `specials`."""
        tokens = self._coder.encode(
            text, allowed_special="all" if specials else set(), disallowed_special=()
        )
        if self.vocabulary in tokens:
            raise CheckpointError(
                f"{self._folder / CONFIG_NAME}: pat_str fits the empty text, a piece has to be"
                " longer: get the file again."
            )
        return tokens

    def decode(self, tokens: list[int]) -> str:
        """The text of `tokens`; U+FFFD for bytes that are not UTF-8, and for ids that only pad the
        vocabulary."""
        return self._bytes(tokens).decode("utf-8", "replace")

    def chat(self, message: str) -> list[int]:
        """The token ids of a user's message in the model's chat template, up to where the assistant
        answers. Raises UnsupportedError if there is no template or it cannot be rendered."""
        path = self._folder / TEMPLATE_NAME
        if not path.is_file():
            raise UnsupportedError(f"{self._folder} has no {TEMPLATE_NAME}: give a plain prompt.")
        source = path.read_bytes()
        given = {
            "messages": [{"role": "user", "content": message}],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        try:
            text = _environment().from_string(source.decode()).render(self._named() | given)
        except Exception as error:  # a template is a program, which may raise anything
            reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".:")
            raise UnsupportedError(
                f"{path} cannot be rendered: {reason}; give a plain prompt."
            ) from None
        return self.encode(text, True)

    def printer(self, write: Callable[[str], object]) -> Callable[..., None]:
        """A function that takes tokens as they come and writes whole characters; if it is called
        with `last`, it also writes a character that was cut off."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")

        def tell(tokens: list[int], last: bool = False) -> None:
            write(decoder.decode(self._bytes(tokens), last))

        return tell

    def _bytes(self, tokens: list[int]) -> bytes:
        one = self._coder.decode_single_token_bytes
        return b"".join(one(t) if 0 <= t < self.vocabulary else _UNKNOWN for t in tokens)

    def _named(self) -> dict[str, str]:
        """bos_token and the like, by which templates refer to special tokens."""
        values = {key: v for key, v in self._config.items() if key.endswith("_token")}
        texts = {key: v.get("content") if isinstance(v, dict) else v for key, v in values.items()}
        return {key: text for key, text in texts.items() if isinstance(text, str)}


def _environment() -> "ImmutableSandboxedEnvironment":
    """An environment that renders chat templates as transformers does, but without its `generation`
    tag, which marks text for training."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: object) -> NoReturn:
        raise TemplateError(str(message))

    def to_json(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:  # jinja2's own escapes HTML
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Token → rank, from lines with a base64 token and its rank."""
    ranks: dict[bytes, int] = {}
    again = "the file is damaged or cut short, get it again"
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise CheckpointError(
                f"{path}: line {number} is {line!r:.60}, expected a base64 token and its rank:"
                f" {again}."
            ) from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(f"{path}: the ranks are not 0 to {len(ranks) - 1}: {again}.")
    absent = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if absent:
        raise CheckpointError(
            f"{path} has no token for {len(absent)} of the 256 bytes, {absent[0]:#04x} for one:"
            f" {again}."
        )
    return ranks


def _specials(path: Path, config: dict[str, Any], first: int) -> dict[str, int]:
    named = config.get("added_tokens_decoder", {})
    if not isinstance(named, dict):
        raise CheckpointError(f"{path}: added_tokens_decoder is not an object.")
    end = first + SPECIALS
    names = {str(token): f"<|reserved_token_{token}|>" for token in range(first, end)}
    for token, entry in named.items():
        name = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not name:
            raise CheckpointError(f"{path}: token {token:.20} is {name!r:.60}, expected a text.")
        if token not in names:
            raise CheckpointError(
                f"{path} names {name!r:.60} token {token:.20}, but the {first} ranks of"
                f" {RANKS_NAME} put the special tokens at {first} to {end - 1}: one of the files is"
                " cut short or another model's, get both again."
            )
        names[token] = name
    specials = {name: int(token) for token, name in names.items()}
    if len(specials) < SPECIALS:
        raise CheckpointError(
            f"{path}: two tokens of added_tokens_decoder have the same name: get the file again."
        )
    return specials
