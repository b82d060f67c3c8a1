"""Who owns what: the slice of each expert that a rank holds.

The routed experts are cut; everything else stays whole, so that nothing is replicated and any tp
can share it (FORMAT.md).
"""

from collections.abc import Callable
from typing import NamedTuple

from kconvert.layouts.errors import OptionError
from kconvert.layouts.quantization import Quantization

MOST = 10_000  # layers, experts, ranks: more is a damaged file or a slip of the finger
POWERS = (1, 2, 4, 8, 16, 32)  # the numbers of ranks that are offered


class ModelDims(NamedTuple):
    """The sizes of a model that sharding depends on."""

    layers: int
    mtp_layers: int  # DeepSeek's, numbered behind the others; a checkpoint may lack them
    first_moe: int  # layers below are dense
    experts: int
    hidden: int  # columns that a routed expert sees
    intermediate: int  # of one routed expert
    quantization: Quantization
    # Further layers that are dense; None: nothing says which layers are.
    dense: frozenset[int] | None = frozenset()

    def is_moe(self, layer: int) -> bool | None:
        """Whether a layer has routed experts; None if only its tensors tell."""
        return None if self.dense is None else layer >= self.first_moe and layer not in self.dense


class Parallelism(NamedTuple):
    """World size `tp`; `ep` divides it; each expert is cut over tp/ep ranks."""

    tp: int = 1
    ep: int = 1

    @property
    def moe_tp(self) -> int:
        """How many ranks share one expert."""
        return self.tp // self.ep


class RankSlice(NamedTuple):
    """What a rank holds of every MoE layer: some experts, the same intermediate rows of each."""

    experts: range
    rows: range  # of gate and up; the same columns of down


def rank_slice(dims: ModelDims, parallelism: Parallelism, rank: int) -> RankSlice:
    """What `rank` holds: ep_rank = rank div moe_tp of the experts, rank mod moe_tp of the rows."""
    moe_tp_rank = rank % parallelism.moe_tp
    rows = dims.intermediate // parallelism.moe_tp
    return RankSlice(
        rank_experts(dims.experts, parallelism, rank),
        range(moe_tp_rank * rows, (moe_tp_rank + 1) * rows),
    )


def rank_experts(experts: int, parallelism: Parallelism, rank: int) -> range:
    """The routed experts of which `rank` holds a part."""
    ep_rank, part = rank // parallelism.moe_tp, experts // parallelism.ep
    return range(ep_rank * part, (ep_rank + 1) * part)


def check_parallelism(
    dims: ModelDims, parallelism: Parallelism, constraint: Callable[[int, int], str | None]
) -> None:
    """Raise OptionError, with the sizes and what would work, if a cut is impossible.

    `constraint(n, k)` is the layout's reason against a matrix [n, k], or None.
    """
    problem = _problem(dims, parallelism, constraint)
    if problem is None:
        return
    same_tp = [Parallelism(parallelism.tp, ep) for ep in range(1, min(parallelism.tp, MOST) + 1)]
    other_tp = [Parallelism(1 << i) for i in range(8)]
    fits = [f"--tp {p.tp} --ep {p.ep}" for p in same_tp if not _problem(dims, p, constraint)]
    fits = fits or [f"--tp {p.tp}" for p in other_tp if not _problem(dims, p, constraint)]
    advice = f"; what works: {', '.join(fits)}" if fits else "; no parallelism would do"
    raise OptionError(f"--tp {parallelism.tp} --ep {parallelism.ep}: {problem}{advice}.")


def parallelisms(
    dims: ModelDims, constraint: Callable[[int, int], str | None]
) -> list[Parallelism]:
    """Every tp and ep, of `POWERS`, that `check_parallelism` lets pass."""
    every = (Parallelism(tp, ep) for tp in POWERS for ep in POWERS if ep <= tp)
    return [parallelism for parallelism in every if not _problem(dims, parallelism, constraint)]


def _problem(
    dims: ModelDims, parallelism: Parallelism, constraint: Callable[[int, int], str | None]
) -> str | None:
    tp, ep = parallelism
    if not (1 <= tp <= MOST and 1 <= ep <= MOST):
        return f"both must be 1 to {MOST:,}"
    if tp % ep:
        return f"ep {ep} does not divide tp {tp}"
    if dims.experts % ep:
        return f"{dims.experts} experts do not divide over ep {ep}"
    moe_tp = parallelism.moe_tp
    if dims.intermediate % moe_tp:
        return f"{dims.intermediate} rows an expert do not divide over {moe_tp} ranks"
    rows = dims.intermediate // moe_tp
    sliced = f"an expert's {dims.intermediate} rows over {moe_tp} ranks are {rows} a rank, and"
    group = dims.quantization.group_size
    if group and (rows % group or dims.hidden % group):
        return f"{sliced} a quantization group of {group} would be cut"
    for n, k in ((rows, dims.hidden), (dims.hidden, rows)):
        reason = constraint(n, k)
        if reason:
            return f"{sliced} {reason}"
    return None
