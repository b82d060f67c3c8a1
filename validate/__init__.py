"""Checks of an output: structure, digests, and equality with the source it was made from."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kconvert.layouts import lazily

__all__ = ["Diff", "Finding", "Validation", "compare", "validate", "write_report"]

if TYPE_CHECKING:
    from kconvert.validate.diff import Diff
    from kconvert.validate.findings import Finding, Validation
    from kconvert.validate.report.write import write_report
else:
    __getattr__ = lazily(
        __name__,
        {
            "Diff": "diff",
            "Finding": "findings",
            "Validation": "findings",
            "write_report": "report.write",
        },
    )


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


def compare(
    a: str | Path,
    b: str | Path,
    *,
    workers: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> "Diff":
    """Which layers, experts and tensors of two models differ, each a checkpoint's folder or a
    converted one: `kconvert diff`.

    `progress` is told the bytes read. Raises what reading either raises, also where a blob's bytes
    were changed.
    """
    from kconvert.validate.diff import diff  # numba is not for `--help`

    return diff(a, b, workers, progress)
