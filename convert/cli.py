"""Every command, thin: options in, a call, a printed result; errors → exit codes in one table."""

import errno
import functools
import io
import json
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn, ParamSpec

import typer

from kconvert.layouts.errors import KconvertError, UnavailableError

P = ParamSpec("P")

# The first class that fits decides. 1 is for checks that found a difference.
EXIT_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (KeyboardInterrupt, 130),
    (UnavailableError, 3),
    (KconvertError, 2),
    (OSError, 3),
    (MemoryError, 3),
)
_ADVICE = {
    errno.ENOSPC: "free some space and run the same command again: it resumes",
    errno.EDQUOT: "your quota is used up; free some space and run the same command again",
    errno.EEXIST: "something stands where a new file or folder is needed; choose another path",
    errno.EACCES: "check the permissions, or choose another folder",
    errno.EPERM: "check the permissions, or choose another folder",
    errno.EROFS: "choose a folder that can be written",
    errno.EIO: "the device reports a fault; check it before you run the same command again",
    errno.ENOTDIR: "a file stands where a folder is needed; choose another path",
    errno.EISDIR: "a folder stands where a file is needed; choose another path",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}

app = typer.Typer(
    help="Compile quantised MoE checkpoints into per-GPU blobs, offline, with a proof.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
bench = typer.Typer(help="Measure what this machine does.", no_args_is_help=True)
app.add_typer(bench, name="bench")


def _folder(text: str) -> Path:
    """A path; not the current folder where an unset variable left nothing."""
    if not text:
        raise typer.BadParameter("it is empty")
    return Path(text)


def _argument(text: str) -> Any:
    return typer.Argument(parser=_folder, metavar="FOLDER", help=text)


Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no summary.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Threads; two a core if not given.")]
Layers = Annotated[str | None, typer.Option(help="Only these layers: 0-3,60.")]


def main() -> None:
    """The console script."""
    signal.signal(signal.SIGTERM, _interrupt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may lack a character
    app(prog_name="kconvert")


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def explained(command: Callable[P, None]) -> Callable[P, None]:
    """Turn the expected failures of a command into one sentence on stderr and an exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except tuple(kind for kind, _ in EXIT_CODES) as error:
            print(f"kconvert: {_sentence(error)}", file=sys.stderr)
            code = next(code for kind, code in EXIT_CODES if isinstance(error, kind))
            raise typer.Exit(code) from None

    return run


def _sentence(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        resume = f"; to resume: {shlex.join(['kconvert', *sys.argv[1:]])}"
        return "interrupted" + (resume if sys.argv[1:2] == ["convert"] else "")
    if isinstance(error, OSError) and not isinstance(error, KconvertError):
        where = f"{error.filename}: " if error.filename else ""
        advice = _ADVICE.get(error.errno or 0)
        return f"{where}{error.strerror or error}" + (f": {advice}." if advice else ".")
    return str(error) or type(error).__name__


@app.command()
@explained
def convert(
    source: Annotated[Path, _argument("The folder of a checkpoint.")],
    output: Annotated[Path, _argument("The folder to write; resumed if it is there.")],
    layout: Annotated[str, typer.Option(help="marlin or w4a16.")] = "marlin",
    tp: Annotated[int, typer.Option(help="World size: ranks, one a GPU.")] = 1,
    ep: Annotated[int, typer.Option(help="Expert parallelism; divides tp.")] = 1,
    layers: Layers = None,
    ranks: Annotated[str | None, typer.Option(help="Only these ranks' blobs: 0,3.")] = None,
    workers: Workers = None,
    text_only: Annotated[bool, typer.Option(help="Leave the vision tower out.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace what another run wrote.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Print the plan; write nothing.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compile a checkpoint into one folder of blobs a GPU."""
    from kconvert.convert import text
    from kconvert.convert.run import Options, prepare, run

    options = Options(
        layout, tp, ep, _numbers("--layers", layers), _numbers("--ranks", ranks),
        text_only, overwrite, workers,
    )  # fmt: skip
    prepared = prepare(source, output, options)
    if dry_run:
        _print(text.plan_table(prepared), as_json, text.plan_text, quiet)
        return
    total = sum(file.nbytes - file.header_bytes for file in prepared.plan.files)
    done = total - sum(file.nbytes - file.header_bytes for file in prepared.rest.files)
    with _progress("convert", total, quiet, done) as progress:
        result = run(prepared, progress)
    _print(text.conversion_table(result), as_json, text.conversion_text, quiet)


@app.command()
@explained
def validate(
    output: Annotated[Path, _argument("A converted folder.")],
    source: Annotated[
        Path | None, typer.Option(parser=_folder, help="The checkpoint it was made from.")
    ] = None,
    sample: Annotated[
        int | None, typer.Option(min=1, help="Only so many experts a layer; all if not given.")
    ] = None,
    workers: Workers = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check an output: structure, digests, and codes and scales equal to the source's.

    Exits with 1 where anything differs.
    """
    from kconvert.convert import text
    from kconvert.validate import validate as check

    with _progress("validate", None, quiet) as progress:
        result = check(output, source, sample=sample, workers=workers, progress=progress)
    _print(text.validation_table(result), as_json, text.validation_text, quiet)
    if not result.ok:
        raise typer.Exit(1)


@app.command()
@explained
def inspect(
    path: Annotated[Path, _argument("A checkpoint or a converted folder.")],
    as_json: Json = False,
) -> None:
    """List what a checkpoint or a converted folder holds."""
    from kconvert.convert import text
    from kconvert.convert.inspect import inspect as look

    _print(look(path), as_json, text.inspection_text, quiet=False)


@app.command()
@explained
def synth(
    output: Annotated[Path, _argument("An empty or new folder.")],
    preset: Annotated[str, typer.Option(help="k2.6 or kimi-mini.")] = "k2.6",
    layers: Layers = None,
    experts: Annotated[int | None, typer.Option(help="Routed experts a layer.")] = None,
    seed: Annotated[int, typer.Option(help="Of the random weights.", min=0)] = 0,
    sparse: Annotated[
        bool, typer.Option(help="Headers alone: files of full size that take no space.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a checkpoint in K2.6's exact format with random weights, for trials."""
    from kconvert.convert import synth as maker
    from kconvert.convert import text

    with _progress("synth", None, quiet) as progress:
        shards = maker.synth(
            output, preset, layers=_numbers("--layers", layers), experts=experts, seed=seed,
            sparse=sparse, progress=progress,
        )  # fmt: skip
    table = {"output": str(output), "shards": {path.name: path.stat().st_size for path in shards}}
    _print(table, as_json, text.synth_text, quiet)


@app.command("smoke-generate")
@explained
def smoke_generate(
    output: Annotated[Path, _argument("A folder converted with --tp 1.")],
    drafter: Annotated[
        Path | None, typer.Option(parser=_folder, help="The folder of a DFlash drafter.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Or token ids: 1,2,3.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a chat message.")] = False,
    mode: Annotated[str | None, typer.Option(help="ar, chain or ddtree.")] = None,
    budget: Annotated[str, typer.Option(help="Nodes of a draft, or auto.")] = "auto",
    max_new_tokens: Annotated[int, typer.Option(min=0, help="At most so many.")] = 64,
    temperature: Annotated[float, typer.Option(help="0: the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of sampling.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    chain_seed: Annotated[bool, typer.Option(help="Always draft the likeliest chain.")] = True,
    check_exact: Annotated[
        bool, typer.Option("--check-exact", help="Compare every logit's bits with ar's.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Generate on the CPU, and say how fast and how exact.

    Exits with 1 where --check-exact finds a difference.
    """
    from kconvert.convert import text
    from kconvert.runtime.smoke import Request, smoke

    if (prompt is None) == (tokens is None):
        raise typer.BadParameter("give either --prompt or --tokens")
    ids = None if tokens is None else _ids(tokens)
    if budget != "auto" and not budget.isdecimal():
        raise typer.BadParameter(f"{budget!r} is neither auto nor a number", param_hint="--budget")
    request = Request(
        prompt, ids, chat, mode or ("ddtree" if drafter else "ar"),
        budget if budget == "auto" else int(budget),
        max_new_tokens, temperature, seed, chain_seed, check_exact,
    )  # fmt: skip
    write = (lambda _: None) if as_json else (lambda part: print(part, end="", flush=True))
    table = smoke(output, drafter, dtype, request, write)
    _print(table, as_json, text.smoke_text, quiet=False)
    if table["differs"] is not None:
        raise typer.Exit(1)


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a list like 1,2,3", param_hint="--tokens"
        ) from None


@bench.command("repack")
@explained
def bench_repack(as_json: Json = False) -> None:
    """Marlin packing against a plain copy of the same bytes, on one core and on more."""
    from kconvert.convert import text
    from kconvert.convert.bench import bench_repack as measure

    _print(measure(), as_json, text.bench_repack_text, quiet=False)


@bench.command("plan")
@explained
def bench_plan(as_json: Json = False) -> None:
    """Planning all of K2.6, and --help, as whole processes."""
    from kconvert.convert import text
    from kconvert.convert.bench import bench_plan as measure

    _print(measure(), as_json, text.bench_plan_text, quiet=False)


@bench.command("convert")
@explained
def bench_convert(
    folder: Annotated[Path, _argument("Where to work; takes 20 GB for a while.")],
    pairs: Annotated[int, typer.Option(min=1, help="Conversions and copies, in turn.")] = 5,
    as_json: Json = False,
) -> None:
    """Converting a true-size K2.6 layer against copying its file, with sync."""
    from kconvert.convert import text
    from kconvert.convert.bench import bench_convert as measure

    _print(measure(folder, pairs), as_json, text.bench_convert_text, quiet=False)


@bench.command("moe")
@explained
def bench_moe(
    shapes: Annotated[str, typer.Option(help="Of tp8, tp2, ep8.")] = "tp8,tp2,ep8",
    save: Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights and routing.", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """One K2.6 MoE layer's kernels on this GPU, against the time to only read its weights."""
    from kconvert.convert import text
    from kconvert.runtime import bench_moe as moe

    names = shapes.split(",")
    unknown = [name for name in names if name not in moe.SHAPES]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(moe.SHAPES)}")
    result = moe.bench_moe(names, seed=seed, report=lambda line: print(line, file=sys.stderr))
    if save is not None:
        moe.save(result, save)
    _print(result, as_json, text.bench_moe_text, quiet=False)


def _numbers(option: str, text: str | None) -> list[int] | None:
    """0-3,60 → [0, 1, 2, 3, 60]; a usage error where it is not such a list."""
    if text is None:
        return None
    try:
        spans = [part.split("-") for part in text.split(",")]
        if any(len(span) > 2 or not all(n.isdecimal() for n in span) for span in spans):
            raise ValueError
        bounds = [(int(span[0]), int(span[-1])) for span in spans]
        if any(last < first or last > 99_999 for first, last in bounds):
            raise ValueError
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list like 0-3,60", param_hint=option) from None
    return sorted({n for first, last in bounds for n in range(first, last + 1)})


def _print(
    table: dict[str, Any], as_json: bool, to_text: Callable[[dict[str, Any]], str], quiet: bool
) -> None:
    if as_json:
        print(json.dumps(table))
    elif not quiet:
        print(to_text(table))


@contextmanager
def _progress(
    what: str, total: int | None, quiet: bool, done: int = 0
) -> Iterator[Callable[[int], None]]:
    """A bar in bytes with rate and time left, on stderr where that is a terminal."""
    from tqdm import tqdm

    disable = True if quiet else None
    with tqdm(
        desc=what, total=total, initial=done, unit="B", unit_scale=True, disable=disable
    ) as bar:
        yield lambda count: bar.update(count) and None


if __name__ == "__main__":
    main()
