"""`kconvert export`."""

from pathlib import Path
from typing import Annotated

from kconvert.convert.cli.common import (
    Json,
    Quiet,
    Workers,
    explained,
    folder_argument,
    reporting,
    show,
)


@explained
def export(
    output: Annotated[Path, folder_argument("A converted folder.")],
    new: Annotated[Path, folder_argument("The folder to write; resumed if it is there.", "NEW")],
    workers: Workers = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Turn an output back into the checkpoint, byte for byte.

    Every expert is compared with its digests on the way.
    """
    from kconvert.convert.cli import text
    from kconvert.convert.export import prepare_export, run_export

    prepared = prepare_export(output, new, workers)
    with reporting(prepared.work, quiet, "export") as meter:
        result = run_export(prepared, meter)
    show(text.export_table(result), as_json, text.export_text, quiet)
