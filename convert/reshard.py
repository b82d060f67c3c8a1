"""A finished output for another layout or parallelism, made from its blobs, without the source."""

from pathlib import Path

from kconvert.convert.prepare import Options, Prepared, planned, without_collection
from kconvert.convert.source.stored import open_stored
from kconvert.layouts.model import Model
from kconvert.layouts.stored.checkpoint import StoredGroup


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

    What `kconvert.convert.run.run` makes of it is what a conversion of the source would be, bit for
    bit. Raises what a conversion does, and for `output` what `open_stored` does.
    """
    with without_collection():
        source, model = open_stored(Path(output))
        options = Options(
            layout=layout or source.manifest.layout,
            tp=tp,
            ep=ep,
            text_only=source.manifest.text_only,
            scale_dtype=_cast_to(model),
            overwrite=overwrite,
            workers=workers,
        )
        return planned(source, model, Path(new), options)


def _cast_to(model: Model) -> str | None:
    """What the source's scales were cast to, as --scale-dtype has it."""
    for group in model.groups.values():
        if isinstance(group, StoredGroup) and group.is_cast:
            return "bfloat16"
    return None
