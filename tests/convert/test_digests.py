"""The bytes of kimi-mini's conversions, committed: they change only when somebody means it to.

A change here orphans every output that users have. `python tests/convert/test_digests.py` writes
the file anew.
"""

import json
import tempfile
from pathlib import Path

import pytest
from kit import DATA, KIMI_MINI, tree

from kconvert.convert import convert
from kconvert.layouts.blob import digest

FILE = DATA / "kimi-mini-digests.json"
KINDS = [
    f"{layout} tp {tp} ep {ep}"
    for layout in ("marlin", "w4a16")
    for tp, ep in ((1, 1), (2, 1), (4, 2), (8, 8))
]


def digests(kind: str, folder: Path) -> dict[str, str]:
    layout, _, tp, _, ep = kind.split()
    convert(KIMI_MINI, folder, layout=layout, tp=int(tp), ep=int(ep))
    return {name: digest(data) for name, data in tree(folder).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_kimi_mini_has_the_committed_bytes(kind: str, tmp_path: Path) -> None:
    assert digests(kind, tmp_path / "out") == json.loads(FILE.read_text())[kind]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        table = {kind: digests(kind, Path(folder) / kind) for kind in KINDS}
    FILE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
