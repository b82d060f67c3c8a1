"""A finished output for another layout or parallelism, made from its blobs, without the source."""

from pathlib import Path

from kconvert.convert.prepare import Options, Prepared, prepare_opened, without_collection
from kconvert.convert.source.stored import open_stored


def prepare_reshard(
    output: str | Path,
    new: str | Path,
    *,
    layout: str | None = None,
    tp: int = 1,
    ep: int = 1,
    overwrite: bool = False,
    workers: int | None = None,
) -> Prepared:
    """Plan `new` from the blobs of `output`; writes nothing. `layout` None: that of `output`.

    `kconvert.convert.run.run` then makes what a conversion of the source would be, bit for bit.
    Raises what a conversion does, and for `output` what `open_stored` does.
    """
    with without_collection():
        source, model = open_stored(Path(output))
        options = Options(
            layout=layout or source.manifest.layout,
            tp=tp,
            ep=ep,
            text_only=source.manifest.text_only,
            overwrite=overwrite,
            workers=workers,
            scale_dtype="bfloat16" if source.cast else None,
        )
        return prepare_opened(source, model, Path(new), options)
