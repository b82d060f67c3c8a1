"""The compiler: from a quantized checkpoint to one folder of blobs a GPU."""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kconvert.convert.run import Conversion
    from kconvert.convert.share import Share


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
    revision: str | None = None,
    cache_dir: Path | None = None,
    keep_shards: bool = False,
    share: "Share | None" = None,
    verify: bool = False,
    scale_dtype: str | None = None,
) -> "Conversion":
    """Convert `source`, a checkpoint's folder or its name on the Hub, into `output`, resuming what
    is there.

    The options are the command line's. Raises a `kconvert.layouts.errors.KconvertError`, or
    OSError as the system gives it.
    """
    from kconvert.convert.prepare import Options, prepare  # numba is not for `--help`
    from kconvert.convert.run import run

    options = Options(
        layout=layout,
        tp=tp,
        ep=ep,
        layers=layers,
        ranks=ranks,
        text_only=text_only,
        overwrite=overwrite,
        workers=workers,
        revision=revision,
        cache_dir=cache_dir,
        keep_shards=keep_shards,
        share=share,
        verify=verify,
        scale_dtype=scale_dtype,
    )
    return run(prepare(source, output, options))
