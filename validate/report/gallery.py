"""What the page shows of codes, scales and the run: pictures with captions, and a few facts."""

from collections.abc import Callable
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from kconvert.validate.findings import Pace, Validation
from kconvert.validate.report.page import Picture
from kconvert.validate.report.pictures import bars, heat_map, ranges
from kconvert.validate.statistics import LayerStatistics

Layers = dict[int, LayerStatistics]  # in order, those of which something was read
_NAMED = 12  # outliers


def pictures(
    result: Validation, rank_bytes: dict[str, int], layer_bytes: dict[str, int]
) -> list[Picture]:
    """The pictures for which there is something to show."""
    found = [
        _bytes("Bytes by rank", rank_bytes, "Each rank's blobs, and what all ranks share."),
        _bytes("Bytes by layer", layer_bytes, "Blobs of all ranks, and what they share."),
    ]
    layers = _read(result.statistics)
    if layers:
        found += [_codes(layers), *_scales(layers)]
    if result.pace:
        found.append(_throughput(result.pace))
    for title, of_layer, caption, none in _MAPS if layers else ():
        values = np.array([of_layer(layer) for layer in layers.values()], np.float64)
        if np.isnan(values).all():
            continue
        low, high = np.nanmin(values), np.nanmax(values)
        if low == high:
            same = none if high == 0 else f"{caption} It is {high:.3g} for every one."
            found.append(Picture(title, Markup(""), same))
            continue
        where = f"Rows are layers, {min(layers)} to {max(layers)}, columns are experts."
        found.append(Picture(title, heat_map(values), f"{caption} {where}"))
    return found


def facts(statistics: Layers) -> list[tuple[str, str]]:
    """A few figures for all layers together: what, and how much."""
    layers = _read(statistics)
    if not layers:
        return []
    count, zeros, denormals, not_finite = sum(s.scales.sum(axis=0) for s in layers.values())
    weights = sum(int(s.codes.sum()) for s in layers.values())
    bits = 8 * sum(s.bytes for s in layers.values()) / weights
    far = [f"{expert} of layer {n}" for n, s in layers.items() for expert in s.outliers]
    more = f", and {len(far) - _NAMED:,} more" if len(far) > _NAMED else ""
    return [
        ("Weights", f"{weights:,}, at {bits:.3f} bits with scales, zero points and biases"),
        ("Scales", f"{count:,}: {zeros:,} zero, {denormals:,} denormal, {not_finite:,} not finite"),
        ("Experts whose mean scale is far from their layer's", ", ".join(far[:_NAMED]) + more
         or "none"),
    ]  # fmt: skip


def _read(statistics: Layers) -> Layers:
    return {n: s for n, s in sorted(statistics.items()) if s.scales[:, 0].any()}


def _short(name: str) -> str:
    """rank-00003-of-00008 → 3, layer-00060 → 60."""
    kind, _, number = name.partition("-of-")[0].partition("-")
    return str(int(number)) if kind in ("rank", "layer") and number.isdecimal() else name


def _bytes(title: str, by_name: dict[str, int], caption: str) -> Picture:
    unit, step = ("GB", 1e9) if max(by_name.values(), default=0) > 1e8 else ("MB", 1e6)
    values = [nbytes / step for nbytes in by_name.values()]
    return Picture(title, bars([_short(name) for name in by_name], values, unit), caption)


def _codes(layers: Layers) -> Picture:
    values = next(iter(layers.values())).values
    counts = sum(s.codes.sum(axis=0) for s in layers.values())
    shares: Any = 100 * counts / counts.sum()
    caption = "How often a code of each value occurs, in % of all codes, in the codes' order."
    if values[0] == -8:
        some = f"{shares[0]:.3g} % are" if counts[0] else "None is"
        caption += f" {some} −8: scales of max|w|/7 leave none, of max|w|/7.5 some."
    labels = [f"{value:g}".replace("-", "−") for value in values]
    return Picture("Codes", bars(labels, shares.tolist(), "%"), caption)


def _scales(layers: Layers) -> list[Picture]:
    if any(s.greatest.max() == 0 for s in layers.values()):
        return []
    image = ranges(
        [str(n) for n in layers],
        [s.least.min() for s in layers.values()],
        [s.totals.sum() / s.scales[:, 0].sum() for s in layers.values()],
        [s.greatest.max() for s in layers.values()],
    )
    text = "Least, mean and greatest magnitude of a layer's scales; zeros left out."
    return [Picture("Scales by layer", image, text)]


def _throughput(pace: list[Pace]) -> Picture:
    rates = [step.bytes / max(step.seconds, 1e-9) / 1e9 for step in pace]
    labels = [_short(step.group) for step in pace]
    text = "How fast blobs and source were read, layer by layer as the run went."
    return Picture("Speed of this run", bars(labels, rates, "GB/s"), text)


def _share(parts: NDArray[np.int64], of: NDArray[np.int64]) -> NDArray[np.float64]:
    """In %; NaN for experts that were not read."""
    shares = np.full(len(of), np.nan)
    np.divide(100 * parts, of, out=shares, where=of > 0)
    return shares


_MAPS: tuple[tuple[str, Callable[[LayerStatistics], NDArray[np.float64]], str, str], ...] = (
    ("Norm", lambda s: s.sizes,
     "Root mean square of an expert's weights, estimated from its codes and its scales apart.",
     "Every weight is zero."),
    ("Mean scale", lambda s: s.means, "Mean magnitude of an expert's scales.",
     "Every scale is zero."),
    ("Code 0", lambda s: _share(s.codes[:, 0], s.codes.sum(axis=1)),
     "% of an expert's codes that are stored as 0.", "No expert has a code that is stored as 0."),
    ("Zero groups", lambda s: _share(s.scales[:, 1], s.scales[:, 0]),
     "% of an expert's groups whose scale is zero.", "No expert has a group whose scale is zero."),
    ("Denormal groups", lambda s: _share(s.scales[:, 2], s.scales[:, 0]),
     "% of an expert's groups whose scale is denormal.",
     "No expert has a group whose scale is denormal."),
)  # fmt: skip
