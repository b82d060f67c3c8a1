"""The latent cache: what attention reads for every token so far, and for the nodes of a draft."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Ints = NDArray[np.int64]


class LatentCache:
    """Latents and rotated keys of every layer. A committed position's slot is the position itself;
    a draft's nodes lie after the committed ones."""

    def __init__(self, layers: int, slots: int, width: int) -> None:
        """All zero; `width` is C + R."""
        self._keys = np.zeros((layers, slots, width), np.float32)
        self.layers = list(self._keys)  # [slots, C + R] each

    def commit(self, slots: Ints, accepted: Ints) -> None:
        """Keep the `accepted` rows of a step's rows at `slots`; they move to their positions'
        slots. The others become NaN: if one is read in error, it shows."""
        start, end = slots[0], slots[0] + len(accepted)
        self._keys[:, start:end] = self._keys[:, start + accepted]
        self._keys[:, end : slots[-1] + 1] = np.nan
