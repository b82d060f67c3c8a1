"""Tensor parallelism on the CPU: one process a rank, started by torchrun, talking through gloo.

Partial sums are gathered and added in rank order in float32: the order of an all-reduce may depend
on the message's size, and so on how many rows a step has.
"""

import atexit
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.errors import UnsupportedError

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Ranks:
    """This process's rank of `size`; alone, every operation gives back what it was given."""

    rank: int = 0
    size: int = 1

    def slice(self, what: str, count: int) -> range:
        """This rank's part of `count` heads, rows or columns."""
        if count % self.size:
            raise UnsupportedError(f"{count} {what} do not divide over {self.size} ranks.")
        part = count // self.size
        return range(self.rank * part, (self.rank + 1) * part)

    def sum(self, partial: Array) -> Array:
        """The ranks' partial sums, added in rank order."""
        total, *others = self._gather(partial)
        for other in others:
            total = total + other
        return total

    def concatenate(self, part: Array) -> Array:
        """The ranks' columns side by side."""
        parts = self._gather(part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def from_first(self, value: Any) -> Any:
        """What rank 0 has, on every rank."""
        if self.size == 1:
            return value
        from torch import distributed

        box = [value]
        distributed.broadcast_object_list(box, src=0)
        return box[0]

    def _gather(self, part: Array) -> list[Array]:
        if self.size == 1:
            return [part]
        import torch
        from torch import distributed

        mine = torch.from_numpy(np.ascontiguousarray(part))
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        distributed.all_gather(parts, mine)
        return [part.numpy() for part in parts]


def ranks_from_environment() -> Ranks:
    """The rank that torchrun started this process as; alone where it did not."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Ranks()
    from torch import distributed

    if not distributed.is_initialized():
        distributed.init_process_group("gloo")
        # Left open, its threads abort a process that ends before the others.
        atexit.register(distributed.destroy_process_group)
    return Ranks(distributed.get_rank(), size)
