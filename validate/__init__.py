"""Checks of an output: structure, digests, and equality with the source it was made from."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kconvert.validate.findings import Validation


def validate(
    output: str | Path,
    source: str | Path | None = None,
    *,
    sample: int | None = None,
    seed: int | None = None,
    verify: bool = False,
    workers: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> "Validation":
    """Check the converted folder `output`, against the checkpoint `source` where one is given.

    `sample`: so many experts a layer (all when None), drawn with `seed` (at random when None);
    `verify`: also compare the source's files with the hashes at hand; `progress` is told the bytes
    read. Differences are findings of the result; OutputError where `output` is no output at all,
    CheckpointError where `source` is damaged or lacks what the output holds.
    """
    from kconvert.validate.run import run  # numba is not for `--help`

    checkpoint = None if source is None else Path(source)
    return run(Path(output), checkpoint, sample, seed, verify, workers, progress)
