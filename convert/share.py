"""One run's share of a conversion that several machines carry out on shared storage."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from kconvert.layouts.errors import OptionError

# A launcher's own names for "which of how many": torchrun and most others, and Slurm's srun.
# SLURM_NTASKS will not do: a batch script has it, with SLURM_PROCID 0, and runs once.
_LAUNCHERS = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))


@dataclass(frozen=True)
class Share:
    """Share `index` of `count`: every count-th layer, and of share 0 also what is no layer."""

    index: int
    count: int

    @property
    def name(self) -> str:
        """What folders and sentences call it."""
        return f"share-{self.index}-of-{self.count}"

    def holds(self, layer: int | None) -> bool:
        """Whether a layer (None: a group that is no layer) belongs to this share."""
        return (layer or 0) % self.count == self.index


def parse_share(text: str) -> Share | None:
    """I/N → the share, None for 0/1, which is all; OptionError for anything else."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if not match or int(match[1]) >= int(match[2]):
        raise OptionError(f"--share {text!r:.20} is not I/N with I from 0 to N - 1, like 0/4.")
    share = Share(int(match[1]), int(match[2]))
    return share if share.count > 1 else None


def share_of_launcher(environment: Mapping[str, str]) -> Share | None:
    """The share that a launcher gave this process through its environment, if one did."""
    for index, count in _LAUNCHERS:
        if environment.get(index) and environment.get(count):
            try:
                return parse_share(f"{environment[index]}/{environment[count]}")
            except OptionError:
                raise OptionError(
                    f"{index}={environment[index]} and {count}={environment[count]} in the"
                    " environment are no share of several: give --share I/N, or 0/1 for all."
                ) from None
    return None
