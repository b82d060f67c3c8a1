"""What all commands share: errors → exit codes in one table, option types, output."""

import errno
import functools
import json
import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec

import typer

from kconvert.convert.output.runlog import COMMAND
from kconvert.layouts.errors import KconvertError, UnavailableError

if TYPE_CHECKING:
    from kconvert.convert.progress import Meter, Work

P = ParamSpec("P")

INTERRUPTED = 130
_RESUMED = ("convert", "reshard", "export")  # commands that go on where they were
# The first class that fits decides. 1 is for checks that found a difference.
EXIT_CODES: tuple[tuple[type[BaseException], int], ...] = (
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
    errno.EAGAIN: "raise the limit of processes (ulimit -u, or the container's)",
    errno.ENOMEM: "free some memory, or give fewer --workers",
}
# Python and torch have no class of their own for a machine that has run out of something.
_EXHAUSTED = {
    "can't start new thread": "no more threads can be started: raise the limit of processes"
    " (ulimit -u, or the container's), or give fewer --workers.",
    "can't allocate memory": "the memory is used up: free some, or raise the limit.",
}


def folder(text: str) -> Path:
    """A path; an empty one, as an unset variable leaves, is not the current folder."""
    if not text:
        raise typer.BadParameter("it is empty")
    return Path(text)


def folder_argument(text: str, name: str = "OUTPUT") -> Any:
    """An argument that is a path, shown as `name`, with `text` as its help."""
    return typer.Argument(parser=folder, metavar=name, help=text)


# The choices of kconvert.runtime.backends, which loads torch.
DtypeName = Literal["float32", "bfloat16"]
DeviceName = Literal["auto", "cpu", "cuda"]
Dtype = Annotated[
    DtypeName | None,
    typer.Option("--dtype", help="What to compute in; float32 if not given, on a GPU bfloat16."),
]
Device = Annotated[
    DeviceName,
    typer.Option("--device", help="auto: a GPU, if one is here that can run it."),
]
# As in kconvert.layouts.registry, which is not for `--help` to load.
LayoutName = Literal["marlin", "w4a16"]
CacheDir = Annotated[
    Path | None,
    typer.Option(parser=folder, help="The cache to use instead of huggingface_hub's default."),
]
Tp = Annotated[int, typer.Option(help="Tensor parallelism: the number of ranks, one for each GPU.")]
Ep = Annotated[int, typer.Option(help="Expert parallelism; it must divide tp.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no summary.")]
Report = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Also write what was found into this file, as HTML."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what another run wrote.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan; write nothing.")]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify", help="Compare the source's files with the hashes that came with them."
    ),
]
Workers = Annotated[
    int | None, typer.Option(min=1, help="How many at once; by the cores if not given.")
]
IgnoreConfigKey = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        help="A key of config.json that is not known here, and that you know to change nothing.",
    ),
]
Layers = Annotated[str | None, typer.Option(metavar="LIST", help="Only these layers: 0-3,60.")]
Ranks = Annotated[str | None, typer.Option(metavar="LIST", help="Only these ranks' blobs: 0,3.")]


def explained(command: Callable[P, None]) -> Callable[P, None]:
    """Turn the expected failures of a command into one sentence on stderr and an exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        before = COMMAND.set(sys.argv)
        try:
            command(*args, **kwargs)
        except tuple(kind for kind, _ in EXIT_CODES) as error:
            to_stderr(f"kconvert: {sentence_of(error)}")
            code = next(code for kind, code in EXIT_CODES if isinstance(error, kind))
            raise typer.Exit(code) from None
        except RuntimeError as error:
            sentence = next((s for text, s in _EXHAUSTED.items() if text in str(error)), None)
            if sentence is None:
                raise
            to_stderr(f"kconvert: {sentence}")
            raise typer.Exit(3) from None
        finally:
            COMMAND.reset(before)

    return run


def interrupted() -> str:
    """What to say about an interrupt, wherever it came."""
    resume = f"; to resume: {shlex.join(['kconvert', *sys.argv[1:]])}"
    return "interrupted" + (resume if sys.argv[1:2] and sys.argv[1] in _RESUMED else "")


def sentence_of(error: BaseException) -> str:
    """What a person is told about an expected failure."""
    if isinstance(error, KconvertError):
        return str(error)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        advice = _ADVICE.get(error.errno or 0)
        return f"{where}{error.strerror or error}" + (f": {advice}." if advice else ".")
    if isinstance(error, MemoryError):
        return _EXHAUSTED["can't allocate memory"]
    return str(error)


def numbers(option: str, text: str | None) -> list[int] | None:
    """0-3,60 → [0, 1, 2, 3, 60]; a usage error if it is not such a list."""
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


def check_report(report: Path | None) -> None:
    """Raise a usage error, before hours of work, if the report could not be written."""
    if report is not None and not report.parent.is_dir():
        raise typer.BadParameter(f"{report.parent} is no folder here", param_hint="--report")
    if report is not None and report.is_dir():
        raise typer.BadParameter(f"{report} is a folder; name a file", param_hint="--report")


def draft_budget(text: str) -> int | str:
    """`auto` or a number of nodes; a usage error if it is neither."""
    if text == "auto":
        return text
    try:
        budget = int(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r:.60} is neither auto nor a number", param_hint="--budget"
        ) from None
    if budget < 0:
        raise typer.BadParameter(f"{text} is below 0: it must be 0 or more", param_hint="--budget")
    return budget


def token_ids(text: str) -> list[int]:
    """1,2,3 → [1, 2, 3]; a usage error if it is not such a list."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r:.60} is not a list like 1,2,3", param_hint="--tokens"
        ) from None


SCHEMA = 1  # of every command's JSON; what is only added keeps it


def show(
    table: dict[str, Any], as_json: bool, to_text: Callable[[dict[str, Any]], str], quiet: bool
) -> None:
    """Print a command's result: as one JSON object, or as `to_text` has it."""
    if as_json:
        print(json.dumps({"schema": SCHEMA, **table}))
    elif not quiet:
        print(to_text(table))


@contextmanager
def progress_bar(what: str, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Bytes and their rate, on stderr if that is a terminal."""
    from tqdm import tqdm

    disable = True if quiet else None
    tqdm.monitor_interval = 0  # no thread that looks after the bar: every update may draw it
    with tqdm(
        desc=what, unit="B", unit_scale=True, disable=disable, dynamic_ncols=True, miniters=1,
    ) as bar:  # fmt: skip
        yield lambda count: bar.update(count) and None


@contextmanager
def reporting(work: "Work", quiet: bool, what: str = "convert") -> Iterator["Meter"]:
    """A meter of the command `what`, whose state is shown on stderr: every second on a terminal; in
    a log a line after half a minute, so that an estimate is there early, and then every five."""
    from kconvert.convert.progress import Meter, status_line

    meter, over, live = Meter(), threading.Event(), sys.stderr.isatty()

    def report() -> None:
        while not over.wait(1 if live else 300 if meter.seconds > 30 else 30):
            width = _columns() - len(f"{what} ") if live else None
            line = f"{what} {status_line(meter.stages(), work, meter.seconds, width)}"
            end = "" if live else "\n"
            print(f"\r{line}\x1b[K" if live else line, end=end, file=sys.stderr, flush=True)

    thread = threading.Thread(target=report, daemon=True)
    if not quiet:
        thread.start()
    try:
        yield meter
    finally:
        over.set()
        if not quiet:
            thread.join()
            if live:
                print("\r\x1b[K", end="", file=sys.stderr)


def _columns() -> int:
    """The terminal's columns but the last, after which some terminals begin a new line."""
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return (columns or 80) - 1  # a serial line says 0


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr)
