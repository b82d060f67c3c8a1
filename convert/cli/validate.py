"""`kconvert validate`."""

from pathlib import Path
from typing import Annotated

import typer

from kconvert.convert.cli.common import (
    CacheDir,
    Json,
    Quiet,
    Report,
    Verify,
    Workers,
    check_report,
    explained,
    folder,
    folder_argument,
    progress_bar,
    show,
)


@explained
def validate(
    output: Annotated[Path, folder_argument("A converted folder.")],
    source: Annotated[
        str | None,
        typer.Option(help="The checkpoint it was made from: a folder, or its name on the Hub."),
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(min=1, help="How many experts of each layer to check; all if not given."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed to draw them with; random if not given.")
    ] = None,
    report: Report = None,
    verify: Verify = False,
    revision: Annotated[
        str | None, typer.Option(help="On the Hub; the commit that the output names if not given.")
    ] = None,
    cache_dir: CacheDir = None,
    work_dir: Annotated[
        Path | None,
        typer.Option(parser=folder, help="Where shards are downloaded to; the cache if not given."),
    ] = None,
    workers: Workers = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check an output: structure, digests, and codes and scales equal to the source's.

    Exits with 1 if anything differs.
    """
    from kconvert.convert.cli import text
    from kconvert.convert.source import hub_name
    from kconvert.validate import validate as check

    check_report(report)
    if source == "":
        raise typer.BadParameter("it is empty", param_hint="--source")
    with (
        progress_bar("download", quiet or not source or not hub_name(source)) as downloaded,
        progress_bar("validate", quiet) as progress,
    ):
        result = check(
            output, source, sample=sample, seed=seed, verify=verify, revision=revision,
            cache_dir=cache_dir, work_dir=work_dir, workers=workers, progress=progress,
            downloaded=downloaded,
        )  # fmt: skip
    if report is not None:
        from kconvert.validate.report.write import write_report

        write_report(result, output, report)
    show(text.validation_table(result), as_json, text.validation_text, quiet)
    if not result.ok:
        raise typer.Exit(1)
