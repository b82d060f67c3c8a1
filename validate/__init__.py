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
    revision: str | None = None,
    cache_dir: Path | None = None,
    work_dir: Path | None = None,
    workers: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
    downloaded: Callable[[int], None] = lambda _: None,
) -> "Validation":
    """Check the converted folder `output`, against the checkpoint `source` if one is given: a
    folder, or a repository of the Hub.

    `sample`: that many experts of each layer (None: all), drawn with `seed` (None: a random one);
    `verify`: also compare the source's files with the hashes at hand. A repository is read at
    `revision` (None: the commit that the output names), its shards downloaded two at a time under
    `work_dir` (None: in `cache_dir`, or huggingface_hub's own) and compared with the Hub's hashes.
    `progress` is told the bytes read, `downloaded` the bytes downloaded.

    Differences are findings of the result. Raises OutputError if `output` is no output at all,
    CheckpointError if `source` is damaged or lacks what the output holds, UnavailableError if it
    cannot be fetched.
    """
    from kconvert.validate.asked import Asked
    from kconvert.validate.run import run  # numba is not for `--help`

    asked = Asked(
        source=source, sample=sample, seed=seed, verify=verify, revision=revision,
        cache_dir=cache_dir, work_dir=work_dir, workers=workers, progress=progress,
        downloaded=downloaded,
    )  # fmt: skip
    return run(Path(output), asked)


def compare(
    a: str | Path,
    b: str | Path,
    *,
    workers: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> "Diff":
    """Which layers, experts and tensors of two models differ: `kconvert diff`. Each is a
    checkpoint's folder or a converted one.

    `progress` is told the bytes read. Raises what reading either does, also ChangedFileError if a
    blob's bytes were changed.
    """
    from kconvert.validate.diff import diff  # numba is not for `--help`

    return diff(a, b, workers, progress)
