"""Changes of an output or of its source, one at a time, and what validate has to say of each.

A change that alters a value must be found and named, without the source by digests, with it by
what is meant; one that leaves every value as it was must not be.
"""

import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from kit import DATA, KIMI_MINI, forge
from mutate.places import Place, place_in_blob, places_in_source

from kconvert.convert import convert
from kconvert.layouts.blob import PAGE, digest
from kconvert.layouts.checkpoint import read_checkpoint
from kconvert.layouts.errors import KconvertError
from kconvert.layouts.header import read_header
from kconvert.layouts.manifest import encode_manifest, read_manifest
from kconvert.layouts.model import read_model
from kconvert.validate import validate
from kconvert.validate.findings import Finding

MANIFEST = "kconvert.json"
# A checkpoint of every format, and the layout it is converted to.
SOURCES = (
    (KIMI_MINI, "marlin"),
    (DATA / "formats/mixtral-int8-channel", "marlin"),
    (DATA / "formats/deepseek-v3-int4-asym-g32", "marlin"),
    (DATA / "formats/qwen3-moe-mxfp4", "marlin"),
    (DATA / "formats/mixtral-gptq-v2-asym-g32", "w4a16"),
    (DATA / "formats/gpt-oss-mxfp4", "w4a16"),
)
_VALUES = ("codes", "scales", "zero-points", "biases", "common")
_EQUAL = "equal"  # no finding is expected


class Change(NamedTuple):
    """What was done: the file that has to be named, whether the source is needed to see it, and
    the checks of which one must fail; `refused`: the input itself may be refused instead. Where
    values were changed, the findings name the `places`, each of them and no other."""

    file: str
    with_source: bool
    checks: tuple[str, ...]
    refused: bool = False
    places: frozenset[Place] = frozenset()


@dataclass
class World:
    """An output and the source it was made from, to be changed and put back."""

    source: Path
    output: Path

    def blobs(self) -> list[str]:
        return sorted(p.relative_to(self.output).as_posix()
                      for p in self.output.rglob("*.safetensors"))  # fmt: skip

    def small_files(self) -> list[str]:
        return sorted(p.name for p in self.output.iterdir() if p.is_file() and p.name != MANIFEST)

    def shards(self) -> list[str]:
        return sorted(path.name for path in self.source.glob("*.safetensors"))


def made_world(folder: Path, checkpoint: Path = KIMI_MINI, layout: str = "marlin") -> World:
    source = Path(shutil.copytree(checkpoint, folder / "source"))
    (source / "NOTICE.txt").write_text("Some checkpoints have no small file but config.json.")
    convert(source, folder / "out", layout=layout, tp=2, ep=2)
    return World(source, folder / "out")


def _flip(path: Path, first: int, end: int, draw: random.Random) -> int:
    """One bit; → where."""
    raw, at = bytearray(path.read_bytes()), draw.randrange(first, end)
    raw[at] ^= 1 << draw.randrange(8)
    path.write_bytes(raw)
    return at


def blob_data(world: World, draw: random.Random) -> Change:
    name = draw.choice(world.blobs())
    path = world.output / name
    at = _flip(path, read_header(path).data_start, path.stat().st_size, draw)
    return Change(name, False, ("digests",), places=frozenset([place_in_blob(path, at)]))


def forged_data(world: World, draw: random.Random) -> Change:
    """With digests that agree, as a converter with a fault would make them."""
    change = blob_data(world, draw)
    forge(world.output, change.file)
    return change._replace(with_source=True, checks=_VALUES, refused=True)


def swapped_experts(world: World, draw: random.Random) -> Change:
    name = draw.choice([name for name in world.blobs() if name.startswith("rank-")])
    path = world.output / name
    tensor = draw.choice([*read_header(path).tensors.values()])
    size, (one, other) = tensor.nbytes // tensor.shape[0], draw.sample(range(tensor.shape[0]), 2)
    raw = bytearray(path.read_bytes())
    a, b = (slice(tensor.start + i * size, tensor.start + (i + 1) * size) for i in (one, other))
    raw[a], raw[b] = raw[b], raw[a]
    path.write_bytes(raw)
    forge(world.output, name)
    places = frozenset(place_in_blob(path, one.start) for one in (a, b))
    return Change(name, True, _VALUES, places=places)


def blob_header(world: World, draw: random.Random) -> Change:
    name = draw.choice(world.blobs())
    path = world.output / name
    _flip(path, 0, read_header(path).data_start, draw)
    return Change(name, False, ("headers",))


def blob_spaces(world: World, draw: random.Random) -> Change:
    """A header that says the same with other spaces, under a manifest that knows of it."""
    name = draw.choice(world.blobs())
    path = world.output / name
    raw, header = path.read_bytes(), read_header(path)
    text = json.dumps(json.loads(header.raw[8:]), indent=draw.choice([None, 1, 3]))
    text += " " * (-(8 + len(text.encode())) % PAGE + PAGE * draw.randrange(2))
    new = len(text.encode()).to_bytes(8, "little") + text.encode()
    path.write_bytes(new + raw[header.data_start :])
    manifest = read_manifest(world.output)
    entry = replace(manifest.files[name], bytes=path.stat().st_size, digest=digest(new))
    signed = encode_manifest(replace(manifest, files={**manifest.files, name: entry}))
    (world.output / MANIFEST).write_bytes(signed)
    return Change(name, draw.random() < 0.5, (_EQUAL,))


def small_file(world: World, draw: random.Random) -> Change:
    name = draw.choice(world.small_files())
    path = world.output / name
    _flip(path, 0, path.stat().st_size, draw)
    return Change(name, False, ("files",))


def manifest_value(world: World, draw: random.Random) -> Change:
    path = world.output / MANIFEST
    table = json.loads(path.read_text())
    entry = table["files"][draw.choice([*table["files"]])]
    key = draw.choice(sorted(entry))
    value = entry[key]
    entry[key] = value + 1 if isinstance(value, int) else f"0{value}"
    path.write_text(json.dumps(table, indent=1))
    return Change(MANIFEST, False, (), refused=True)


def manifest_spaces(world: World, draw: random.Random) -> Change:
    path = world.output / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()), indent=draw.randrange(2, 9)))
    return Change(MANIFEST, False, (_EQUAL,))


def lost_end(world: World, draw: random.Random) -> Change:
    name = draw.choice(world.blobs())
    path = world.output / name
    path.write_bytes(path.read_bytes()[: -draw.randrange(1, 5000)])
    return Change(name, False, ("files", "headers"))


def lost_file(world: World, draw: random.Random) -> Change:
    name = draw.choice(world.blobs() + world.small_files())
    (world.output / name).unlink()
    return Change(name, False, ("files",))


def other_rank(world: World, draw: random.Random) -> Change:
    """One rank's blob in the other's place."""
    name = draw.choice([name for name in world.blobs() if name.startswith("rank-00000")])
    other = world.output / name.replace("rank-00000", "rank-00001", 1)
    other.write_bytes((world.output / name).read_bytes())
    return Change(other.relative_to(world.output).as_posix(), False, ("headers",))


def stray_weights(world: World, draw: random.Random) -> Change:
    name = f"common/layer-{draw.randrange(100, 999):05}.safetensors"
    (world.output / name).write_bytes(b"0" * 10)
    return Change(name, False, ("files",))


def source_data(world: World, draw: random.Random) -> Change:
    name = draw.choice(world.shards())
    path, model = world.source / name, read_model(read_checkpoint(world.source))
    at = _flip(path, read_header(path).data_start, path.stat().st_size, draw)
    return Change("", True, _VALUES, True, places_in_source(model, name, at, at + 1))


def source_names(world: World, draw: random.Random) -> Change:
    """Two tensors of a kind have each other's name in a shard's header."""
    name = draw.choice(world.shards())
    path, model = world.source / name, read_model(read_checkpoint(world.source))
    raw, header = path.read_bytes(), read_header(path)
    data = {t.name: raw[t.start : t.start + t.nbytes] for t in header.tensors.values()}
    pairs = [
        (a, b)
        for a, b in combinations(header.tensors.values(), 2)
        if (a.dtype, a.shape) == (b.dtype, b.shape) and data[a.name] != data[b.name]
    ]
    if not pairs:
        return source_data(world, draw)
    one, other = draw.choice(pairs)
    swapped = (
        header.raw[8:].replace(json.dumps(one.name).encode(), b'"\0"')
        .replace(json.dumps(other.name).encode(), json.dumps(one.name).encode())
        .replace(b'"\0"', json.dumps(other.name).encode())
    )  # fmt: skip
    path.write_bytes(header.raw[:8] + swapped + raw[header.data_start :])
    places = frozenset().union(*(
        places_in_source(model, name, tensor.start, tensor.start + tensor.nbytes)
        for tensor in (one, other)
    ))  # fmt: skip
    return Change("", True, _VALUES, True, places)


def source_small_file(world: World, draw: random.Random) -> Change:
    """Gone from the source, or changed there."""
    name = draw.choice([name for name in world.small_files() if name != "config.json"])
    if draw.random() < 0.5:
        (world.source / name).unlink()
    else:
        _flip(world.source / name, 0, (world.source / name).stat().st_size, draw)
    return Change(name, True, ("source-files",), refused=True)


def source_spaces(world: World, draw: random.Random) -> Change:
    """A header that says the same in more bytes."""
    path = world.source / draw.choice(world.shards())
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    spaces = b" " * draw.randrange(1, 100)
    grown = (size + len(spaces)).to_bytes(8, "little")
    path.write_bytes(grown + raw[8 : 8 + size] + spaces + raw[8 + size :])
    return Change("", True, (_EQUAL,))


MUTATIONS: tuple[Callable[[World, random.Random], Change], ...] = (
    blob_data, forged_data, swapped_experts, blob_header, small_file, manifest_value,
    manifest_spaces, lost_end, lost_file, other_rank, stray_weights, source_data, source_small_file,
    source_spaces, source_names, blob_spaces,
)  # fmt: skip


def mutate(
    count: int, seed: int, folder: Path, progress: Callable[[int], None] = lambda _: None
) -> dict[str, Any]:
    """Make `count` changes in turn, each of a checkpoint of every format in turn, and validate
    after each."""
    begun = time.monotonic()
    seen: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for turn, (checkpoint, layout) in enumerate(SOURCES):
        world = made_world(folder / checkpoint.name, checkpoint, layout)
        kept = {path: path.read_bytes() for root in (world.source, world.output)
                for path in root.rglob("*") if path.is_file()}  # fmt: skip
        for number in range(turn, count, len(SOURCES)):
            draw = random.Random(f"{seed} {number}")
            mutation = MUTATIONS[number // len(SOURCES) % len(MUTATIONS)]
            wrong = judge(world, mutation(world, draw))
            seen[mutation.__name__] += 1
            if wrong:
                where = f"{mutation.__name__}, {checkpoint.name}, seed {seed}, number {number}"
                failures[f"{where}: {wrong}"] += 1
            restore(world, kept)
        progress(sum(seen.values()))
    return {
        "what": "mutate", "count": count, "seed": seed, "by_kind": dict(seen),
        "checkpoints": [checkpoint.name for checkpoint, _ in SOURCES],
        "failures": dict(failures), "seconds": round(time.monotonic() - begun, 1),
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def judge(world: World, change: Change) -> str | None:
    """What is wrong with what validate says of a change."""
    try:
        result = validate(world.output, world.source if change.with_source else None)
    except KconvertError as error:
        named = change.file in str(error) and _named_in(str(error), change.places)
        return None if change.refused and named else f"refused: {error}"
    if change.checks == (_EQUAL,):
        return None if result.ok else f"not equal: {result.findings[0]}"
    if result.ok:
        return "it was not found"
    first = result.findings[0]
    if change.file and not any(finding.file == change.file for finding in result.findings):
        return f"another file was named: {first}"
    if not any(finding.check in change.checks for finding in result.findings):
        return f"by another check, {first.check}: {first}"
    return _misplaced(result.findings, change.places) if change.places else None


def _named_in(sentence: str, places: frozenset[Place]) -> bool:
    return not places or any(place.name in sentence for place in places)


def _misplaced(findings: list[Finding], places: frozenset[Place]) -> str | None:
    """A finding that names another place, or a place that none names."""
    for finding in findings:
        if not any(place.named_by(finding) for place in places):
            return f"another place was named: {finding}"
    missed = [place for place in places if not any(map(place.named_by, findings))]
    return f"not named: {missed[0]}" if missed else None


def restore(world: World, kept: dict[Path, bytes]) -> None:
    for root in (world.source, world.output):
        for path in [path for path in root.rglob("*") if path.is_file()]:
            if path not in kept:
                path.unlink()
    for path, content in kept.items():
        if not path.is_file() or path.read_bytes() != content:
            path.write_bytes(content)
