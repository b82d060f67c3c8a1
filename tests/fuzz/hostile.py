"""Hostile values, and changes to bytes and JSON that know nothing of what they mean."""

import json
import math
import re
from random import Random
from typing import Any

# Written as JSON these are what their names say: json.dumps refuses to write them itself.
BIG, DEEP = "@big@", "@deep {} {}@"
_DEPTHS = (20, 200, 2000, 100_000)
NUMBERS = (
    -1, 0, 1, 2, 3, 7, 8, 31, 32, 48, 63, 64, 100, 128, 1000, 4096, 10_000, 10_001, 65_537,
    2**31 - 1, 2**31, 2**31 + 1, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**18, 10**30,
    10**400, -(2**31), -(2**63), 0.5, 1.0, 2.0, -0.0, 1e-320, 1e308, -1e308,
    math.nan, math.inf, -math.inf,
)  # fmt: skip
STRINGS = (
    "", " ", "x", "0", "1", "../x", "/etc/passwd", "..", ".", "a/b", "a\\b", "a\0b", "a\nb",
    "a\r\nb", "\x1b[2J", "\u2028", "\u202e", "\ud800", "\udc80", "é", "🜁", "{", "{0}", "%s",
    "__metadata__", "x" * 300, "x" * 5000, "\n" * 50, "NaN", "null", "/dev/zero",
    "Traceback (most recent call last):", "(", "[z-a]", "(a{9999}){9999}", r"\p{X}",
)  # fmt: skip
_TOKENS = (
    b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\0", b"\xff", b"\xef\xbb\xbf", b"NaN", b"-",
    b"Infinity", b"1e999", b"\\ud800", b"\\u0000", b"\\n", b"null", b"true", b"0", b"9" * 40,
    b'"a":1,', b"{}", b"[]", b"[" * 300, b" " * 100, b"\n", b"//",
)  # fmt: skip


def value(rng: Random) -> Any:
    """Something that no field expects."""
    kind = rng.randrange(10)
    if kind < 4:
        return rng.choice(NUMBERS)
    if kind < 6:
        return rng.choice(STRINGS)
    if kind == 6:
        return rng.choice((None, True, False, BIG, BIG))
    if kind == 7:
        # What can just be read may be too deep to be shown: about Python's limit of 1,000.
        depth = rng.choice((*_DEPTHS, *[rng.randint(900, 1000)] * 12))
        return DEEP.format(rng.choice("[{"), depth)
    return rng.choice(([], {}, [[]], {"": None}, [0] * 20, [1, 2], list(range(2000)), [{}], ["x"]))


def encode(table: Any) -> bytes:
    """As JSON, with what json.dumps cannot write put in."""
    try:
        text = json.dumps(table, separators=(",", ":"))
    except RecursionError:  # what can just be read is too deep to be written
        return _deep("{", 2000).encode()
    if '"@' in text:
        text = text.replace(f'"{BIG}"', "9" * 5000)
        text = re.sub(r'"@deep (.) (\d+)@"', lambda m: _deep(m[1], int(m[2])), text)
    return text.encode()


def _deep(kind: str, depth: int) -> str:
    return "[" * depth + "]" * depth if kind == "[" else '{"a":' * depth + "1" + "}" * depth


def places(table: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value below `table`."""
    found, todo = [], [table]
    while todo:
        container = todo.pop()
        keys = container.keys() if isinstance(container, dict) else range(len(container))
        for key in keys:
            found.append((container, key))
            if isinstance(container[key], dict | list):
                todo.append(container[key])
    return found


def change_json(table: Any, rng: Random) -> None:
    """One change in place, anywhere; `table` is a dict or list of dicts and lists."""
    everywhere = places(table)
    if not everywhere:
        return
    container, key = rng.choice(everywhere)
    old = container[key]
    kind = rng.randrange(11)
    if kind <= 2:
        container[key] = value(rng)
    elif kind == 3:
        del container[key]
    elif kind == 4 and type(old) is int:
        container[key] = rng.choice((old + 1, old - 1, -old, 2 * old, old // 2, old << 32, ~old))
    elif kind == 5:
        container[key] = rng.choice(([old], {"a": old}, str(old)[:100], bool(old), None))
    elif kind == 6:
        other, where = rng.choice(everywhere)
        if where in other if isinstance(other, dict) else where < len(other):
            container[key] = json.loads(json.dumps(other[where]))
    elif kind == 7:
        same = list(container) if isinstance(container, dict) else range(len(container))
        other = rng.choice(same)
        container[key], container[other] = container[other], old
    elif kind == 8 and isinstance(container, dict):
        new = rng.choice((rng.choice(STRINGS), f"{key}x", rng.choice(list(container))))
        container[new] = container.pop(key)
    elif kind == 9 and isinstance(container, dict):
        container[rng.choice(STRINGS)] = value(rng)
    elif isinstance(old, int | float):
        container[key] = rng.choice(NUMBERS)
    else:
        container[key] = value(rng)


def change_bytes(raw: bytes, rng: Random) -> bytes:
    """Some bytes of `raw` flipped, cut, doubled or put in."""
    out = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(out) + 1)
        end = min(len(out), at + rng.choice((1, 2, 8, 64, 1024)))
        kind = rng.randrange(7)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(out):
            out[at] = rng.randrange(256)
        elif kind == 2:
            del out[at:end]
        elif kind == 3:
            out[at:at] = out[at:end]
        elif kind == 4:
            out[at:at] = rng.choice(_TOKENS)
        elif kind == 5:
            out[at:end] = rng.choice(_TOKENS)
        elif rng.random() < 0.3:
            del out[at:]
    return bytes(out)


def double_key(raw: bytes, rng: Random) -> bytes:
    """A key written twice: JSON allows it, and readers differ in which one they believe."""
    keys = list(re.finditer(rb'[{,]\s*("[^"\\]{1,200}"\s*:)', raw))
    if not keys:
        return raw
    found = rng.choice(keys)
    again = found[1] + encode(value(rng)) + b","
    return raw[: found.start(1)] + again + raw[found.start(1) :]


def bomb(rng: Random, size: int) -> bytes:
    """A JSON object of about `size` bytes that takes many times as many when it is read."""
    one = rng.choice((
        b"[],", b"{},", b'{"a":{}},', b'"ab",', b"1e9,", b"257,", b"[[[[[]]]]],", b'"\\u00e9",',
    ))  # fmt: skip
    if rng.random() < 0.2:  # keys, each another
        return b"".join((b"{", *(b'"%x":0,' % i for i in range(size // 50)), b'"end":0}'))
    return b"".join((b'{"x":[', one * (size // len(one)), b"0]}"))


def change_text(raw: bytes, rng: Random) -> bytes:
    """A JSON text changed: mostly its values, now and then its bytes."""
    kind = rng.randrange(8)
    if kind == 0:
        return change_bytes(raw, rng)
    if kind == 1:
        return double_key(raw, rng)
    try:
        table = json.loads(raw)
    except (ValueError, RecursionError):  # an earlier change saw to that
        return change_bytes(raw, rng)
    if not isinstance(table, dict | list):
        return encode(value(rng))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        change_json(table, rng)
    if kind == 2:
        return encode(rng.choice(([table], value(rng))))
    return encode(table)
