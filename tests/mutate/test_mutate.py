"""A small sample of `python -m mutate`, and proof that it would notice."""

from pathlib import Path

import pytest
from mutate import mutations
from mutate.mutations import MUTATIONS, SOURCES, Change, judge, made_world, mutate


def test_every_change_is_found_and_named(tmp_path: Path) -> None:
    seen = mutate(len(SOURCES) * len(MUTATIONS), 0, tmp_path)
    assert seen["failures"] == {}
    assert seen["by_kind"] == {mutation.__name__: len(SOURCES) for mutation in MUTATIONS}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (Change("config.json", False, ("files",)), "it was not found"),
        (Change("kconvert.json", False, (), refused=True), "it was not found"),
    ],
)
def test_it_notices_what_is_not_found(change: Change, says: str, tmp_path: Path) -> None:
    assert judge(made_world(tmp_path), change) == says


def test_it_notices_what_is_named_wrongly(tmp_path: Path) -> None:
    world = made_world(tmp_path)
    (world.output / "config.json").unlink()
    other = Change(mutations.MANIFEST, False, ("files",))
    assert str(judge(world, other)).startswith("another file was named: config.json")
    assert str(judge(world, Change("config.json", False, ("codes",)))).startswith("by another")
    assert str(judge(world, Change("config.json", False, ("equal",)))).startswith("not equal")
