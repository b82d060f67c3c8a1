"""Tensor parallelism: a process for each rank, started by torchrun. They talk through gloo, and
between GPUs through NCCL too.

Partial sums are gathered and added in rank order in float32: an all-reduce's order may depend on
the message's size, and so on how many rows a step has.
"""

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.errors import (
    DeviceMemoryError,
    LostProcessError,
    UnavailableError,
    UnsupportedError,
    said_if_slow,
)
from kconvert.layouts.manifest import read_manifest
from kconvert.runtime.watch import ENDED, Watch, leave_at_exit, process_id, watch

if TYPE_CHECKING:
    from torch import Tensor

Step = TypeVar("Step")
Array = NDArray[np.float32]
MEETING = timedelta(minutes=5)  # how long ranks wait for one another to start
_PATIENCE = 3.0  # seconds before it is said that ranks are waited for
WORKING = timedelta(days=7)  # and once they have started: a rank that ends is noticed without it


@dataclass(frozen=True)
class Ranks:
    """This process's rank of `size`; alone, every operation returns what it was given."""

    rank: int = 0
    size: int = 1
    group: Any = None  # torch.distributed's; None: all processes
    gpus: Any = None  # the same ranks' group of GPUs, after `on_gpus`
    watch: Watch | None = None  # over their processes, after `on_gpus`

    def rank_slice(self, what: str, count: int) -> range:
        """This rank's part of `count` heads, rows or columns."""
        if count % self.size:
            raise UnsupportedError(f"{count} {what} do not divide over {self.size} ranks.")
        part = count // self.size
        return range(self.rank * part, (self.rank + 1) * part)

    def all_reduce(self, partial: Array) -> Array:
        """The ranks' partial sums, added in rank order."""
        total, *others = self.gather(partial)
        for other in others:
            total = total + other
        return total

    def all_gather(self, part: Array) -> Array:
        """The ranks' columns side by side."""
        parts = self.gather(part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def on_gpus(self) -> "Ranks":
        """The same rank, with NCCL between its GPU and the others'. All ranks call it.

        Raises UnavailableError if they do not meet.
        """
        if self.size == 1:
            return self
        import torch

        rank, world = _launched()
        met = replace(self, watch=_watch(self))
        waiting = f"waiting for the GPUs of {self.size} ranks to meet through NCCL"
        with said_if_slow(waiting, _PATIENCE):
            with met.waiting():
                met = replace(met, gpus=_gpu_groups(self.size, world)[rank // self.size])
            with met.waiting("the GPUs of {} ranks cannot meet"):
                met._all_gather(torch.zeros(1, device="cuda"))  # NCCL connects only now
                torch.cuda.synchronize()
        return met

    @contextmanager
    def waiting(self, failed: str = "a step of {} ranks failed") -> Iterator[None]:
        """Around what waits for other ranks' GPUs: it does not wait for a rank that has ended, and
        errors of NCCL and CUDA become one sentence."""
        import torch

        try:
            with self.watch.waiting() if self.watch else nullcontext():
                yield
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"the GPU's memory is used up ({_first_line(error)}): give shorter texts, or"
                " convert for more ranks."
            ) from error
        except UnavailableError:
            if self.gpus:
                leave_at_exit()
            raise
        except RuntimeError as error:
            if self.gpus is None:
                raise
            leave_at_exit()
            raise UnavailableError(
                f"{failed.format(self.size)} ({_first_line(error)}): if another has ended, what it"
                " said tells why."
            ) from error

    def steps(self, rounds: Iterator[Step]) -> Iterator[Step]:
        """The same steps, each made within `waiting`."""
        nothing = object()
        while True:
            with self.waiting():
                made = next(rounds, nothing)
            if made is nothing:
                return
            yield made  # type: ignore[misc]

    def all_gather_tensor(self, part: "Tensor") -> "Tensor":
        """Every rank's `part` in rank order: [ranks, *shape] on this rank's GPU. The host waits for
        nothing, and the call can be captured."""
        with _others_there():
            return self._all_gather(part)

    def _all_gather(self, part: "Tensor") -> "Tensor":
        import torch
        from torch import distributed

        parts = torch.empty((self.size, *part.shape), dtype=part.dtype, device=part.device)
        distributed.all_gather_into_tensor(parts, part, group=self.gpus)
        return parts

    def shared_memory(self, size: int, device: Any) -> tuple[list[int], Any] | None:
        """`size` zero bytes on each rank's GPU, which every rank's GPU can write. → The addresses
        in rank order, and what owns the memory; None for one rank. All ranks call it."""
        if self.size == 1:
            return None
        import torch
        from torch.distributed import _symmetric_memory as symmetric

        memory = symmetric.empty(size, dtype=torch.uint8, device=device).zero_()
        try:
            handle = symmetric.rendezvous(memory, self.gpus)
        except RuntimeError as error:
            raise UnavailableError(
                f"the GPUs of {self.size} ranks cannot write one another's memory"
                f" ({_first_line(error)}): choose GPUs with NVLink or peer access between them."
            ) from error
        torch.cuda.synchronize(device)
        handle.barrier()  # nobody writes before all is zero
        torch.cuda.synchronize(device)
        return [int(address) for address in handle.buffer_ptrs], (memory, handle)

    def broadcast(self, value: Any) -> Any:
        """What rank 0 has, on every rank."""
        if self.size == 1:
            return value
        from torch import distributed

        box = [value]
        with _others_there():
            distributed.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def gather(self, part: NDArray[Any]) -> list[NDArray[Any]]:
        """Every rank's `part`, all of one shape, in rank order."""
        if self.size == 1:
            return [part]
        import torch
        from torch import distributed

        mine = torch.from_numpy(np.ascontiguousarray(part))
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        with _others_there():
            distributed.all_gather(parts, mine, group=self.group)
        return [part.numpy() for part in parts]


@dataclass(frozen=True)
class Team:
    """One of `count` teams of ranks that do the same work on different inputs."""

    ranks: Ranks
    index: int
    count: int
    everybody: Any = None  # the group of all teams' ranks

    @property
    def process(self) -> int:
        """This process among those of all teams."""
        return self.index * self.ranks.size + self.ranks.rank

    def all_gather_object(self, value: Any) -> list[Any]:
        """The `value` of every process of every team, in order."""
        if self.count * self.ranks.size == 1:
            return [value]
        from torch import distributed

        values = [None] * (self.count * self.ranks.size)
        with _others_there():
            distributed.all_gather_object(values, value, group=self.everybody)
        return values


@contextmanager
def _others_there() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # gloo's, for anything that goes wrong with a connection
        if _gpu_groups.cache_info().currsize:
            leave_at_exit()
        raise LostProcessError(f"{ENDED} ({_first_line(error)}).") from error


def ranks_from_environment(output: Path) -> Ranks:
    """The rank that torchrun started this process as, among those that the converted folder
    `output` is for; a rank alone if torchrun did not start it.

    Raises UnsupportedError, before it waits for anyone, if another number of ranks was started.
    """
    tp, world = read_manifest(output).tp, _launched()[1]
    if tp != world:
        raise UnsupportedError(
            f"{output} was converted for {tp} rank(s), "
            + (f"WORLD_SIZE says that {world} were started: " if world > 1 else "1 was started: ")
            + f"start {tp} (torchrun --nproc-per-node {tp})"
            + (", or alone without WORLD_SIZE" if tp == 1 else "")
            + f", or reshard it to --tp {world}."
        )
    return team_from_environment(tp).ranks


def all_ranks_from_environment() -> Ranks:
    """All processes that torchrun started as one team; a rank alone if it started none."""
    return team_from_environment(_launched()[1]).ranks


def team_from_environment(size: int) -> Team:
    """This process's team of `size` ranks among the processes that torchrun started."""
    rank, world = _launched()
    if world % size:
        raise UnsupportedError(
            f"{world} process(es) were started, which do not make teams of {size} ranks: start a"
            f" multiple of {size} with torchrun --nproc-per-node."
        )
    if world == 1:
        return Team(Ranks(), 0, 1)
    everybody, *teams = _groups(size, world)
    ranks = Ranks(rank % size, size, teams[rank // size])
    return Team(ranks, rank // size, world // size, everybody)


@cache
def _groups(size: int, world: int) -> list[Any]:
    """The group of all processes, then each team's. Every process makes all of them, once."""
    from torch import distributed

    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    minutes = MEETING.total_seconds() / 60
    waiting = (
        f"waiting up to {minutes:.0f} min at {address} for all {world} ranks, as WORLD_SIZE says"
    )
    with said_if_slow(waiting, _PATIENCE):
        try:
            if not distributed.is_initialized():
                distributed.init_process_group("gloo", timeout=MEETING)
                # Left open, its threads abort a process that ends before the others.
                atexit.register(distributed.destroy_process_group)
            return [
                distributed.new_group(list(members), WORKING, backend="gloo")
                for members in (range(world), *(range(i, i + size) for i in range(0, world, size)))
            ]
        except (RuntimeError, ValueError) as error:
            raise UnavailableError(
                f"{world} ranks could not meet at {address}, which MASTER_ADDR and MASTER_PORT"
                f" name ({_first_line(error)}): start them with torchrun."
            ) from error


@cache
def _gpu_groups(size: int, world: int) -> list[Any]:
    """Each team's group of GPUs, one GPU for each process of this host. NVLink multicast stays off:
    a program that uses it can put the GPUs of a shared host out of service."""
    import torch
    from torch import distributed

    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise UnavailableError(
            f"this is process {local} of its host, which has {torch.cuda.device_count()} GPU(s):"
            " start one for each GPU."
        )
    torch.cuda.set_device(local)
    try:
        return [
            distributed.new_group(list(range(i, i + size)), MEETING, backend="nccl")
            for i in range(0, world, size)
        ]
    except (RuntimeError, ValueError) as error:
        raise UnavailableError(
            f"the GPUs of {size} ranks could not meet through NCCL ({_first_line(error)}): check"
            " that each process has a GPU of its own, and run the same command again."
        ) from error


@cache
def _watch(ranks: Ranks) -> Watch | None:
    """A watch over the team's processes. Every rank makes it, once."""
    parts = ranks.gather(np.array(process_id(), np.int64))
    return watch([tuple(part.tolist()) for part in parts])


def _first_line(error: Exception) -> str:
    """What torch says, without its stack."""
    return str(error).partition("\n")[0].rstrip(".")


def _launched() -> tuple[int, int]:
    """RANK and WORLD_SIZE, as torchrun sets them."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    values = [os.environ.get(name) for name in names]
    if values[1] in (None, "1"):
        return 0, 1
    try:
        rank, world, port = (int(values[i] or "") for i in (0, 1, 3))
    except ValueError:
        rank, world, port = 0, 0, 0
    if not (0 <= rank < world and 0 < port < 65536 and values[2]):
        said = ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
        raise UnsupportedError(
            f"the environment's {said} name no rank of several: start the ranks with torchrun, or"
            " unset WORLD_SIZE."
        )
    return rank, world
