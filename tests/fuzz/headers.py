"""Changes to safetensors headers that know what the fields mean."""

import json
from math import prod
from random import Random
from typing import Any

from fuzz import hostile

from kconvert.layouts.header import DTYPE_BYTES

Table = dict[str, Any]
_DTYPES = tuple(DTYPE_BYTES)
_LENGTHS = (0, 1, 7, 8, 100_000_000, 100_000_001, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
_DIMS = (0, 1, 2, 3, 8, 32, 64, 128, 255, 256, 257, 512, 2**16, 2**20, 2**31, 2**62, 2**63 - 1)


def table_of(head: bytes) -> Table:
    """The JSON of a header that is whole."""
    return json.loads(head[8:])


def with_length(text: bytes) -> bytes:
    """A header's text behind its length."""
    return len(text).to_bytes(8, "little") + text


def data_bytes(table: Table) -> int:
    """What the tensors of a sound table take."""
    return max((t["data_offsets"][1] for n, t in table.items() if n != "__metadata__"), default=0)


def retile(table: Table) -> int:
    """Give every tensor offsets that fit dtype and shape, in the table's order; the sum."""
    at = 0
    for name, tensor in table.items():
        if name != "__metadata__":
            end = at + DTYPE_BYTES[tensor["dtype"]] * prod(tensor["shape"])
            tensor["data_offsets"], at = [at, end], end
    return at


def change(head: bytes, size: int, rng: Random) -> tuple[bytes, int]:
    """A header and its file's size → another header, and mostly the size that goes with it."""
    data = size - len(head)
    kind = rng.randrange(10)
    if kind == 0:
        raw = hostile.change_bytes(head, rng)
        return raw, rng.choice((size, max(0, size + len(raw) - len(head)), len(raw), 0, 2**40))
    if kind == 1:
        real = len(head) - 8
        length = rng.choice((*_LENGTHS, real - 1, real + 1, real + 8, size - 8, size - 7))
        return length.to_bytes(8, "little", signed=False) + head[8:], size
    if kind == 2:
        size = rng.choice((size - 1, size + 1, len(head), len(head) - 1, 8, 7, 0, 2 * size, 2**40))
        return head[:size], size
    if kind <= 5:
        raw = with_length(hostile.change_text(head[8:], rng))
        return raw, len(raw) + data
    table = table_of(head)
    for _ in range(rng.choice((1, 1, 2, 8))):
        rng.choice((_offsets, _shape, _dtypes, _rename, _drop, _extra, _metadata))(table, rng)
    if kind >= 8:
        if rng.random() < 0.3:
            _shuffle(table, rng)
        data = retile(table)
    raw = with_length(hostile.encode(table) + b" " * rng.choice((0, 0, 1, 7, 4096)))
    return raw, len(raw) + data


def _tensors(table: Table) -> list[str]:
    return [name for name in table if name != "__metadata__"]


def _offsets(table: Table, rng: Random) -> None:
    """Two tensors swapped, some moved, all moved."""
    names = _tensors(table)
    if not names:
        return
    one, other = table[rng.choice(names)], table[rng.choice(names)]
    kind = rng.randrange(4)
    if kind == 0:
        one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]
    elif kind == 1:
        one["data_offsets"] = list(other["data_offsets"])
    else:
        by = rng.choice((1, -1, 8, 4096, 2**32, 2**62, -(2**62)))
        for name in names if kind == 2 else names[rng.randrange(len(names)) :]:
            table[name]["data_offsets"] = [at + by for at in table[name]["data_offsets"]]


def _shape(table: Table, rng: Random) -> None:
    """Other sizes for one tensor or for all of a kind, with or without a size that stays."""
    names = _tensors(table)
    if not names:
        return
    name = rng.choice(names)
    kin = [n for n in names if n.rpartition(".")[2] == name.rpartition(".")[2]]
    shape = list(table[name]["shape"])
    kind = rng.randrange(5)
    if kind == 0:
        rng.shuffle(shape)
    elif kind == 1 and shape:
        shape[rng.randrange(len(shape))] = rng.choice(_DIMS)
    elif kind == 2:
        shape.insert(rng.randrange(len(shape) + 1), rng.choice((1, 1, 0, 2)))
    elif kind == 3:
        shape = [prod(shape)]
    else:
        shape = [rng.choice(_DIMS) for _ in range(rng.choice((0, 1, 2, 3, 16, 17)))]
    for each in kin if rng.random() < 0.4 else [name]:
        table[each]["shape"] = list(shape)


def _dtypes(table: Table, rng: Random) -> None:
    """Another dtype for one tensor or for all of one dtype."""
    names = _tensors(table)
    if not names:
        return
    name, new = rng.choice(names), rng.choice(_DTYPES)
    old = table[name]["dtype"]
    same_width = [d for d in _DTYPES if DTYPE_BYTES[d] == DTYPE_BYTES.get(old)]
    new = rng.choice((new, rng.choice(same_width or _DTYPES)))
    for each in names if rng.random() < 0.4 else [name]:
        if table[each]["dtype"] == old:
            table[each]["dtype"] = new


def rename(name: str, rng: Random) -> str:
    """Another name: of another layer, expert, projection, model, or of none."""
    return rng.choice((
        name.replace("layers.1.", f"layers.{rng.choice((0, 2, 3, 7, 99999, 100000))}."),
        name.replace("experts.0.", f"experts.{rng.choice((1, 8, 99, '00', '-1', 9999))}."),
        name.replace("gate", "up"),
        name.removeprefix("language_model."),
        f"language_model.{name}",
        f"vision_tower.{rng.choice(hostile.STRINGS)}",
        f"{name}{rng.choice(hostile.STRINGS)}",
        name.replace("weight_packed", "weight_zero_point"),
        name.replace("_packed", ""),
        rng.choice(hostile.STRINGS),
    ))  # fmt: skip


def _rename(table: Table, rng: Random) -> None:
    names = _tensors(table)
    if names:
        name = rng.choice(names)
        table[rename(name, rng)] = table.pop(name)


def _drop(table: Table, rng: Random) -> None:
    for name in _tensors(table):
        if rng.random() < 0.05:
            del table[name]


def _extra(table: Table, rng: Random) -> None:
    """Tensors more, without bytes mostly: thousands now and then."""
    for i in range(rng.choice((1, 1, 1, 10, 2000))):
        shape = rng.choice(([0], [0, 2**62], [1], []))
        name = rng.choice((f"vision_tower.{i}", f"model.layers.1.extra.{i}", f"x{i}"))
        table[name] = {"dtype": "U8", "shape": shape, "data_offsets": [0, int(prod(shape) > 0)]}


def _metadata(table: Table, rng: Random) -> None:
    """Metadata of other types; what kconvert says in it changed as the JSON that it is."""
    metadata = table.get("__metadata__")
    if not isinstance(metadata, dict) or rng.random() < 0.2:
        table["__metadata__"] = rng.choice((
            hostile.value(rng), {"format": "pt"}, {"": ""}, {rng.choice(hostile.STRINGS): "x"},
            {"kconvert": rng.choice(("", "{}", "[]", "null", "NaN", "[" * 5000))},
        ))  # fmt: skip
    elif isinstance(metadata.get("kconvert"), str):
        raw = hostile.change_text(metadata["kconvert"].encode(errors="replace"), rng)
        metadata["kconvert"] = raw.decode("utf-8", "replace")
    else:
        metadata[rng.choice(hostile.STRINGS)] = rng.choice(hostile.STRINGS)


def _shuffle(table: Table, rng: Random) -> None:
    items = list(table.items())
    rng.shuffle(items)
    table.clear()
    table.update(items)
