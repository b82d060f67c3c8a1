"""How many draft nodes are worth verifying: `--budget auto`.

A round costs t_draft + t_verify(rows) and commits 1 + Σ q tokens on average, where q are the path
probabilities of the tree's nodes, corrected by what earlier trees promised and kept
(`Calibration`). The budget is the one with the most tokens a second. Rule: CaDDTree, arXiv
2606.01813, which grows the tree while (1 + Σ q + next) / (t_draft + t_verify) rises. If even the
best tree is slower than plain decoding, drafting pauses (`Pauses`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class CostCurve:
    """Seconds of one target forward by its row count: linear between points, never falling.

    After the last point it continues with the last slope; before the first it is flat.
    """

    rows: tuple[int, ...]  # rising
    seconds: tuple[float, ...]  # never falling

    @classmethod
    def measured(cls, points: Iterable[tuple[int, float]]) -> "CostCurve":
        """The curve that never falls and is nearest to `points` (rows, seconds) by least squares.

        Noise makes measured times fall here and there; a fall would say that more rows cost less.
        Raises ValueError if there is no point, for rows < 1, and for times that are not above 0.
        """
        by_rows: dict[int, list[float]] = {}
        for rows, seconds in sorted(points):
            if rows < 1 or not 0 < seconds < float("inf"):
                raise ValueError(f"a forward of {rows} rows in {seconds} s: both must be above 0")
            by_rows.setdefault(rows, []).append(seconds)
        if not by_rows:
            raise ValueError("no forward was measured")
        # Pool adjacent violators: neighbors that fall are replaced by their mean until none do.
        pools: list[tuple[float, int, int]] = []  # mean seconds, points, row counts
        for measured in by_rows.values():
            pool = (sum(measured) / len(measured), len(measured), 1)
            while pools and pools[-1][0] > pool[0]:
                before = pools.pop()
                count = before[1] + pool[1]
                mean = (before[0] * before[1] + pool[0] * pool[1]) / count
                pool = (mean, count, before[2] + pool[2])
            pools.append(pool)
        level = [mean for mean, _, width in pools for _ in range(width)]
        return cls(tuple(by_rows), tuple(level))

    def __call__(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Seconds of a forward of `rows` rows (root included), in the shape of `rows`."""
        asked = np.asarray(rows, np.float64)
        inside = np.interp(asked, self.rows, self.seconds)
        if len(self.rows) == 1:
            return inside
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
        return inside + slope * np.maximum(asked - self.rows[-1], 0)


def rates(
    probabilities: Sequence[float] | NDArray[np.float64],
    curve: CostCurve,
    draft_seconds: float,
    kept: float = 1.0,
) -> NDArray[np.float64]:
    """Expected tokens a second when the first 0…n nodes are verified: float64 [n + 1].

    `probabilities` [n] are the path probabilities in the order of the tree's nodes, so that
    `tree.first(argmax)` is the tree to verify; `draft_seconds` is what a draft costs, `kept` the
    share of what they promise that is accepted. If path probabilities fall and the curve bends
    upwards, growth pays up to one point, CaDDTree's. All prefixes are compared, because a measured
    curve has steps (all rows of a tile cost as much as its first) and a seeded chain comes before
    likelier nodes.
    """
    path = np.asarray(probabilities, np.float64)
    if not (np.isfinite(path) & (path >= 0)).all() or not 0 <= draft_seconds < float("inf"):
        raise ValueError("path probabilities and the draft's time must be finite and not negative")
    committed = 1 + kept * np.concatenate([[0.0], np.cumsum(path)])
    return committed / (draft_seconds + curve(1 + np.arange(len(committed))))


class Calibration:
    """The share of the drafted tokens promised by recent trees that was accepted.

    A drafter is surer of itself than the target's choices bear out, the more so if text is sampled.
    Before anything was verified, it is believed.
    """

    MEMORY = 0.98  # a round's weight falls by this with each later one: half after 34
    PRIOR = 4.0  # drafted tokens that count as promised and accepted

    def __init__(self) -> None:
        self._promised = self._accepted = 0.0

    def verified(self, promised: float, accepted: int) -> None:
        """Note that `accepted` tokens were accepted of a tree whose path probabilities sum to
        `promised`. An empty tree counts too: what is never tried is slowly forgotten."""
        self._promised = self.MEMORY * self._promised + promised
        self._accepted = self.MEMORY * self._accepted + accepted

    @property
    def kept(self) -> float:
        """Accepted tokens for each one promised; at most 1, or paths would be more than certain."""
        return min(1.0, (self.PRIOR + self._accepted) / (self.PRIOR + self._promised))


class Pauses:
    """When not to draft: after a draft that does not pay, for one round, and for 2, 4 … LONGEST
    rounds if the drafts that follow do not pay either."""

    LONGEST = 64

    def __init__(self) -> None:
        self._length = self._left = 0

    def drafted(self, pays: bool) -> None:
        """Note whether the newest draft's best tree is faster than plain decoding."""
        self._length = 0 if pays else min(max(2 * self._length, 1), self.LONGEST)
        self._left = self._length

    def __bool__(self) -> bool:
        """Whether this round does without a draft."""
        return self._left > 0

    def over(self) -> None:
        """Note that a round has done without."""
        self._left -= 1
