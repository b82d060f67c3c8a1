"""`kconvert bench …`: what this machine does, each a table or one JSON object."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kconvert.convert.cli.common import (
    Device,
    Dtype,
    Json,
    explained,
    folder_argument,
    numbers,
    show,
    to_stderr,
)

Save = Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")]
bench = typer.Typer(help="Measure what this machine does.", no_args_is_help=True)


def _keep(result: dict[str, Any], path: Path | None) -> None:
    from kconvert.runtime.bench.result import save

    if path is not None:
        save(result, path)


@bench.command("repack")
@explained
def bench_repack(as_json: Json = False) -> None:
    """Marlin packing against a plain copy of the same bytes, on one core and on more."""
    from kconvert.convert.bench.repack import bench_repack as measure
    from kconvert.convert.cli import bench_text

    show(measure(), as_json, bench_text.repack_text, quiet=False)


@bench.command("plan")
@explained
def bench_plan(as_json: Json = False) -> None:
    """Planning all of K2.6 and K3, and --help, as whole processes."""
    from kconvert.convert.bench.plan import bench_plan as measure
    from kconvert.convert.cli import bench_text

    show(measure(), as_json, bench_text.plan_text, quiet=False)


@bench.command("convert")
@explained
def bench_convert(
    folder: Annotated[Path, folder_argument("Where to work; takes 20 GB for a while.", "FOLDER")],
    pairs: Annotated[int, typer.Option(min=1, help="Conversions and copies, in turn.")] = 5,
    as_json: Json = False,
) -> None:
    """Converting a true-size K2.6 layer against copying its file, with sync."""
    from kconvert.convert.bench.conversion import bench_convert as measure
    from kconvert.convert.cli import bench_text

    show(measure(folder, pairs), as_json, bench_text.convert_text, quiet=False)


@bench.command("reshard")
@explained
def bench_reshard(
    folder: Annotated[Path, folder_argument("Where to work; takes 16 GB for a while.", "FOLDER")],
    experts: Annotated[
        int, typer.Option(min=1, max=384, help="Experts of the layer, 25 MB each.")
    ] = 128,
    pairs: Annotated[
        int, typer.Option(min=1, help="How often each is done and copied, in turn.")
    ] = 3,
    as_json: Json = False,
) -> None:
    """Resharding and exporting a true-size K2.6 layer against copying its files, with sync."""
    from kconvert.convert.bench.reshard import bench_reshard as measure
    from kconvert.convert.cli import bench_text

    show(measure(folder, experts, pairs), as_json, bench_text.reshard_text, quiet=False)


@bench.command("validate")
@explained
def bench_validate(
    folder: Annotated[Path, folder_argument("Where to work; takes 20 GB for a while.", "FOLDER")],
    experts: Annotated[
        int, typer.Option(min=1, max=384, help="Experts of the layer, 50 MB each.")
    ] = 384,
    pairs: Annotated[int, typer.Option(min=1, help="Validations and readings, in turn.")] = 3,
    as_json: Json = False,
) -> None:
    """Validating a true-size K2.6 layer from disk against reading source and blobs once."""
    from kconvert.convert.bench.validation import bench_validate as measure
    from kconvert.convert.cli import bench_text
    from kconvert.validate import validate

    table = measure(folder, lambda output, source: validate(output, source).ok, experts, pairs)
    show(table, as_json, bench_text.validate_text, quiet=False)


@bench.command("moe")
@explained
def bench_moe(
    shapes: Annotated[str, typer.Option(help="Some of tp8, tp4, tp2, tp1, ep8.")] = "tp8,tp2,ep8",
    tokens: Annotated[
        str | None, typer.Option(metavar="LIST", help="So many at a time, if not 1 to 16,384.")
    ] = None,
    save: Save = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and routing.", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """One K2.6 MoE layer's kernels on this GPU, against the time to only read its weights, and
    against vLLM's and Humming's where they are installed."""
    from kconvert.convert.cli import bench_text
    from kconvert.runtime.bench import moe

    names = shapes.split(",")
    unknown = [name for name in names if name not in moe.SHAPES]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(moe.SHAPES)}")
    sizes = numbers("--tokens", tokens) or moe.TOKENS
    if 0 in sizes:
        raise typer.BadParameter("at least one token", param_hint="--tokens")
    result = moe.bench_moe(names, sizes, seed, to_stderr, lambda r: _keep(r, save))
    show(result, as_json, bench_text.moe_text, quiet=False)


@bench.command("linear")
@explained
def bench_linear(
    save: Save = None,
    as_json: Json = False,
) -> None:
    """Every bf16 product of a K2.6 TP8 rank on this GPU, against only reading its weight."""
    from kconvert.convert.cli import bench_text
    from kconvert.runtime.bench import linear

    result = linear.bench_linear(report=to_stderr)
    _keep(result, save)
    show(result, as_json, bench_text.linear_text, quiet=False)


@bench.command("tree")
@explained
def bench_tree(
    save: Save = None,
    as_json: Json = False,
) -> None:
    """What a drafted step does beside its forward passes, at K2.6's sizes on this GPU."""
    from kconvert.convert.cli import bench_text
    from kconvert.runtime.bench import tree

    result = tree.bench_tree(report=to_stderr)
    _keep(result, save)
    show(result, as_json, bench_text.tree_text, quiet=False)


@bench.command("exchange")
@explained
def bench_exchange(
    save: Save = None,
    as_json: Json = False,
) -> None:
    """One exchange of partial sums between ranks on GPUs, beside NCCL's and torch's.

    torchrun --nproc-per-node N --no-python kconvert bench exchange
    """
    from kconvert.convert.cli import bench_text
    from kconvert.runtime.bench import exchange

    result = exchange.bench_exchange(report=to_stderr)
    if result["rank"] != 0:
        return
    _keep(result, save)
    show(result, as_json, bench_text.exchange_text, quiet=False)


@bench.command("load")
@explained
def bench_load(
    paths: Annotated[list[Path], typer.Argument(help="Blobs, or folders of them.")],
    device: Device = "auto",
    save: Save = None,
    as_json: Json = False,
) -> None:
    """Blobs into this GPU's memory, from the page cache and from disk, beside the best possible.

    The blobs of all ranks at once: torchrun --nproc-per-node N --no-python kconvert bench load …
    """
    from kconvert.convert.cli import bench_text
    from kconvert.runtime.bench import load

    result = load.bench_load(paths, device, to_stderr)
    if result["rank"] != 0:
        return
    _keep(result, save)
    show(result, as_json, bench_text.load_text, quiet=False)


_PROMPTS = 'A file of prompts: [{"token_ids": […]}, …].'
Prompts = Annotated[Path, folder_argument(_PROMPTS, "PROMPTS")]
Picture = Annotated[Path | None, typer.Option(help="Also draw it into this file, .png or .svg.")]
Count = Annotated[int | None, typer.Option(min=1, help="Only so many prompts.")]
NewTokens = Annotated[int, typer.Option(min=2, help="Tokens a prompt.")]


@bench.command("decode")
@explained
def bench_decode(
    output: Annotated[Path | None, folder_argument("A converted folder.")] = None,
    drafter: Annotated[
        Path | None, folder_argument("The folder of a DFlash drafter.", "DRAFTER")
    ] = None,
    prompts: Annotated[Path | None, folder_argument(_PROMPTS, "PROMPTS")] = None,
    count: Count = None,
    new_tokens: NewTokens = 128,
    dtype: Dtype = None,
    device: Device = "auto",
    save: Save = None,
    picture: Picture = None,
    shape: Annotated[
        str | None, typer.Option(help="In place of a folder: a preset of `synth`, as k2.6.")
    ] = None,
    rank_of: Annotated[int, typer.Option(min=1, help="With --shape: of how many ranks one.")] = 8,
    contexts: Annotated[
        str | None, typer.Option(metavar="LIST", help="With --shape: 1024,8192,32768.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=4, help="With --shape: only so many, to try it out.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="With --shape: only 1, 8, 16 and 33 rows of a text.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="With --shape: of weights and tokens.")] = 0,
    as_json: Json = False,
) -> None:
    """ar, chains and trees of several budgets side by side.

    A folder for N ranks: torchrun --nproc-per-node N --no-python kconvert bench decode …
    With --shape: the step of one rank of a model's true size, its weights made up on the GPU; two
    layers are first compared with float64, and the bits of all ways to run 16 tokens. Exits with 1
    where anything differs. By torchrun the ranks that are there exchange for real.
    """
    from kconvert.convert.cli import bench_text

    if shape is not None:
        if output is not None:
            raise typer.BadParameter("either a folder or --shape", param_hint="--shape")
        _decode_shape(shape, rank_of, contexts, layers, quick, seed, save, as_json)
        return
    if output is None or drafter is None or prompts is None:
        raise typer.BadParameter("give OUTPUT, DRAFTER and PROMPTS, or --shape")
    from kconvert.runtime.bench.decode import bench_decode as measure
    from kconvert.runtime.bench.prompts import read_prompts

    _check_picture(picture)
    chosen = read_prompts(prompts, count)
    table = measure(output, drafter, chosen, new_tokens, dtype, to_stderr, device)
    if table["rank"] != 0:
        return
    _keep(table, save)
    show(table, as_json, bench_text.decode_text, quiet=False)
    if picture is not None:
        from kconvert.runtime.bench.picture import decode_picture

        decode_picture(table, picture)


def _check_picture(path: Path | None) -> None:
    if path is not None and path.suffix not in (".png", ".svg"):
        raise typer.BadParameter(f"{path} is neither .png nor .svg", param_hint="--picture")
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"{path.parent} is no folder here", param_hint="--picture")


def _decode_shape(
    name: str,
    rank_of: int,
    contexts: str | None,
    layers: int | None,
    quick: bool,
    seed: int,
    save: Path | None,
    as_json: bool,
) -> None:
    from kconvert.convert.cli import bench_text
    from kconvert.convert.synth.presets import PRESETS
    from kconvert.runtime.bench.shape.bench import CONTEXTS, bench_shape

    if name not in PRESETS:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(PRESETS)}", param_hint="--shape")
    chosen = numbers("--contexts", contexts) or CONTEXTS
    table = bench_shape(
        name, PRESETS[name].config, rank_of, chosen, seed, layers, quick=quick, report=to_stderr,
        keep=lambda table: _keep(table, save if table["rank"] == 0 else None),
    )  # fmt: skip
    if table["rank"] == 0:
        show(table, as_json, bench_text.shape_text, quiet=False)
    if table["check"] and not table["check"]["right"]:
        raise typer.Exit(1)


@bench.command("projection")
@explained
def bench_projection(
    shape: Annotated[Path, folder_argument("What bench decode --shape saved.")],
    exchange: Annotated[Path, folder_argument("What bench exchange saved.")],
    save: Save = None,
    picture: Picture = None,
    as_json: Json = False,
) -> None:
    """PROJECTED tokens a second of eight GPUs by budget, from one rank's measured steps."""
    from kconvert.convert.cli import bench_text
    from kconvert.runtime.bench.shape.projection import bench_projection as measure

    _check_picture(picture)
    table = measure(shape, exchange)
    _keep(table, save)
    show(table, as_json, bench_text.projection_text, quiet=False)
    if picture is not None:
        from kconvert.runtime.bench.picture import projection_picture

        projection_picture(table, picture)


@bench.command("exact")
@explained
def bench_exact(
    drafter: Annotated[Path, folder_argument("The folder of a DFlash drafter.", "DRAFTER")],
    prompts: Prompts,
    outputs: Annotated[list[Path], typer.Argument(help="Converted folders.")],
    count: Count = None,
    new_tokens: NewTokens = 128,
    device: Device = "auto",
    longest: Annotated[
        int | None,
        typer.Option(min=0, help="The longest context in tokens; 8192 on a GPU, 1100 on the CPU."),
    ] = None,
    save: Save = None,
    as_json: Json = False,
) -> None:
    """Every mode and budget against ar, bit for bit. Exits with 1 if anything differs.

    Folders for N ranks: torchrun --nproc-per-node N --no-python kconvert bench exact …
    Of a multiple of N processes, every N take a part of the prompts.
    """
    from kconvert.convert.cli import bench_text
    from kconvert.runtime.bench.exact import bench_exact as measure
    from kconvert.runtime.bench.prompts import read_prompts

    chosen = read_prompts(prompts, count)
    table = measure(outputs, drafter, chosen, new_tokens, to_stderr, device=device, longest=longest)
    if table["rank"] == 0:
        _keep(table, save)
        show(table, as_json, bench_text.exact_text, quiet=False)
    if not table["exact"]:
        raise typer.Exit(1)
