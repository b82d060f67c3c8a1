"""One HTML file from a template beside this module: it needs no network and no script."""

import os
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup


class Picture(NamedTuple):
    """A picture with what it shows."""

    title: str
    image: Markup
    caption: str


def fill(template: str, **values: Any) -> str:
    """The page made from a template that extends page.html. All text in it is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters |= {"size": _size, "counted": counted}
    return environment.get_template(template).render(**values)


def write_whole(page: str, target: Path) -> None:
    """Write a page into a file, whole or not at all. Raises OSError as the system gives it."""
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        unfinished.write_text(page, encoding="utf-8")
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def made() -> str:
    """The program that makes a page, and the time."""
    return f"kconvert {version('kconvert')}, {time.strftime('%Y-%m-%d %H:%M %z')}."


def counted(count: int, what: str) -> str:
    """1 finding, 2 findings."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _size(nbytes: int) -> str:
    for unit, step in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= step:
            return f"{nbytes / step:.2f} {unit}"
    return f"{nbytes} B"
