"""A rank of several of which some, or all others, are not there.

What goes to an absent rank is written all the same, into memory of this GPU that stands for its
own, and its flag is raised there. What comes from it is zeros that lie here already, and its own
flags are up for good: so the exchange's launches, places and bytes are the engine's, and nothing is
waited for or crosses a link.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kconvert.runtime.distributed import Ranks
from kconvert.runtime.kernels.rows.launch import Peers, peer_flags


@dataclass(frozen=True)
class StandIn(Ranks):
    """A rank of `size`; the first `here.size` of them are processes, and meet for real."""

    here: Ranks = field(default_factory=Ranks)
    nothing: dict[Any, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def around(cls, here: Ranks, size: int) -> "StandIn":
        """The same rank among `size`."""
        return cls(here.rank, size, here.group, here.gpus, here.watch, here)

    def all_gather_tensor(self, part: Tensor) -> Tensor:
        parts = part[None] if self.here.size == 1 else self.here.all_gather_tensor(part)
        shape = (self.size - self.here.size, *part.shape)
        key = shape, part.dtype, part.device
        if key not in self.nothing:  # outside a graph: whatever is captured was run before
            self.nothing[key] = torch.zeros(shape, dtype=part.dtype, device=part.device)
        return torch.cat([parts, self.nothing[key]])

    def shared_memory(self, size: int, device: Any) -> tuple[list[int], Any]:
        present = self.here.shared_memory(size, device)
        if present is None:
            mine = torch.zeros(size, dtype=torch.uint8, device=device)
            present = [mine.data_ptr()], (mine, None)
        addresses, owner = present
        others = torch.zeros(self.size - self.here.size, size, dtype=torch.uint8, device=device)
        there = [other.data_ptr() for other in others]
        return [*addresses, *there], (owner[0], (owner[1], others))

    def broadcast(self, value: Any) -> Any:
        return self.here.broadcast(value)

    def answer(self, peers: Peers) -> None:
        """The absent ranks' flags are up, at an epoch that no exchange comes to."""
        memory: Tensor = peers.keep[0]  # type: ignore[index]
        peer_flags(memory, self.size, peers.most)[:, self.here.size :] = -1
