"""What is tried: each target changes one of the folders, calls the product, puts nothing back."""

from collections.abc import Callable
from random import Random
from typing import Any

from fuzz import consistent, headers, hostile
from fuzz.folders import (
    CONFIG,
    INDEX,
    MANIFEST,
    TOKENIZER,
    Folder,
    World,
    manifest,
    put_header,
    put_signed,
    sign_file,
    split,
)

from kconvert.convert import inspect, prepare
from kconvert.convert.cli import text
from kconvert.convert.prepare import Options
from kconvert.layouts import header
from kconvert.runtime import config, rope, tokenizer
from kconvert.runtime.drafting import dflash_config as drafter_config
from kconvert.validate import validate

_BOMB = 1 / 2000  # of the cases that read JSON: a second each, where it is not refused by size
_BOMB_BYTES = (1 << 20, 8 << 20, 16 << 20, 32 << 20, 64 << 20, 99_000_000)

# Returns the sentences of what was found wrong; none where the case was accepted.
Target = Callable[[World, Random], list[str]]


def a_header(world: World, rng: Random) -> list[str]:
    """A shard's or a blob's header, in memory or as a file."""
    bomb = rng.random() < _BOMB
    if bomb:
        raw = headers.with_length(_bomb(rng))
        size = len(raw)
    else:
        raw, size = headers.change(*rng.choice(world.heads), rng)
    if bomb or rng.random() < 0.2:
        world.loose.put("x.safetensors", raw, size)
        found = header.read_header(world.loose.root / "x.safetensors")
    else:
        found = header.parse_header(raw, size, "x.safetensors")
    ends = [(t.start, t.start + t.nbytes) for t in found.tensors.values()]
    at = found.data_start
    for start, end in ends:
        assert start == at, "an accepted header does not tile its file"
        at = end
    return []


def model_config(world: World, rng: Random) -> list[str]:
    """config.json and generation_config.json as the runtime reads them."""
    folder = world.model
    if rng.random() < 0.1:
        _change_file(folder, "generation_config.json", rng)
    else:
        _change_file(folder, CONFIG, rng, consistent.change_config)
    read = config.read_config(folder.root)
    if read.rope_dim <= 4096:
        rope.frequencies(read.rope_dim, read.rope_theta, read.yarn)
    return []


def drafter(world: World, rng: Random) -> list[str]:
    """A drafter's config.json."""
    folder = world.drafter
    _change_file(folder, CONFIG, rng, consistent.change_drafter)
    read = drafter_config.DrafterConfig.read(folder.root, causal_windows=rng.random() < 0.5)
    read.shapes()
    if read.head_dim <= 4096:
        rope.frequencies(read.head_dim, read.rope_theta, read.yarn)
    read.check_target(drafter_config.TargetDims(256, 1280, 3))
    return []


def a_tokenizer(world: World, rng: Random) -> list[str]:
    """tiktoken.model and tokenizer_config.json."""
    folder = world.tokenizer
    if rng.random() < 0.3:
        raw = hostile.change_bytes(folder.files["tiktoken.model"][0], rng)
        folder.put("tiktoken.model", raw)
    else:
        _change_file(folder, TOKENIZER, rng)
    tokenizer.Tokenizer(folder.root)
    return []


def source(world: World, rng: Random) -> list[str]:
    """A checkpoint: `convert --dry-run` and `inspect` of it."""
    folder = world.source
    kind = rng.randrange(12)
    if kind <= 2:
        name = rng.choice(world.shards)
        put_header(folder, name, lambda head, size: headers.change(head, size, rng))
    elif kind <= 4:
        _change_file(folder, INDEX, rng, consistent.change_index)
    elif kind <= 6:
        _change_file(folder, CONFIG, rng, consistent.change_config)
    elif kind <= 10:
        consistent.change_checkpoint(folder, rng)
    else:
        name = rng.choice(list(folder.files))
        rng.choice((folder.remove, lambda n: folder.special(n, rng)))(name)
    if rng.random() < 0.2:
        _shown(text.inspection_text(inspect.inspect(folder.root)))
        return []
    options = Options(
        layout=rng.choice(("marlin", "w4a16")),
        tp=rng.choice((1, 2, 2, 4)),
        layers=rng.choice((None, None, [1], [0, 2])),
        text_only=rng.random() < 0.2,
    )
    prepared = prepare.prepare(folder.root, world.nowhere, options)
    assert not world.nowhere.exists(), "prepare wrote something"
    _shown(text.plan_text(text.plan_table(prepared)))
    return []


def other_formats(world: World, rng: Random) -> list[str]:
    """A checkpoint of another format or family: `convert --dry-run` and `inspect` of it."""
    folder = rng.choice(world.others)
    kind = rng.randrange(6)
    if kind <= 3:
        _change_file(folder, CONFIG, rng, consistent.change_other_config)
    elif kind == 4:
        name = next(name for name in folder.files if name.endswith(".safetensors"))
        put_header(folder, name, lambda head, size: headers.change(head, size, rng))
    if rng.random() < 0.2:
        _shown(text.inspection_text(inspect.inspect(folder.root)))
        return []
    options = Options(
        layout=rng.choice(("marlin", "w4a16")),
        tp=rng.choice((1, 2, 4)),
        scale_dtype=rng.choice((None, None, "bfloat16")),
    )
    prepared = prepare.prepare(folder.root, world.nowhere, options)
    _shown(text.plan_text(text.plan_table(prepared)))
    return []


def output(world: World, rng: Random) -> list[str]:
    """A conversion onto a changed output."""
    _change_output(world, rng)
    options = Options(tp=2, overwrite=rng.random() < 0.5)
    prepared = prepare.prepare(world.real, world.output.root, options)
    _shown(text.plan_text(text.plan_table(prepared)))
    return []


def validation(world: World, rng: Random) -> list[str]:
    """`validate` of a changed output; now and then against its source, which takes longer."""
    untrue = _change_output(world, rng)
    against = world.real if rng.random() < 0.05 else None
    result = validate(world.output.root, against, sample=1, workers=1)
    assert not (untrue and result.ok), "a changed output passed"
    _shown(text.validation_text(text.validation_table(result)))
    return [str(finding) for finding in result.findings]


def _bomb(rng: Random) -> bytes:
    return hostile.bomb(rng, rng.choice(_BOMB_BYTES))


def _shown(lines: str) -> None:
    """What a command prints must be printable, line by line."""
    wrong = next((line for line in lines.split("\n") if not line.isprintable()), None)
    assert wrong is None, f"a text that cannot be printed: {wrong!a:.200}"


def _change_file(
    folder: Folder,
    name: str,
    rng: Random,
    change: Callable[[bytes, Random], bytes] = hostile.change_text,
) -> None:
    if rng.random() < 0.01:
        folder.special(name, rng)
    elif rng.random() < _BOMB:
        folder.put(name, _bomb(rng))
    else:
        folder.put(name, change(folder.files[name][0], rng))


def _change_output(world: World, rng: Random) -> bool:
    """Change blobs, small files or the manifest. Often the manifest is made to agree, as a hostile
    author would: structure is all that can tell then. Whether `validate` must see the change."""
    folder = world.output
    kind = rng.randrange(12)
    if kind <= 3:
        put_signed(folder, _changed(manifest(folder), rng))
        return False
    if kind == 4:
        _change_file(folder, MANIFEST, rng)
        return False
    if kind == 5:
        name = rng.choice(list(folder.files))
        rng.choice((folder.remove, lambda n: folder.special(n, rng)))(name)
        return True
    if kind == 6:
        name = rng.choice((CONFIG, "generation_config.json"))
        change = consistent.change_config if name == CONFIG else hostile.change_text
        folder.put(name, change(folder.files[name][0], rng))
    else:
        name = rng.choice(world.blobs)
        change = consistent.change_blob if kind >= 9 else headers.change
        put_header(folder, name, lambda head, size: change(head, size, rng))
    signed = rng.random() < 0.7 and (folder.root / name).stat().st_size < 1 << 24
    if signed:
        table = manifest(folder)
        sign_file(folder, table, name)
        if rng.random() < 0.1:
            consistent.change_manifest(table, rng)
        put_signed(folder, table)
    return not signed and _differs(folder, name)


def _changed(table: dict[str, Any], rng: Random) -> dict[str, Any]:
    rng.choice((hostile.change_json, consistent.change_manifest))(table, rng)
    return table


def _differs(folder: Folder, name: str) -> bool:
    head, data, _ = split(folder, name)
    with open(folder.root / name, "rb") as file:
        return file.read(len(head) + 8) != (head + data)[: len(head) + 8]


# Names and shares of the cases.
TARGETS: dict[str, tuple[Target, float]] = {
    "header": (a_header, 40),
    "source": (source, 20),
    "other formats": (other_formats, 5),
    "model config": (model_config, 12),
    "drafter config": (drafter, 7),
    "output": (output, 6),
    "validate": (validation, 8),
    "tokenizer": (a_tokenizer, 2),
}
