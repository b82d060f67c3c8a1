"""How a product is cut: what a row's bits follow from, and what only its time does."""

from dataclasses import dataclass
from math import ceil

from kconvert.runtime.kernels.gpu import Gpu

CHUNKS = 4  # of K within each of the `split` parts; a warp each
STEP = 64  # k that a warp takes at once; K is a multiple
_WARPS = 1024  # that a GPU wants for one row


def split(n: int, k: int) -> int:
    """Blocks that share the K of a weight [n, k]: by the shape alone, for it decides the bits."""
    parts = 1
    while parts < 8 and ceil(n / 16) * CHUNKS * parts < _WARPS and k >= 4 * CHUNKS * parts * STEP:
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


def tiles(n: int, m: int, gpu: Gpu) -> Tiles:
    """The tiles for `m` rows."""
    large = gpu.shared_per_sm >= 200 * 1024
    most = 9 if large else 6
    rows = ceil(ceil(m / ceil(m / (8 * most))) / 8)
    columns = 1 if rows <= 2 else 2
    warps_n = 2 if rows > 5 and large else 1
    stages = 4 if rows <= 2 and large else 3 if rows <= 2 or large else 2
    return Tiles(rows, columns, warps_n, stages)
