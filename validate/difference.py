"""Where two matrices differ, and what the differing codes and scales mean. Pure."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.quantization import (
    Quantization,
    Role,
    factors,
    meaning,
    unpack_words,
    unpack_zero_points,
)
from kconvert.layouts.scan import widened
from kconvert.validate.findings import ROLE_CHECKS, Finding, Place

_SHOWN = 8  # places of a finding


def difference(
    found: NDArray[Any],
    expected: NDArray[Any],
    role: Role,
    quantization: Quantization,
    dtype: str,
    at: Finding,
) -> Finding:
    """`at` with what differs between two plain arrays of a `role`, floats as the bits of `dtype`:
    how much, and the first places row by row."""
    if role == "code":
        found, expected = (unpack_words(words, quantization.bits) for words in (found, expected))
    elif role == "zero_point":
        found, expected = unpack_zero_points(found), unpack_zero_points(expected)
    different = np.argwhere(found != expected)
    first = tuple(different[:_SHOWN].T)
    values = [_values(array[first], role, quantization, dtype) for array in (expected, found)]
    places = tuple(
        Place(row, column[0] if column else None, int(want), int(got), want_value, got_value)
        for (row, *column), want, got, want_value, got_value in zip(
            different[:_SHOWN].tolist(), expected[first], found[first], *values, strict=True
        )
    )
    what, some = ROLE_CHECKS[role].replace("-", " "), "differs" if len(different) == 1 else "differ"
    text = (
        f"{len(different):,} of its {what} {some} from the source's; first at"
        f" {sentence(places[0], role)}"
    )
    return at._replace(text=text, places=places, differing=len(different))


def sentence(place: Place, role: Role) -> str:
    """One place for a person."""
    where = f"row {place.row}" + (f", column {place.column}" if place.column is not None else "")
    expected = _shown(place.expected, place.expected_value, role)
    return f"{where}: {expected} expected, {_shown(place.found, place.found_value, role)} found"


def _shown(stored: int, value: float | None, role: Role) -> str:
    if role == "zero_point":
        return str(stored)
    if value is None:
        return f"0x{stored:x}" + ("" if role == "code" else " (not finite)")
    return f"0x{stored:x} ({value:.6g})"


def _values(
    stored: NDArray[Any], role: Role, quantization: Quantization, dtype: str
) -> list[float | None]:
    values: NDArray[Any]
    if role == "zero_point":
        values = stored
    elif role == "code":
        if quantization.zero_point:
            return [None] * len(stored)
        values = meaning(quantization, stored) / (2 if quantization.scheme == "mxfp4" else 1)
    elif role == "scale" and quantization.scheme == "mxfp4":
        values = 2 * factors(quantization, stored)
    else:
        values = widened(np.ascontiguousarray(stored), dtype)
    return [float(value) if np.isfinite(value) else None for value in values]
