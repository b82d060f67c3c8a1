"""What a routed-experts layer is on one GPU, and how the kernels cut it up.

Two kinds of choice are kept apart. The chunks of a reduction (``split``, ``w2_chunks``) follow from
the shape alone: they decide a row's bits. Everything in ``Schedule`` follows from how many tokens
there are and from the GPU, and decides only the time.
"""

from dataclasses import dataclass, replace
from math import comb, sqrt

from kconvert.runtime.kernels.gpu import Gpu

W13_CHUNKS = 4  # chunks of K within each of the ``split`` parts; a block has as many warps
BLOCK_BYTES = 1024 + 128  # weights and scales of 32 k x 64 columns
NARROW_ROWS = 4  # rows an expert has on average up to which blocks of 8 rows are used
MANY_ROWS = 32  # and from which on sm_90a's forms for dozens of rows are
MAX_EXPERTS = 1024  # a block of the alignment kernel has a thread for each


@dataclass(frozen=True)
class MoeShape:
    """Routed experts of one layer on one rank.

    hidden K, intermediate N (this rank's slice), group = k values a scale covers. ``experts`` are
    on this rank, from global id ``first_expert`` on; the router chooses ``top_k`` of
    ``total_experts``. Raises ValueError for a size the kernels cannot cut.
    """

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    group: int = 32
    total_experts: int = 0
    first_expert: int = 0

    def __post_init__(self) -> None:
        if not self.total_experts:
            object.__setattr__(self, "total_experts", self.experts)
        if self.group not in (32, 64, 128):
            raise ValueError(f"group size {self.group} is not 32, 64 or 128")
        for name in ("hidden", "intermediate"):
            size = getattr(self, name)
            if size % 64 or size % self.group or size == self.group:
                raise ValueError(
                    f"{name} {size} is not a multiple of 64 that holds two groups of {self.group} "
                    "or more"
                )
        if not 0 < self.experts <= MAX_EXPERTS or not 0 < self.top_k <= 32:
            raise ValueError(
                f"{self.experts} experts, top {self.top_k}: at most {MAX_EXPERTS} and 32"
            )
        if not 0 <= self.first_expert <= self.total_experts - self.experts:
            raise ValueError(
                f"experts {self.first_expert}…{self.first_expert + self.experts - 1} are "
                f"not among {self.total_experts}"
            )

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights and scales."""
        values = 3 * self.hidden * self.intermediate
        return values // 2 + values // self.group * 2

    @property
    def expected_slots(self) -> int:
        """Slots a lone token has on this rank, on average, at least one."""
        return max(1, self.top_k * self.experts // self.total_experts)

    @property
    def split(self) -> int:
        """Blocks that share w13's K: enough for one token to fill a GPU, in powers of two."""
        blocks = self.expected_slots * (self.intermediate // 64)
        return _power_of_two_up_to(8, 256 / blocks)

    @property
    def w2_chunks(self) -> int:
        """Chunks of w2's K: enough warps for one token to fill a GPU, in powers of two."""
        warps = self.expected_slots * (self.hidden // 64)
        steps = self.intermediate // 64
        return _power_of_two_up_to(min(8, steps), 1024 / warps)


@dataclass(frozen=True)
class Schedule:
    """How one call's work is laid over the GPU; no effect on any bit of the result."""

    block_rows: int  # rows of one expert that share a pass over its weights
    w13: str  # the kernel: moe_w13 for few rows, moe_w13_wide for more, on sm_90a moe_w13_group and
    # for dozens moe_w13_many
    w2: str  # the kernel: moe_w2, on sm_90a moe_w2_group for a wide layer, for dozens moe_w2_many
    stages_w13: int
    stages_w2: int
    warps_w2: int  # warps of a block of moe_w2
    warps_k: int  # warps that share the K of one run of w2's columns: 1 or w2_chunks
    tiles_per_warp: int  # runs of 64 columns a warp of moe_w2 takes in turn
    threads_w13: int  # register budgets: at least so many threads must fit an SM
    threads_w2: int
    blocks_w13: int  # grids; where w13 is a cluster's work, clusters
    blocks_w2: int

    def shared_w13(self, shape: MoeShape) -> int:
        """Dynamic shared memory of a w13 block in bytes: see the kernels for what lies in it."""
        rows = self.block_rows * 64
        if self.w13 == "moe/w13_many":
            return _shared_many(self.block_rows, self.stages_w13, shape)[0]
        if self.w13 == "moe/w13_group":
            return self._shared_group(self.stages_w13)
        if self.w13 == "moe/w13_wide":
            return 2048 * self.block_rows + 6 * rows + 8 * self.stages_w13 * BLOCK_BYTES
        return W13_CHUNKS * self.stages_w13 * (2 * BLOCK_BYTES + 512)

    def shared_w2(self, shape: MoeShape) -> int:
        """Dynamic shared memory of a w2 block in bytes."""
        if self.w2 == "moe/w2_many":
            return _shared_many(self.block_rows, self.stages_w2, shape)[1]
        if self.w2 == "moe/w2_group":
            return self._shared_group(self.stages_w2)
        ring = self.stages_w2 * 2 * BLOCK_BYTES
        partial = 256 * self.block_rows if self.warps_k == 1 else 0
        return self.warps_w2 * (ring + partial) + self.block_rows * shape.intermediate * 2

    def _shared_group(self, stages: int) -> int:
        return stages * (8 * BLOCK_BYTES + 64 * self.block_rows + 16) + 2048 * self.block_rows + 8


def _shared_many(rows: int, stages: int, shape: MoeShape) -> tuple[int, int]:
    # Of a block of moe_w13_many and of moe_w2_many: barriers, the ring, what sums leave through,
    # the units' tables.
    ring = 512 + stages * (64 * rows + 4 * BLOCK_BYTES)
    w13 = rows * (1024 if shape.split > 1 else 256) + (stages // (shape.hidden // 32) + 2) * 16
    w2 = rows * 512 + (stages // (shape.intermediate // 32) + 2) * (16 + 8 * rows)
    return ring + w13, ring + w2


def many(shape: MoeShape, tokens: int, gpu: Gpu, rows: int) -> Schedule:
    """The forms for dozens of rows an expert, of up to ``rows`` rows an item: as many stages as
    fit, in one block a multiprocessor."""
    items = most_items(shape, tokens * shape.top_k, rows)
    stages_w13, stages_w2 = (
        max(s for s in range(7, 17) if _shared_many(rows, s, shape)[i] + 1024 <= gpu.shared_per_sm)
        for i in range(2)
    )
    return Schedule(
        block_rows=rows,
        w13="moe/w13_many",
        w2="moe/w2_many",
        stages_w13=stages_w13,
        stages_w2=stages_w2,
        warps_w2=8,
        warps_k=1,
        tiles_per_warp=0,
        threads_w13=0,
        threads_w2=0,
        blocks_w13=min(items * -(-shape.intermediate // 128), gpu.sms),
        blocks_w2=min(items * -(-shape.hidden // 256), gpu.sms),
    )


def align_blocks(pairs: int) -> int:
    """Blocks that share the alignment of ``pairs`` (token, slot) pairs."""
    return 1 if pairs <= 2048 else 8


def most_items(shape: MoeShape, pairs: int, block_rows: int) -> int:
    """Work items at most: an expert with r rows makes ceil(r / block_rows) of them."""
    return min(pairs, min(shape.experts, pairs) + pairs // block_rows)


def _likely_items(shape: MoeShape, tokens: int, block_rows: int) -> int:
    # Of a uniform router: items on average, two where an expert has more rows than a block, and
    # three standard deviations.
    chance = shape.top_k / shape.total_experts
    none, full = (
        sum(
            comb(tokens, r) * chance**r * (1 - chance) ** (tokens - r)
            for r in range(min(rows, tokens) + 1)
        )
        for rows in (0, block_rows)
    )
    items = shape.experts * (1 - none + 1 - full)
    deviation = sqrt(max(0.0, shape.experts * (none * (1 - none) + full * (1 - full))))
    return max(1, round(items + 3 * deviation))


def schedule(shape: MoeShape, tokens: int, gpu: Gpu) -> Schedule:
    """The schedule for ``tokens`` tokens; numbers found by measuring on an H200."""
    pairs = tokens * shape.top_k
    rows = pairs / shape.total_experts  # an expert's, on average
    large = gpu.shared_per_sm >= 200 * 1024
    warpgroups = gpu.arch == "sm_90a"
    if warpgroups and rows >= MANY_ROWS:
        return many(shape, tokens, gpu, rows=64 if rows <= 48 else 96)
    # A block of moe_w2 holds its rows whole, so wide layers take fewer of them.
    slim = shape.intermediate <= 512
    most = 32 if warpgroups or (large and slim) else 16
    block_rows = min(most, 8 if rows <= NARROW_ROWS else 16 if rows <= 8 else 32)
    local = pairs * shape.experts // shape.total_experts
    few = block_rows == 8 and local * (shape.hidden // 64) < 2048
    warps_w2, warps_k = (8, shape.w2_chunks) if few else (4, 1)
    tiles_per_warp = 1 if few else 2 if block_rows < 32 else 4
    items = most_items(shape, pairs, block_rows)
    w13, w2, runs = "moe/w13", "moe/w2", shape.intermediate // 64
    if block_rows == 8:  # further ones in a second turn
        items = min(items, _likely_items(shape, tokens, block_rows))
    blocks_w13 = items * runs
    blocks_w2 = items * -(-shape.hidden // (64 * warps_w2 // warps_k * tiles_per_warp))
    if block_rows > 8:
        w13, blocks_w13 = "moe/w13_wide", items * -(-runs // 4)
        if warpgroups:
            w13, blocks_w13 = "moe/w13_group", min(blocks_w13, gpu.sms)
            if block_rows == 32 and not slim:
                w2, blocks_w2 = "moe/w2_group", min(blocks_w2, gpu.sms)
    plan = Schedule(
        block_rows=block_rows,
        w13=w13,
        w2=w2,
        stages_w13=12 if w13 == "moe/w13_group" else 4,
        stages_w2=12 if w2 == "moe/w2_group" else 3,
        warps_w2=warps_w2,
        warps_k=warps_k,
        tiles_per_warp=tiles_per_warp,
        # Assemblers differ: what fits 96 registers on sm_90a spills elsewhere.
        threads_w13=640 if warpgroups else 512,
        threads_w2=384 if block_rows == 32 else 512,
        blocks_w13=blocks_w13,
        blocks_w2=blocks_w2,
    )
    if plan.shared_w2(shape) + 1024 > gpu.shared_per_sm:
        plan = replace(plan, stages_w2=2)
    return plan


def _power_of_two_up_to(limit: int, wanted: float) -> int:
    value = 1
    while 2 * value <= limit and value < wanted:
        value *= 2
    return value
