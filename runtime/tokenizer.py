"""Kimi's tokenizer from its own files: tiktoken.model, tokenizer_config.json, chat template."""

import base64
import binascii
import codecs
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kconvert.layouts.checkpoint import read_json
from kconvert.layouts.errors import CheckpointError, UnsupportedError

RANKS_NAME = "tiktoken.model"
SPECIALS = 256
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
    """Text ↔ token ids. The 256 ids behind the ranks are specials; tokenizer_config.json names
    them, or they are `<|reserved_token_{id}|>`. Its `pat_str`, where it has one, replaces Kimi's
    split pattern."""

    def __init__(self, folder: Path) -> None:
        """Raises UnsupportedError where `folder` has no tiktoken.model, CheckpointError where its
        files are damaged."""
        import tiktoken

        path = folder / RANKS_NAME
        if not path.is_file():
            raise UnsupportedError(
                f"{folder} has no {RANKS_NAME}, so text cannot be read: give --tokens instead."
            )
        ranks = _read_ranks(path)
        config_path = folder / "tokenizer_config.json"
        config = read_json(config_path) if config_path.is_file() else {}
        self.specials = _specials(config, len(ranks))
        self.vocabulary = len(ranks) + SPECIALS
        self._template_path = folder / "chat_template.jinja"
        try:
            self._coder = tiktoken.Encoding(
                "kconvert", pat_str=config.get("pat_str", KIMI_PATTERN), mergeable_ranks=ranks,
                special_tokens=self.specials,
            )  # fmt: skip
        except (TypeError, ValueError) as error:  # a pattern or a name that is none
            raise CheckpointError(f"{folder} has no sound tokenizer: {error}.") from None

    def encode(self, text: str, specials: bool = False) -> list[int]:
        """Token ids; the specials' names are text unless `specials`."""
        return self._coder.encode(
            text, allowed_special="all" if specials else set(), disallowed_special=()
        )

    def decode(self, tokens: list[int]) -> str:
        """Text; bytes that are no UTF-8 are shown as replacement characters."""
        return self._coder.decode(tokens)

    def chat(self, message: str) -> list[int]:
        """A user's message in the model's chat template, up to where the assistant speaks."""
        import jinja2.sandbox

        if not self._template_path.is_file():
            raise UnsupportedError("there is no chat_template.jinja: give a plain prompt.")
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment()
        template = environment.from_string(self._template_path.read_text("utf-8"))
        messages = [{"role": "user", "content": message}]
        return self.encode(template.render(messages=messages, add_generation_prompt=True), True)

    def printer(self, write: Callable[[str], object]) -> Callable[[list[int]], None]:
        """A function that is given tokens as they come and writes whole characters."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda tokens: write(decoder.decode(self._coder.decode_bytes(tokens))) and None


def _read_ranks(path: Path) -> dict[bytes, int]:
    """One base64 token and its rank a line."""
    try:
        lines = (line.split() for line in path.read_bytes().splitlines() if line)
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (ValueError, binascii.Error) as error:
        raise CheckpointError(
            f"{path} is not a list of base64 tokens and ranks: {error}."
        ) from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(f"{path}: the ranks are not 0 to {len(ranks) - 1}.")
    return ranks


def _specials(config: dict[str, Any], first: int) -> dict[str, int]:
    named = config.get("added_tokens_decoder", {})
    if not isinstance(named, dict):
        raise CheckpointError("tokenizer_config.json: added_tokens_decoder is not an object.")
    specials = {}
    for token in range(first, first + SPECIALS):
        entry = named.get(str(token))
        name = entry.get("content") if isinstance(entry, dict) else None
        if name is not None and not isinstance(name, str):
            raise CheckpointError(f"tokenizer_config.json: token {token} is {name!r:.60}, no text.")
        specials[name or f"<|reserved_token_{token}|>"] = token
    return specials
