"""`kconvert doctor`."""

from pathlib import Path
from typing import Annotated

import typer

from kconvert.convert.cli.common import (
    CacheDir,
    Json,
    explained,
    folder_argument,
    show,
)


@explained
def doctor(
    output: Annotated[Path, folder_argument("Where an output would go.", "FOLDER")] = Path("."),
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Say what this machine has, what would limit converting K2.6 here, and how long that takes.

    Measures for some seconds, and writes 256 MiB to the output's disk and to the cache's. Exits
    with 1 if there are problems.
    """
    from kconvert.convert.doctor.diagnose import diagnose, doctor_text

    table = diagnose(output, cache_dir)
    show(table, as_json, doctor_text, quiet=False)
    if table["problems"]:
        raise typer.Exit(1)
