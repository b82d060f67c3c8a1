"""How a product is cut: what a row's bits follow from, and what only its time does."""

from dataclasses import dataclass
from math import ceil

from kconvert.runtime.kernels.gpu import Gpu

CHUNKS = 4  # of K within each of the `split` parts; a warp each
STEP = 64  # k that a warp takes at once; K is a multiple
_BLOCKS = 132  # of 32 columns: with fewer, multiprocessors have too little under way


def split(n: int, k: int) -> int:
    """Blocks that share the K of a weight [n, k]: by the shape alone, for it decides the bits."""
    parts = 1
    while parts < 8 and ceil(n / 32) * parts < _BLOCKS and k >= 4 * CHUNKS * parts * STEP:
        parts *= 2
    return parts


@dataclass(frozen=True)
class Tiles:
    """How one call is laid over the GPU; no effect on any bit."""

    rows: int  # tiles of 8 rows a block takes at once
    columns: int  # tiles of 16 columns a warp has
    warps_n: int
    stages: int

    @property
    def shared(self) -> int:
        """Dynamic shared memory of a block, in bytes."""
        stage = self.warps_n * self.columns * 16 * 128 + self.rows * 8 * 128
        return CHUNKS * self.stages * stage

    def grid(self, n: int, m: int) -> tuple[int, int]:
        """Clusters over columns, blocks over rows."""
        width = 16 * self.columns * self.warps_n
        return ceil(n / width), ceil(m / (8 * self.rows))


def tiles(n: int, k: int, m: int, gpu: Gpu) -> Tiles:
    """The tiles for `m` rows: as many stages as there are steps for, and, if that does it, so few
    that all blocks are on the GPU at once."""
    large = gpu.shared_per_sm >= 200 * 1024
    most = 9 if large else 6
    rows = ceil(ceil(m / ceil(m / (8 * most))) / 8)
    columns = 1 if rows <= 2 else 2
    warps_n = 2 if rows > 5 and large else 1
    most = 4 if rows <= 2 and large else 3 if rows <= 2 or large else 2
    steps = ceil(k / (STEP * CHUNKS * split(n, k)))
    plans = [
        Tiles(rows, columns, warps_n, stages)
        for stages in range(max(2, min(most, steps + 1)), 1, -1)
    ]
    return next((plan for plan in plans if _at_once(plan, n, k, m, gpu)), plans[0])


def _at_once(plan: Tiles, n: int, k: int, m: int, gpu: Gpu) -> bool:
    across, down = plan.grid(n, m)
    here = gpu.shared_per_sm // (plan.shared + 1024)
    return across * down * split(n, k) <= here * gpu.sms
