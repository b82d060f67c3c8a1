"""The compiler: from a quantised checkpoint to one folder of blobs a GPU."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kconvert.convert.run import Conversion


def convert(source: str | Path, output: str | Path, **options: Any) -> "Conversion":
    """Convert the checkpoint in `source` into `output`, resuming what is there.

    Options are those of `kconvert.convert.run.Options`: layout="marlin"|"w4a16", tp, ep, layers,
    ranks, text_only, overwrite, workers. Raises a `kconvert.layouts.errors.KconvertError`.
    """
    from kconvert.convert.run import Options, prepare, run  # numba is not for `--help`

    return run(prepare(source, output, Options(**options)))
