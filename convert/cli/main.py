"""Every command, thin: options in, a call, a printed result. `bench` is in bench.py."""

import io
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from kconvert.convert.cli.bench import bench
from kconvert.convert.cli.common import (
    INTERRUPTED,
    Device,
    Dtype,
    IgnoreConfigKey,
    Json,
    Layers,
    Quiet,
    Ranks,
    Verify,
    Workers,
    draft_budget,
    explained,
    folder,
    folder_argument,
    interrupted,
    numbers,
    progress_bar,
    reporting,
    sentence_of,
    show,
    to_stderr,
    token_ids,
)
from kconvert.convert.cli.streams import hold_streams

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(bench, name="bench")


CacheDir = Annotated[
    Path | None, typer.Option(parser=folder, help="huggingface_hub's cache, if not its own.")
]


# As in kconvert.layouts.registry, convert.synth.presets and runtime.engine, which are not for
# `--help` to load.
LayoutName = Literal["marlin", "w4a16"]
Preset = Literal["k2.6", "kimi-mini"]
Mode = Literal["ar", "chain", "ddtree"]


def main() -> None:
    """The console script: `run`, and an end to all threads."""
    hold_streams()
    # Nothing here multiplies by numpy, and where its BLAS cannot start a thread for every core, it
    # interrupts the program.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        run()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        try:
            sys.stdout.flush()
        except OSError as error:  # a full disk: what was to be said is lost
            if not code:
                to_stderr(f"kconvert: {sentence_of(error)}")
                code = 3
        if code:
            sys.stderr.flush()
            # Threads may be waiting for a server that says nothing.
            os._exit(code)
        for sign in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sign, signal.SIG_IGN)  # all is done and said; Python may end in peace
        raise


def run() -> None:
    """The command line of `sys.argv`; ends in SystemExit."""
    signal.signal(signal.SIGTERM, _interrupt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may lack a character
    ended: int | str | None
    try:
        app(prog_name="kconvert")
    except KeyboardInterrupt:  # before typer was at work; afterwards it makes this of it:
        ended = INTERRUPTED
    except SystemExit as over:
        ended = over.code
    except OSError as error:  # typer's, of printing help
        to_stderr(f"kconvert: {sentence_of(error)}")
        ended = 3
    if ended == INTERRUPTED:
        to_stderr(f"kconvert: {interrupted()}")
    raise SystemExit(ended)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"kconvert {version('kconvert')}")
        raise typer.Exit


@app.callback()
def kconvert(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show it and exit."),
    ] = False,
) -> None:
    """Compile quantized MoE checkpoints into per-GPU blobs, offline, with a proof."""


@app.command()
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
    verify: Verify = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what another run wrote.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan; write nothing.")
    ] = False,
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


@app.command()
@explained
def finish(
    output: Annotated[Path, folder_argument("What shares have converted.")], as_json: Json = False
) -> None:
    """Write the manifest of an output whose shares have all ended."""
    from kconvert.convert.cli import text
    from kconvert.convert.run import finish as end

    show(text.finish_table(output, end(output)), as_json, text.finish_text, quiet=False)


@app.command()
@explained
def doctor(
    output: Annotated[Path, folder_argument("Where an output would go.")] = Path("."),
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Say what is here, and what would limit a conversion of K2.6 here, in hours.

    Measures for some seconds: writes 256 MiB to the output's disk and the cache's. Exits with 1
    where there are problems.
    """
    from kconvert.convert.doctor.diagnose import diagnose, doctor_text

    table = diagnose(output, cache_dir)
    show(table, as_json, doctor_text, quiet=False)
    if table["problems"]:
        raise typer.Exit(1)


@app.command()
@explained
def validate(
    output: Annotated[Path, folder_argument("A converted folder.")],
    source: Annotated[
        Path | None, typer.Option(parser=folder, help="The checkpoint it was made from.")
    ] = None,
    sample: Annotated[
        int | None, typer.Option(min=1, help="Only so many experts a layer; all if not given.")
    ] = None,
    verify: Verify = False,
    workers: Workers = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check an output: structure, digests, and codes and scales equal to the source's.

    Exits with 1 where anything differs.
    """
    from kconvert.convert.cli import text
    from kconvert.validate import validate as check

    with progress_bar("validate", None, quiet) as progress:
        result = check(
            output, source, sample=sample, verify=verify, workers=workers, progress=progress
        )
    show(text.validation_table(result), as_json, text.validation_text, quiet)
    if not result.ok:
        raise typer.Exit(1)


@app.command()
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
    as_json: Json = False,
) -> None:
    """Say what something is, and what it holds.

    Exits with 2 where it is nothing that can be converted or run.
    """
    from kconvert.convert.cli import text
    from kconvert.convert.inspect import inspect as look

    if not path:
        raise typer.BadParameter("it is empty", param_hint="PATH")
    table = look(path)
    show(table, as_json, text.inspection_text, quiet=False)
    if table.get("refused"):
        to_stderr(f"kconvert: {table['refused']}")
        raise typer.Exit(2)


@app.command()
@explained
def synth(
    output: Annotated[Path, folder_argument("An empty or new folder.")],
    preset: Annotated[Preset, typer.Option(help="Whose sizes it has.")] = "k2.6",
    layers: Layers = None,
    experts: Annotated[int | None, typer.Option(help="Routed experts a layer.")] = None,
    seed: Annotated[int, typer.Option(help="Of the random weights.", min=0)] = 0,
    sparse: Annotated[
        bool, typer.Option("--sparse", help="Headers alone: files of full size that take no space.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a checkpoint in K2.6's exact format with random weights, for trials."""
    from kconvert.convert.cli import text
    from kconvert.convert.synth import write as maker

    with progress_bar("synth", None, quiet) as progress:
        shards = maker.synth(
            output, preset, layers=numbers("--layers", layers), experts=experts, seed=seed,
            sparse=sparse, progress=progress,
        )  # fmt: skip
    table = {"output": str(output), "shards": {path.name: path.stat().st_size for path in shards}}
    show(table, as_json, text.synth_text, quiet)


@app.command("smoke-generate")
@explained
def smoke_generate(
    output: Annotated[Path, folder_argument("A converted folder.")],
    drafter: Annotated[
        Path | None, typer.Option(parser=folder, help="The folder of a DFlash drafter.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="To be continued.")] = None,
    tokens: Annotated[str | None, typer.Option(metavar="LIST", help="Or token ids: 1,2,3.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a chat message.")] = False,
    mode: Annotated[
        Mode | None, typer.Option(help="ddtree if not given, without a drafter ar.")
    ] = None,
    budget: Annotated[str, typer.Option(metavar="N|auto", help="Nodes of a draft.")] = "auto",
    max_new_tokens: Annotated[int, typer.Option(min=0, help="At most so many.")] = 64,
    temperature: Annotated[float, typer.Option(help="0: the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Of sampling.")] = 0,
    dtype: Dtype = None,
    device: Device = "auto",
    chain_seed: Annotated[
        bool, typer.Option("--chain-seed", help="Trees begin with the likeliest chain.")
    ] = False,
    check_exact: Annotated[
        bool, typer.Option("--check-exact", help="Compare every logit's bits with ar's.")
    ] = False,
    ignore_config_key: IgnoreConfigKey = None,
    as_json: Json = False,
) -> None:
    """Generate, and say how fast and how exact.

    A folder for N ranks: torchrun --nproc-per-node N --no-python kconvert smoke-generate …

    Exits with 1 where --check-exact finds a difference.
    """
    from kconvert.convert.cli import text
    from kconvert.runtime.smoke import Request, smoke

    if (prompt is None) == (tokens is None):
        raise typer.BadParameter("give either --prompt or --tokens")
    if chat and prompt is None:
        raise typer.BadParameter("--chat needs a message: give --prompt")
    ids = None if tokens is None else token_ids(tokens)
    request = Request(
        prompt=prompt,
        tokens=ids,
        chat=chat,
        mode=mode or ("ddtree" if drafter else "ar"),
        budget=draft_budget(budget),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        chain_seed=chain_seed,
        check_exact=check_exact,
        ignore_config_keys=tuple(ignore_config_key or ()),
    )
    write = (lambda _: None) if as_json else (lambda part: print(part, end="", flush=True))
    table = smoke(output, drafter, dtype, request, write, device)
    if table["rank"] == 0:
        show(table, as_json, text.smoke_text, quiet=False)
    if table["differs"] is not None:
        raise typer.Exit(1)
