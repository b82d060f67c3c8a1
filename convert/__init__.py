"""The compiler: from a quantised checkpoint to one folder of blobs a GPU."""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kconvert.convert.run import Conversion


def convert(
    source: str | Path,
    output: str | Path,
    *,
    layout: str = "marlin",
    tp: int = 1,
    ep: int = 1,
    layers: Collection[int] | None = None,
    ranks: Collection[int] | None = None,
    text_only: bool = False,
    overwrite: bool = False,
    workers: int | None = None,
) -> "Conversion":
    """Convert the checkpoint in `source` into `output`, resuming what is there.

    The options are the command line's. Raises a `kconvert.layouts.errors.KconvertError`, or
    OSError as the system gives it.
    """
    from kconvert.convert.run import Options, prepare, run  # numba is not for `--help`

    options = Options(layout, tp, ep, layers, ranks, text_only, overwrite, workers)
    return run(prepare(source, output, options))
