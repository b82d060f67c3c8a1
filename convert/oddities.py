"""What looks odd in an expert: sound files may have it, damaged ones do."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.errors import CheckpointError
from kconvert.layouts.formats.compressed_tensors import QuantizedMatrix
from kconvert.layouts.scan import all_one_code, scan_scales


class Oddity(NamedTuple):
    """Of a tensor: so many scales that are zero, or (0) codes that are all the same."""

    tensor: str
    zero_scales: int


def look_at(
    matrix: QuantizedMatrix, codes: NDArray[np.int32], scales: NDArray[Any]
) -> Iterator[Oddity]:
    """What is odd about a matrix. Raises CheckpointError for a scale that is NaN or infinite."""
    scanned = scan_scales(scales, matrix.scale.dtype)
    if scanned.not_finite is not None:
        row, group = scanned.not_finite
        raise CheckpointError(
            f"{matrix.scale.shard}, tensor {matrix.scale.name}: the scale of row {row}, group"
            f" {group} is not finite: the shard is damaged; download it again."
        )
    if scanned.zeros:
        yield Oddity(matrix.scale.name, scanned.zeros)
    if all_one_code(codes):
        yield Oddity(matrix.code.name, 0)


def sentences(oddities: Iterable[Oddity]) -> Iterator[str]:
    """A line for each kind, with the first tensor by name."""
    found = sorted(oddities)
    zeros = [oddity for oddity in found if oddity.zero_scales]
    uniform = [oddity.tensor for oddity in found if not oddity.zero_scales]
    if zeros:
        total = sum(oddity.zero_scales for oddity in zeros)
        yield (
            f"{total:,} scales of {len(zeros):,} tensors are zero, the first in {zeros[0].tensor}"
        )
    if uniform:
        yield f"{len(uniform):,} expert matrices are all one code, the first {uniform[0]}"
