"""A rank of several of which some, or all others, are not there."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kconvert.runtime.distributed import Ranks


@dataclass(frozen=True)
class StandIn(Ranks):
    """A rank of `size`: its part of every weight. What is exchanged goes to and comes from those
    that are there, the first `here.size`; the kernels are the same ones in the same places."""

    here: Ranks = field(default_factory=Ranks)

    @classmethod
    def around(cls, here: Ranks, size: int) -> "StandIn":
        """The same rank among `size`."""
        return cls(here.rank, size, here.group, here.gpus, here.watch, here)

    def all_gather_tensor(self, part: Tensor) -> Tensor:
        return part[None] if self.here.size == 1 else self.here.all_gather_tensor(part)

    def shared_memory(self, size: int, device: Any) -> tuple[list[int], Any] | None:
        return self.here.shared_memory(size, device)

    def broadcast(self, value: Any) -> Any:
        return self.here.broadcast(value)
