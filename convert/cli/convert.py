"""`kconvert convert`, and `kconvert finish` of what its shares have made."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from kconvert.convert.cli.common import (
    CacheDir,
    DryRun,
    Ep,
    Json,
    Layers,
    LayoutName,
    Overwrite,
    Quiet,
    Ranks,
    Tp,
    Verify,
    Workers,
    explained,
    folder_argument,
    numbers,
    reporting,
    show,
    to_stderr,
)


@explained
def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A checkpoint's folder, or its name (org/name, org/name@revision) or page on the"
            " Hub.",
        ),
    ],
    output: Annotated[Path, folder_argument("The folder to write; resumed if it is there.")],
    layout: Annotated[
        LayoutName, typer.Option(help="The order in which the kernels read codes.")
    ] = "marlin",
    tp: Tp = 1,
    ep: Ep = 1,
    layers: Layers = None,
    ranks: Ranks = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit on the Hub; main if not given.")
    ] = None,
    cache_dir: CacheDir = None,
    keep_shards: Annotated[
        bool, typer.Option("--keep-shards", help="Download into the cache; delete nothing.")
    ] = False,
    share: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Convert share I of N; torchrun and srun set it."),
    ] = None,
    workers: Workers = None,
    text_only: Annotated[
        bool, typer.Option("--text-only", help="Leave the vision tower out.")
    ] = False,
    scale_dtype: Annotated[
        Literal["bfloat16"] | None,
        typer.Option(
            help="Cast the experts' scales, and say how many were rounded; kept if not given."
        ),
    ] = None,
    verify: Verify = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compile a checkpoint into one folder of blobs for each GPU.

    The same command resumes a run that was interrupted. To use several machines on one output, run
    the same command on each with its --share, or under torchrun or srun.
    """
    from kconvert.convert.cli import text
    from kconvert.convert.output import publish
    from kconvert.convert.prepare import Options, prepare
    from kconvert.convert.run import run as carry_out
    from kconvert.convert.share import parse_share, share_of_launcher

    if not source:
        raise typer.BadParameter("it is empty", param_hint="SOURCE")
    options = Options(
        layout=layout,
        tp=tp,
        ep=ep,
        layers=numbers("--layers", layers),
        ranks=numbers("--ranks", ranks),
        text_only=text_only,
        overwrite=overwrite,
        workers=workers,
        revision=revision,
        cache_dir=cache_dir,
        keep_shards=keep_shards,
        share=share_of_launcher(os.environ) if share is None else parse_share(share),
        verify=verify,
        scale_dtype=scale_dtype,
    )
    if share is None and options.share:
        to_stderr(f"{options.share.name}, as the launcher says; --share 0/1 converts all")
    prepared = prepare(source, output, options)
    if dry_run:
        show(text.plan_table(prepared), as_json, text.plan_text, quiet)
        publish.check_space(output, prepared.disk)
        return
    with reporting(prepared.work, quiet) as meter:
        result = carry_out(prepared, meter)
    show(text.conversion_table(result), as_json, text.conversion_text, quiet)


@explained
def finish(
    output: Annotated[Path, folder_argument("The folder that the shares have written.")],
    as_json: Json = False,
) -> None:
    """Write the manifest of an output whose shares have all ended."""
    from kconvert.convert.cli import text
    from kconvert.convert.run import finish as end

    show(text.finish_table(output, end(output)), as_json, text.finish_text, quiet=False)
