"""The command line: entry points, and the table of commands, each a module of its own here."""

import io
import os
import signal
import sys
from typing import Annotated, NoReturn

import typer

from kconvert.convert.cli.bench import bench
from kconvert.convert.cli.common import INTERRUPTED, interrupted, sentence_of, to_stderr
from kconvert.convert.cli.convert import convert, finish
from kconvert.convert.cli.diff import diff
from kconvert.convert.cli.doctor import doctor
from kconvert.convert.cli.export import export
from kconvert.convert.cli.inspect import inspect
from kconvert.convert.cli.reshard import reshard
from kconvert.convert.cli.smoke_generate import smoke_generate
from kconvert.convert.cli.streams import hold_streams
from kconvert.convert.cli.synth import synth
from kconvert.convert.cli.validate import validate

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
# In the order of --help.
for command in (
    convert,
    finish,
    reshard,
    export,
    doctor,
    validate,
    diff,
    inspect,
    synth,
    smoke_generate,
):
    app.command()(command)
app.add_typer(bench, name="bench")


def main() -> None:
    """The console script: `run`, then an end to all threads."""
    hold_streams()
    set_environment()
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
            signal.signal(sign, signal.SIG_IGN)  # all is done: nothing is left to interrupt
        raise


def set_environment() -> None:
    """Set what libraries read when they are imported. The command line does it before that; a
    program that imports us is left as it is."""
    # Nothing here multiplies by numpy, and if its BLAS cannot start a thread for every core, it
    # interrupts the program.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # huggingface_hub warns of every retry, and draws bars of its own: we say how far a run is, and
    # what fails in the end.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def run() -> None:
    """The command line of `sys.argv`; ends in SystemExit."""
    signal.signal(signal.SIGTERM, _interrupt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may lack a character
    ended: int | str | None
    try:
        app(prog_name="kconvert")
    except KeyboardInterrupt:  # before typer is at work; later typer exits with the same code
        ended = INTERRUPTED
    except SystemExit as over:
        ended = over.code
    except OSError as error:  # typer's, when it prints help
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
