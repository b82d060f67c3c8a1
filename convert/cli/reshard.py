"""`kconvert reshard`."""

from pathlib import Path
from typing import Annotated

import typer

from kconvert.convert.cli.common import (
    DryRun,
    Ep,
    Json,
    LayoutName,
    Overwrite,
    Quiet,
    Tp,
    Workers,
    explained,
    folder_argument,
    reporting,
    show,
)


@explained
def reshard(
    output: Annotated[Path, folder_argument("A converted folder.")],
    new: Annotated[Path, folder_argument("The folder to write; resumed if it is there.", "NEW")],
    tp: Tp,
    ep: Ep = 1,
    layout: Annotated[
        LayoutName | None, typer.Option(help="The order of codes; the same if not given.")
    ] = None,
    workers: Workers = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Convert an output for other ranks or another layout, without the source.

    NEW becomes what a conversion of the source would be, bit for bit. Files that both have in
    common are linked if the file system can do that.
    """
    from kconvert.convert.cli import text
    from kconvert.convert.output import publish
    from kconvert.convert.reshard import prepare_reshard
    from kconvert.convert.run import run

    prepared = prepare_reshard(
        output, new, layout=layout, tp=tp, ep=ep, overwrite=overwrite, workers=workers
    )
    if dry_run:
        show(text.plan_table(prepared), as_json, text.plan_text, quiet)
        publish.check_space(new, prepared.disk)
        return
    with reporting(prepared.work, quiet, "reshard") as meter:
        result = run(prepared, meter)
    show(text.conversion_table(result), as_json, text.conversion_text, quiet)
