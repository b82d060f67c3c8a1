"""A tokenizer in Kimi's style at a small size: byte-level BPE ranks, then 256 specials.

`tiktoken.model` holds one base64 token and its rank a line, as Kimi's does. Kimi's split pattern
uses `&&` class intersections, which Python's re refuses; PATTERN is plain, works in tiktoken and in
re alike, and stands under `pat_str` in tokenizer_config.json.
"""

import base64
import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

PATTERN = r" ?[A-Za-z]+|[0-9]{1,3}| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"
RANKS = 1024
SPECIALS = 256
VOCAB = RANKS + SPECIALS
# Kimi's names at Kimi's distances from the first special (its last two are [UNK] and [PAD]).
NAMED = {
    0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>",
    6: "<|start_header_id|>", 7: "<|end_header_id|>", 9: "[EOT]", 10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>", 12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>", 14: "<|tool_call_argument_begin|>", 15: "<|tool_call_end|>",
    17: "<|im_middle|>", 18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>",
    21: "<|media_pad|>", 22: "<think>", 23: "</think>", 254: "[UNK]", 255: "[PAD]",
}  # fmt: skip
SPECIAL_IDS = {NAMED.get(i, f"<|reserved_token_{RANKS + i}|>"): RANKS + i for i in range(SPECIALS)}
BOS, EOS, IM_END = (SPECIAL_IDS[name] for name in ("[BOS]", "[EOS]", "<|im_end|>"))
MASK, PAD = SPECIAL_IDS["[UNK]"], SPECIAL_IDS["[PAD]"]

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- set role = message['role'] -%}
{%- if role == 'user' -%}
<|im_user|>{{ message.get('name') or 'user' }}<|im_middle|>
{%- elif role == 'assistant' -%}
<|im_assistant|>{{ message.get('name') or 'assistant' }}<|im_middle|><think></think>
{%- else -%}
<|im_system|>{{ message.get('name') or role }}<|im_middle|>
{%- endif -%}
{{ message['content'] }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_assistant|>assistant<|im_middle|>
{%- if thinking is defined and thinking is false -%}
<think></think>
{%- else -%}
<think>
{%- endif -%}
{%- endif -%}
"""


class Tokenizer:
    """Encodes and decodes with the ranks alone; tiktoken gives the same ids (evaluate.py asks)."""

    def __init__(self, ranks: dict[bytes, int]) -> None:
        self.ranks = ranks
        self._bytes = {rank: token for token, rank in ranks.items()}
        self._bytes |= {i: name.encode() for name, i in SPECIAL_IDS.items()}
        self._words: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for word in re.findall(PATTERN, text):
            if word not in self._words:
                self._words[word] = self._merge(word.encode())
            ids += self._words[word]
        return ids

    def decode(self, ids: list[int]) -> str:
        return b"".join(self._bytes[i] for i in ids).decode(errors="replace")

    def _merge(self, word: bytes) -> list[int]:
        parts = [bytes([b]) for b in word]
        while len(parts) > 1:
            pairs = [self.ranks.get(a + b, RANKS) for a, b in pairwise(parts)]
            best = min(pairs)
            if best == RANKS:
                break
            i = pairs.index(best)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return [self.ranks[part] for part in parts]


def train(text: str) -> dict[bytes, int]:
    """Byte-pair encoding: merge the most frequent pair until RANKS tokens are named."""
    counts = Counter(re.findall(PATTERN, text))
    words = {word: [bytes([b]) for b in word.encode()] for word in counts}
    ranks = {bytes([b]): b for b in range(256)}
    pairs: Counter[tuple[bytes, bytes]] = Counter()
    where: dict[tuple[bytes, bytes], set[str]] = {}
    for word, parts in words.items():
        for pair in pairwise(parts):
            pairs[pair] += counts[word]
            where.setdefault(pair, set()).add(word)
    while len(ranks) < RANKS:
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        if (token := best[0] + best[1]) not in ranks:
            ranks[token] = len(ranks)
        for word in sorted(where.pop(best)):
            parts = words[word]
            for pair in pairwise(parts):
                pairs[pair] -= counts[word]
            i = 0
            while i < len(parts) - 1:
                if (parts[i], parts[i + 1]) == best:
                    parts[i : i + 2] = [token]
                i += 1
            for pair in pairwise(parts):
                pairs[pair] += counts[word]
                where.setdefault(pair, set()).add(word)
        del pairs[best]
    return ranks


def write(ranks: dict[bytes, int], folder: Path) -> None:
    """tiktoken.model, tokenizer_config.json and chat_template.jinja."""
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_text("".join(lines))
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    named = {RANKS + i: {"content": name, **flags, "special": True} for i, name in NAMED.items()}
    config = {
        "added_tokens_decoder": named,
        "additional_special_tokens": [name for i, name in NAMED.items() if 2 <= i < 254],
        "bos_token": "[BOS]", "clean_up_tokenization_spaces": False, "eos_token": "[EOS]",
        "model_max_length": 1 << 18, "pad_token": "[PAD]", "pat_str": PATTERN,
        "tokenizer_class": "TikTokenTokenizer", "unk_token": "[UNK]",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def read(folder: Path) -> Tokenizer:
    lines = (folder / "tiktoken.model").read_text().splitlines()
    return Tokenizer({base64.b64decode(line.split()[0]): int(line.split()[1]) for line in lines})
