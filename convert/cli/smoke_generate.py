"""`kconvert smoke-generate`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from kconvert.convert.cli.common import (
    Device,
    Dtype,
    IgnoreConfigKey,
    Json,
    draft_budget,
    explained,
    folder,
    folder_argument,
    show,
    token_ids,
)

# As in kconvert.runtime.engine, which is not for `--help` to load.
Mode = Literal["ar", "chain", "ddtree"]


@explained
def smoke_generate(
    output: Annotated[Path, folder_argument("A converted folder.")],
    drafter: Annotated[
        Path | None, typer.Option(parser=folder, help="The folder of a DFlash drafter.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The text to continue.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="LIST", help="The same as token ids: 1,2,3.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the chat template.")
    ] = False,
    mode: Annotated[
        Mode | None, typer.Option(help="ddtree if not given; without a drafter, ar.")
    ] = None,
    budget: Annotated[str, typer.Option(metavar="N|auto", help="Drafted tokens a step.")] = "auto",
    max_new_tokens: Annotated[
        int, typer.Option(min=0, help="How many tokens to generate at most.")
    ] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Seed of sampling.")] = 0,
    dtype: Dtype = None,
    device: Device = "auto",
    chain_seed: Annotated[
        bool, typer.Option("--chain-seed", help="Let every tree begin with the likeliest chain.")
    ] = False,
    check_exact: Annotated[
        bool, typer.Option("--check-exact", help="Compare every logit, bit for bit, with ar's.")
    ] = False,
    ignore_config_key: IgnoreConfigKey = None,
    as_json: Json = False,
) -> None:
    """Generate text from an output, and say how fast and how exact that was.

    For an output of N ranks: torchrun --nproc-per-node N --no-python kconvert smoke-generate …

    Exits with 1 if --check-exact finds a difference.
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
