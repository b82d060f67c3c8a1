"""`kconvert synth`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from kconvert.convert.cli.common import (
    Json,
    Layers,
    Quiet,
    explained,
    folder_argument,
    numbers,
    progress_bar,
    show,
)

# As in kconvert.convert.synth.presets, which is not for `--help` to load.
Preset = Literal[
    "k2.6", "k2.6-layer", "kimi-mini", "k3", "deepseek-v3", "qwen3-235b", "mixtral-8x7b",
    "glm-4.6", "minimax-m2", "gpt-oss-120b",
]  # fmt: skip


@explained
def synth(
    output: Annotated[Path, folder_argument("An empty or new folder.", "FOLDER")],
    preset: Annotated[Preset, typer.Option(help="The model whose sizes it has.")] = "k2.6",
    layers: Layers = None,
    experts: Annotated[int | None, typer.Option(help="Routed experts a layer.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.", min=0)] = 0,
    sparse: Annotated[
        bool,
        typer.Option(
            "--sparse", help="Write headers alone: files of full size that take no space."
        ),
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a checkpoint in a model's exact format, with random weights, to try things on."""
    from kconvert.convert.cli import text
    from kconvert.convert.synth import write as maker

    with progress_bar("synth", quiet) as progress:
        shards = maker.synth(
            output, preset, layers=numbers("--layers", layers), experts=experts, seed=seed,
            sparse=sparse, progress=progress,
        )  # fmt: skip
    table = {"output": str(output), "shards": {path.name: path.stat().st_size for path in shards}}
    show(table, as_json, text.synth_text, quiet)
