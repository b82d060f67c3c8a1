"""What a validation is asked for."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The arguments of `kconvert.validate.validate`, by the same names."""

    source: str | Path | None
    sample: int | None
    seed: int | None
    verify: bool
    revision: str | None
    cache_dir: Path | None
    work_dir: Path | None
    workers: int | None
    progress: Callable[[int], None]
    downloaded: Callable[[int], None]
