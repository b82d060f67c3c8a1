"""What looks odd in an expert: a sound file may have it, a damaged one does."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.errors import CheckpointError
from kconvert.layouts.formats.format import QuantizedMatrix
from kconvert.layouts.quantization import Quantization
from kconvert.layouts.scan import all_one_code, scan_scales


@dataclass(frozen=True)
class Oddity:
    """A tensor with scales that are zero, one code everywhere, or scales that a cast rounded."""

    kind: Literal["zero", "uniform", "rounded"]
    tensor: str
    count: int = 0


def look_at(
    matrix: QuantizedMatrix,
    quantization: Quantization,
    codes: NDArray[np.int32],
    scales: NDArray[Any],
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
        yield Oddity("zero", matrix.scale.name, scanned.zeros)
    if all_one_code(codes, quantization.bits):
        yield Oddity("uniform", matrix.code.name)


def sentences(oddities: Iterable[Oddity]) -> Iterator[str]:
    """A line for each kind, with the first tensor by name."""
    found = sorted(oddities, key=lambda oddity: (oddity.tensor, oddity.count))
    by_kind = {
        kind: [o for o in found if o.kind == kind] for kind in ("zero", "uniform", "rounded")
    }
    for kind, what in (("zero", "are zero"), ("rounded", "were rounded to bfloat16")):
        odd = by_kind[kind]
        if odd:
            total = sum(oddity.count for oddity in odd)
            yield f"{total:,} scales of {len(odd):,} tensors {what}, the first in {odd[0].tensor}"
    if uniform := by_kind["uniform"]:
        yield f"{len(uniform):,} expert matrices are all one code, the first {uniform[0].tensor}"
