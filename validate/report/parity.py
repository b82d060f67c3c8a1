"""What an engine's own check compares its loaded tensors with: every blob's tensors, as a table for
a person and as JSON for a program."""

import contextlib
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from kconvert.layouts.blob import read_blob
from kconvert.layouts.errors import KconvertError


class Held(NamedTuple):
    """A tensor in its final shape. `stride` counts elements, as torch does; `xxh3` is xxh3_128 in
    hex of its bytes, or for a stacked tensor of its experts' digests, one after the other."""

    dtype: str
    shape: list[int]
    stride: list[int]
    xxh3: str


Parity = dict[str, dict[str, Held]]  # by blob, by tensor


def parity_of(output: Path, blobs: Iterable[str]) -> Parity:
    """The tensors of `blobs`, paths under `output`, by their headers; what cannot be read is left
    out."""
    found: Parity = {}
    for path in blobs:
        with contextlib.suppress(KconvertError, OSError):  # it is among the findings
            header, info = read_blob(output / path)
            found[path] = {
                name: Held(
                    tensor.dtype,
                    [*tensor.shape],
                    [prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape))],
                    info.digests.get(name, ""),
                )
                for name, tensor in header.tensors.items()
            }
    return found


def parity_table(parity: Parity) -> dict[str, Any]:
    """For JSON."""
    return {
        path: {name: held._asdict() for name, held in tensors.items()}
        for path, tensors in parity.items()
    }
