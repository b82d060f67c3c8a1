"""`kconvert inspect`."""

from typing import Annotated

import typer

from kconvert.convert.cli.common import (
    Json,
    explained,
    show,
    to_stderr,
)


@explained
def inspect(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A checkpoint, an output, a part or a file of either, or a checkpoint's name on"
            " the Hub.",
        ),
    ],
    tensors: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="Also list the tensors with such names: '*.norm.*'."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what a path is and what it holds.

    Exits with 2 if it is nothing that can be converted or run.
    """
    from kconvert.convert.cli import text
    from kconvert.convert.inspect import inspect as look

    if not path:
        raise typer.BadParameter("it is empty", param_hint="PATH")
    table = look(path, tensors)
    show(table, as_json, text.inspection_text, quiet=False)
    if table.get("refused"):
        to_stderr(f"kconvert: {table['refused']}")
        raise typer.Exit(2)
