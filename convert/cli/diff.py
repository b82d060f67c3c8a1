"""`kconvert diff`."""

from pathlib import Path
from typing import Annotated

import typer

from kconvert.convert.cli.common import (
    Json,
    Quiet,
    Report,
    Workers,
    check_report,
    explained,
    folder_argument,
    progress_bar,
    show,
)


@explained
def diff(
    a: Annotated[Path, folder_argument("A checkpoint or a converted folder.", "A")],
    b: Annotated[Path, folder_argument("Another, of any layout, tp and ep.", "B")],
    report: Report = None,
    workers: Workers = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare two models by what they mean: which layers and experts differ, and how much.

    Exits with 1 if anything differs.
    """
    from kconvert.convert.cli import diff_text
    from kconvert.validate.diff import diff as compare

    check_report(report)
    with progress_bar("diff", quiet) as progress:
        result = compare(a, b, workers, progress)
    if report is not None:
        from kconvert.validate.report.diff import write_diff_report

        write_diff_report(result, report)
    show(diff_text.diff_table(result), as_json, diff_text.diff_text, quiet)
    if not result.equal:
        raise typer.Exit(1)
