"""`kconvert convert`, and `kconvert finish` of what its shares have made."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from kconvert.convert.cli.common import (
    CacheDir,
    DryRun,
    Json,
    Layers,
    LayoutName,
    Overwrite,
    Quiet,
    Ranks,
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
        LayoutName, typer.Option(help="The order of codes that the kernels read.")
    ] = "marlin",
    tp: Annotated[int, typer.Option(help="World size: ranks, one a GPU.")] = 1,
    ep: Annotated[int, typer.Option(help="Expert parallelism; divides tp.")] = 1,
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
        typer.Option(metavar="I/N", help="Only share I of N; given by torchrun and srun."),
    ] = None,
    shard: Annotated[str | None, typer.Option(hidden=True)] = None,  # what it was once called
    workers: Workers = None,
    text_only: Annotated[
        bool, typer.Option("--text-only", help="Leave the vision tower out.")
    ] = False,
    scale_dtype: Annotated[
        Literal["bfloat16"] | None,
        typer.Option(help="Cast the experts' scales, and say what is lost; kept if not given."),
    ] = None,
    verify: Verify = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compile a checkpoint into one folder of blobs a GPU.

    Several machines on one output: each runs the same command as its share, by --share or as a
    launcher says (RANK and WORLD_SIZE, or srun's variables).
    """
    from kconvert.convert.cli import text
    from kconvert.convert.output import publish
    from kconvert.convert.prepare import Options, prepare
    from kconvert.convert.run import run as carry_out
    from kconvert.convert.share import parse_share, share_of_launcher

    if not source:
        raise typer.BadParameter("it is empty", param_hint="SOURCE")
    if shard is not None:
        raise typer.BadParameter(f"it is called --share now: --share {shard}", param_hint="--shard")
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
    output: Annotated[Path, folder_argument("What shares have converted.")], as_json: Json = False
) -> None:
    """Write the manifest of an output whose shares have all ended."""
    from kconvert.convert.cli import text
    from kconvert.convert.run import finish as end

    show(text.finish_table(output, end(output)), as_json, text.finish_text, quiet=False)
