"""The same output whatever came before: after any commands the files are those of a conversion into
a new folder, or the last command is refused and has touched nothing."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kit import copy_mini, load, tree, write

from kconvert.convert import convert
from kconvert.convert.run import finish
from kconvert.convert.share import Share
from kconvert.layouts.errors import KconvertError
from kconvert.layouts.manifest import MANIFEST_NAME, encode_manifest, read_manifest

VISION = "common/vision.safetensors"
FOREIGN = {"notes.txt": b"mine", "common/notes.txt": b"mine too", ".hidden": b""}
TARGETS = [("marlin", 2, 1), ("marlin", 1, 1), ("w4a16", 2, 2)]
LAYER2 = "model-00003-of-000006.safetensors"


class KilledError(BaseException):
    """Nothing more reaches the disk."""


class Command(NamedTuple):
    source: str
    target: tuple[str, int, int]  # layout, tp, ep
    text_only: bool = False
    layers: tuple[int, ...] | None = None
    ranks: tuple[int, ...] | None = None
    share: Share | None = None
    overwrite: bool = False
    killed_at: int | None = None  # the number of a change to the disk

    def run(self, sources: dict[str, Path], out: Path) -> Any:
        layout, tp, ep = self.target
        return convert(
            sources[self.source], out, layout=layout, tp=tp, ep=ep, text_only=self.text_only,
            layers=self.layers, ranks=self.ranks, share=self.share, overwrite=self.overwrite,
        )  # fmt: skip

    @property
    def whole(self) -> bool:
        return self.layers is None and self.ranks is None and self.share is None


@st.composite
def commands(draw: st.DrawFn) -> Command:
    target = draw(st.sampled_from([TARGETS[0]] * 4 + TARGETS))
    part = draw(st.sampled_from(["whole", "whole", "layers", "ranks", "share"]))
    return Command(
        source=draw(st.sampled_from(["A", "A", "B", "C", "D"])),
        target=target,
        text_only=draw(st.sampled_from([False, False, True])),
        layers=(draw(st.integers(0, 2)),) if part == "layers" else None,
        ranks=(draw(st.integers(0, target[1] - 1)),) if part == "ranks" else None,
        share=Share(draw(st.integers(0, 1)), 2) if part == "share" else None,
        overwrite=part != "share" and draw(st.booleans()),
        killed_at=draw(st.sampled_from([None, None, None, *range(1, 40, 3)])),
    )


class World:
    """The sources, and what each becomes in a new folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sources = {name: copy_mini(folder / name) for name in "ABCD"}
        for name in "ABD":
            (self.sources[name] / "chat_template.jinja").write_text("A's")
            (self.sources[name] / "tokenizer_config.json").write_text("{}")
        for shard in self.sources["B"].glob("*.safetensors"):  # other weights, A's small files
            tensors = load(shard)
            name = next(iter(tensors))
            write(shard, tensors | {name: tensors[name]._replace(data=tensors[name].data[::-1])})
        (self.sources["C"] / "tokenizer_config.json").write_text('{"of": "C"}')  # A's weights
        (self.sources["D"] / LAYER2).unlink()  # A, and a shard is missing
        self._fresh: dict[tuple[object, ...], dict[str, bytes]] = {}

    def fresh(self, command: Command, text_only: bool) -> dict[str, bytes]:
        source = "A" if command.source == "D" else command.source
        key = (source, command.target, text_only)
        if key not in self._fresh:
            out = self.folder / "fresh"
            Command(source, command.target, text_only).run(self.sources, out)
            self._fresh[key] = tree(out)
            shutil.rmtree(out)
        return self._fresh[key]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@contextmanager
def killed(at: int | None) -> Iterator[None]:
    """From change number `at` on, the file system is out of reach."""
    changes = 0

    def counting(real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal changes
            changes += 1
            if at is not None and changes >= at:
                raise KilledError
            return real(*args, **options)

        return call

    names = ("rename", "unlink", "rmdir", "mkdir", "ftruncate")
    with patch.multiple(os, **{name: counting(getattr(os, name)) for name in names}):
        yield


def check_manifest(out: Path) -> None:
    """It is nobody else's, and tells of nothing that is not there."""
    found = tree(out)
    if MANIFEST_NAME in found:
        manifest = read_manifest(out)
        assert encode_manifest(manifest) == found[MANIFEST_NAME]
        for name, entry in manifest.files.items():
            assert len(found[name]) == entry.bytes, name


def check_done(world: World, command: Command, result: Any, found: dict[str, bytes]) -> None:
    full, text = (world.fresh(command, text_only) for text_only in (False, True))
    if command.whole:
        assert found == (text if command.text_only else full)
        assert result.complete
        return
    if result.complete:
        assert found == (text if VISION not in found else full)
        assert not (command.text_only and VISION in found)
        return
    manifest = json.loads(found.pop(MANIFEST_NAME, b'{"files": {}, "complete": false}'))
    assert found.items() <= full.items()
    assert not manifest["complete"]
    if not command.share:
        entries = json.loads(full[MANIFEST_NAME])["files"]
        assert manifest["files"] == {name: entries[name] for name in sorted(found)}
        assert manifest["text_only"] is (command.text_only and VISION not in found)
    wanted = {
        name for name in full if name.endswith(".safetensors")
        and (command.layers is None or f"layer-{command.layers[0]:05}" in name)
        and (command.ranks is None or name.startswith(("common/", f"rank-{command.ranks[0]:05}")))
        and not (command.text_only and name == VISION)
    }  # fmt: skip
    if not command.share:
        assert wanted <= found.keys()


def go(world: World, sequence: list[Command], foreign: bool) -> None:
    out = world.folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    strange = FOREIGN if foreign else {}
    for name, content in strange.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(content)
    last = Command("C", TARGETS[0], overwrite=True)
    for command in [*sequence, last]:
        before = tree(out) if out.exists() else {}
        ours = {name: raw for name, raw in before.items() if name not in strange}
        try:
            with killed(command.killed_at):
                result = command.run(world.sources, out)
        except KilledError:
            pass
        except KconvertError:
            assert tree(out) == before if out.exists() else not before
            assert command != last
            # Not without a reason: something is here that must not stay, or a shard is missing.
            ours.pop(MANIFEST_NAME, None)
            same = ours.items() <= world.fresh(command, command.text_only).items()
            assert not same or command.source == "D" or command.share
        else:
            found = tree(out)
            for name, content in strange.items():
                assert found.pop(name) == content
            assert set(result.foreign) == strange.keys()
            check_done(world, command, result, found)
        if out.exists():
            check_manifest(out)
            with suppress(KconvertError):
                finish(out)
                check_finished(world, tree(out), strange)


def check_finished(world: World, found: dict[str, bytes], strange: dict[str, bytes]) -> None:
    """`finish` completes what is whole, or refuses."""
    found = {name: raw for name, raw in found.items() if name not in strange}
    wholes = (Command(source, target) for source in "ABC" for target in TARGETS)
    assert any(found == world.fresh(whole, text) for whole in wholes for text in (False, True))


WHOLE = Command("A", TARGETS[0])


@settings(
    max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)  # fmt: skip
@given(st.lists(commands(), min_size=2, max_size=5), st.booleans())
@example([WHOLE, WHOLE._replace(text_only=True)], False)
@example(
    [WHOLE._replace(text_only=True), WHOLE._replace(source="B", layers=(1,), overwrite=True)], False
)
@example([WHOLE._replace(source="B", layers=(2,)), WHOLE._replace(source="D")], False)
@example([WHOLE._replace(text_only=True), WHOLE._replace(killed_at=19)], False)
@example([WHOLE, WHOLE._replace(source="C"), WHOLE._replace(source="C", overwrite=True)], True)
def test_any_sequence(world: World, sequence: list[Command], foreign: bool) -> None:
    go(world, sequence, foreign)


@pytest.mark.parametrize(("source", "step"), [("B", 4), ("C", 1)])
def test_replaced_and_killed_anywhere(world: World, source: str, step: int) -> None:
    """What was to be removed is still known when the manifest that told of it is gone."""
    other = WHOLE._replace(source=source, overwrite=True)
    for at in range(1, 22, step):
        go(world, [WHOLE, other._replace(killed_at=at), other._replace(overwrite=False)], False)
