"""What a rank keeps of a drafter, as of the target: some heads, some rows of the MLP, some columns
of features. Products over what was cut are partial sums, added in rank order."""

from dataclasses import replace
from math import prod
from typing import NamedTuple

from torch import Tensor

from kconvert.runtime.distributed import Ranks
from kconvert.runtime.drafting.dflash_config import DrafterConfig

STEP = 64  # columns that the products' kernel takes at once

# The last part of a matrix's name → what its rows, or its columns, belong to.
_ROWS = {"q_proj": "heads", "k_proj": "kv_heads", "v_proj": "kv_heads", "gate_proj": "intermediate",
         "up_proj": "intermediate"}  # fmt: skip
_COLUMNS = {"fc": "features", "o_proj": "heads", "down_proj": "intermediate"}


class Share(NamedTuple):
    """One rank's share. The ranges are of rows or columns of the matrices."""

    whole: DrafterConfig
    config: DrafterConfig  # with this rank's heads and rows
    heads: range
    kv_heads: range
    intermediate: range
    features: range
    is_part: bool  # false: every rank has all of it

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of the drafter's tensor `name`, contiguous."""
        last = name.removesuffix(".weight").rpartition(".")[2]
        if part := _ROWS.get(last):
            rows: range = getattr(self, part)
            return tensor[rows.start : rows.stop].contiguous()
        if part := _COLUMNS.get(last):
            columns: range = getattr(self, part)
            return tensor[:, columns.start : columns.stop].contiguous()
        return tensor

    @property
    def nbytes(self) -> int:
        """Bytes of its weights in bf16."""
        sizes = self.config.shapes() | {"fc.weight": (self.config.hidden, len(self.features))}
        return 2 * sum(prod(shape) for shape in sizes.values())


def share_of(config: DrafterConfig, ranks: Ranks) -> Share:
    """This rank's share. A drafter that does not divide into multiples of STEP stays whole: then
    every rank computes all of it. Query heads that share a key head may lie on several ranks, which
    then all keep that key head."""
    c, n, r = config, ranks.size, ranks.rank
    group, each = c.heads // c.kv_heads, c.heads // n
    divides = c.heads % n == 0 and (each % group == 0 or group % each == 0)
    sizes = (each * c.head_dim, c.intermediate // n, c.features // n)
    exact = c.intermediate % n == 0 and c.features % n == 0
    if n == 1 or not divides or not exact or any(size % STEP for size in sizes):
        whole = (range(c.heads * c.head_dim), range(c.kv_heads * c.head_dim),
                 range(c.intermediate), range(c.features))  # fmt: skip
        return Share(config, config, *whole, is_part=False)
    first_key, keys = r * each // group, max(1, each // group)
    mine = replace(c, heads=each, kv_heads=keys, intermediate=c.intermediate // n)
    return Share(
        config,
        mine,
        heads=_elements(r * each, each, c.head_dim),
        kv_heads=_elements(first_key, keys, c.head_dim),
        intermediate=ranks.rank_slice("rows of the drafter's MLP", c.intermediate),
        features=ranks.rank_slice("features", c.features),
        is_part=True,
    )


def _elements(first: int, count: int, size: int) -> range:
    return range(first * size, (first + count) * size)
