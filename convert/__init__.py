"""The compiler: from a quantized checkpoint to one folder of blobs for each GPU."""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kconvert.layouts import lazily

__all__ = [
    "Conversion",
    "Exported",
    "Share",
    "convert",
    "describe",
    "export_output",
    "finish_output",
    "reshard_output",
]

if TYPE_CHECKING:
    from kconvert.convert.export import Exported
    from kconvert.convert.run import Conversion
    from kconvert.convert.share import Share
    from kconvert.layouts.manifest import Manifest
else:
    __getattr__ = lazily(__name__, {"Conversion": "run", "Exported": "export", "Share": "share"})


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
    """Convert `source`, a checkpoint's folder or its name on the Hub, into `output`; what is there
    already is resumed.

    The options mean what they do on the command line. Raises a `kconvert.layouts.KconvertError`, or
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


def finish_output(output: str | Path) -> "Manifest":
    """Write the manifest of an output that several shares have made: `kconvert finish`.

    Raises OutputError if something is missing, UnavailableError if a run is at work.
    """
    from kconvert.convert.run import finish

    return finish(Path(output))


def reshard_output(
    output: str | Path,
    new: str | Path,
    *,
    layout: str | None = None,
    tp: int = 1,
    ep: int = 1,
    overwrite: bool = False,
    workers: int | None = None,
) -> "Conversion":
    """Make `new` from the blobs of `output` for another layout (None: the same) or parallelism:
    `kconvert reshard`. It is, bit for bit, what a conversion of the source would be.

    Raises what `convert` does.
    """
    from kconvert.convert.reshard import prepare_reshard
    from kconvert.convert.run import run

    return run(
        prepare_reshard(
            output, new, layout=layout, tp=tp, ep=ep, overwrite=overwrite, workers=workers
        )
    )


def export_output(output: str | Path, new: str | Path, *, workers: int | None = None) -> "Exported":
    """Turn `output` back into a checkpoint of the format it was made from: `kconvert export`.

    Raises what `convert` does; UnsupportedError if blobs do not keep every byte of that format.
    """
    from kconvert.convert.export import prepare_export, run_export

    return run_export(prepare_export(output, new, workers))


def describe(source: str | Path, tensors: str | None = None) -> dict[str, Any]:
    """What a folder, a file or a repository of the Hub is, as `kconvert inspect --json` says it;
    `tensors` is a pattern (* and ?) of names to list.

    Raises CheckpointError if it is nothing known, OutputError for a damaged output,
    UnavailableError if the Hub cannot be asked.
    """
    from kconvert.convert.inspect import inspect

    return inspect(source, tensors)
