"""The text: the King James Bible, public domain, from Debian's package `sword-text-kjv`.

Debian main, licence "public-domain" (in the United Kingdom printing it is a royal prerogative).
Some chapters are held out: nothing of them is trained on.
"""

import random
import re
import struct
import subprocess
import zlib
from pathlib import Path
from typing import NamedTuple

PACKAGE = "sword-text-kjv"
_HELD_OUT_SHARE = 0.03


class Chapter(NamedTuple):
    """A chapter, its verses numbered."""

    book: str
    number: int
    verses: list[tuple[int, str]]

    @property
    def title(self) -> str:
        return f"{self.book} {self.number}"

    def text(self) -> str:
        lines = (f"{number} {verse}\n" for number, verse in self.verses)
        return f"{self.title}\n{''.join(lines)}\n"


def load(work: Path, seed: int) -> tuple[list[Chapter], list[Chapter]]:
    """Chapters to train on and chapters held out; fetches the package into `work` at need."""
    chapters = _chapters(_fetch(work))
    count = round(_HELD_OUT_SHARE * len(chapters))
    chosen = set(random.Random(seed).sample(range(len(chapters)), count))
    return (
        [c for i, c in enumerate(chapters) if i not in chosen],
        [c for i, c in enumerate(chapters) if i in chosen],
    )


def conversations(chapters: list[Chapter], count: int, seed: int) -> list[tuple[str, str]]:
    """(user, assistant) pairs: a verse, and the two to four verses that follow it."""
    rng = random.Random(seed)
    pairs = []
    while len(pairs) < count:
        verses = [verse for _, verse in rng.choice(chapters).verses]
        length = rng.randint(2, 4)
        if len(verses) > length:
            start = rng.randrange(len(verses) - length)
            pairs.append((verses[start], " ".join(verses[start + 1 : start + 1 + length])))
    return pairs


def _fetch(work: Path) -> Path:
    """The folder of the package's SWORD module, downloaded and unpacked by apt and dpkg."""
    folder = work / PACKAGE
    if not folder.exists():
        work.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", "-q", PACKAGE], cwd=work, check=True)
        (deb,) = work.glob(f"{PACKAGE}_*.deb")
        subprocess.run(["dpkg", "-x", deb, folder], check=True)
    (module,) = folder.glob("usr/share/sword/modules/texts/ztext/*")
    return module


def _chapters(module: Path) -> list[Chapter]:
    """Read a zText module: zlib blocks, one a book, and an entry for every verse in order.

    The entry of verse 0 opens a chapter; a verse's number is its distance from there.
    """
    chapters: list[Chapter] = []
    book, opened = "", 0
    for entries in (_entries(module, "ot"), _entries(module, "nt")):
        for i, entry in enumerate(entries):
            if name := re.search(r'n="([^"]*)" type="x-usfm-toc2"', entry):
                book = name[1]
            if start := re.search(r'<chapter [^>]*osisID="[^"]+\.(\d+)"', entry):
                chapters.append(Chapter(book, int(start[1]), []))
                opened = i
            elif chapters and (verse := _plain(entry)):
                chapters[-1].verses.append((i - opened, verse))
    return [chapter for chapter in chapters if chapter.verses]


def _entries(module: Path, testament: str) -> list[str]:
    zipped = (module / f"{testament}.bzz").read_bytes()
    blocks = [
        zlib.decompress(zipped[offset : offset + size])
        for offset, size, _ in struct.iter_unpack(
            "<III", (module / f"{testament}.bzs").read_bytes()
        )
    ]
    verses = struct.iter_unpack("<IIH", (module / f"{testament}.bzv").read_bytes())
    return [blocks[b][start : start + n].decode() if n else "" for b, start, n in verses]


def _plain(osis: str) -> str:
    """A verse without markup, footnotes and headings."""
    osis = osis.partition("<chapter eID=")[0]  # the last verse carries its book's back matter
    osis = re.sub(r"<note .*?</note>", " ", osis, flags=re.S)
    osis = re.sub(r"<title.*?</title>", " ", osis, flags=re.S)
    text = re.sub(r"<[^>]*>", "", osis).replace("¶", " ")
    for entity, sign in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&amp;", "&")):
        text = text.replace(entity, sign)
    return re.sub(r"\s+([,.;:?!])", r"\1", " ".join(text.split()))
