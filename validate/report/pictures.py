"""Pictures for a page without a script: SVG that takes the page's colors, and maps as PNG."""

import base64
import io
from collections.abc import Sequence

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 480, 190, 76, 26
_CELL_HEIGHT = 4  # pixels of a layer in a map


def bars(labels: Sequence[str], values: Sequence[float], unit: str) -> Markup:
    """A bar for each label, from zero."""
    most = max(values, default=0) or 1
    step = (_WIDTH - _LEFT) / max(1, len(values))
    every = -(-len(labels) // 12)
    parts = [_axis(f"{most:,.3g} {unit}", "0")]
    for i, (label, value) in enumerate(zip(labels, values, strict=True)):
        height = (_HEIGHT - _BOTTOM - 8) * value / most
        x, y = _LEFT + i * step, _HEIGHT - _BOTTOM - height
        parts.append(
            f'<rect class="bar" x="{x + step * 0.1:.1f}" y="{y:.1f}" width="{step * 0.8:.1f}"'
            f' height="{height:.1f}"><title>{escape(label)}: {value:,.6g} {unit}</title></rect>'
        )
        if i % every == 0:
            parts.append(_label(x + step / 2, label))
    return _svg(parts)


def ranges(
    labels: Sequence[str], low: Sequence[float], middle: Sequence[float], high: Sequence[float]
) -> Markup:
    """A span for each label with its middle marked, on a logarithmic scale; all are above zero."""
    bottom, top = np.log10(min(low)), np.log10(max(high))
    top = max(top, bottom + 1e-9)

    def y(value: float) -> float:
        return float(8 + (_HEIGHT - _BOTTOM - 16) * (top - np.log10(value)) / (top - bottom))

    step = (_WIDTH - _LEFT) / max(1, len(labels))
    every = -(-len(labels) // 12)
    parts = [_axis(f"{max(high):.2g}", f"{min(low):.2g}")]
    for i, (label, a, b, c) in enumerate(zip(labels, low, middle, high, strict=True)):
        x = _LEFT + (i + 0.5) * step
        parts.append(
            f'<line class="span" x1="{x:.1f}" x2="{x:.1f}" y1="{y(a):.1f}" y2="{y(c):.1f}">'
            f"<title>{escape(label)}: {a:.3g} to {c:.3g}, mean {b:.3g}</title></line>"
            f'<circle class="dot" cx="{x:.1f}" cy="{y(b):.1f}" r="2.5"/>'
        )
        if i % every == 0:
            parts.append(_label(x, label))
    return _svg(parts)


def heat_map(values: NDArray[np.float64]) -> Markup:
    """A cell for each value of [layers, experts], from the least (dark) to the greatest; NaN is
    left open."""
    from matplotlib import colormaps, image

    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    shares = (values - low) / (high - low or 1)
    pixels = (colormaps["viridis"](shares) * 255).astype(np.uint8)
    pixels[np.isnan(values)] = 0
    file = io.BytesIO()
    image.imsave(file, np.repeat(pixels, _CELL_HEIGHT, axis=0), format="png")
    data = base64.b64encode(file.getvalue()).decode()
    return Markup(
        f'<img class="map" alt="map" src="data:image/png;base64,{data}">'
        f'<div class="legend"><span>{low:.3g}</span><i></i><span>{high:.3g}</span></div>'
    )


def _axis(top: str, bottom: str) -> str:
    base = _HEIGHT - _BOTTOM
    return (
        f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH}" y1="{base}" y2="{base}"/>'
        f'<text x="{_LEFT - 6}" y="14" text-anchor="end">{escape(top)}</text>'
        f'<text x="{_LEFT - 6}" y="{base}" text-anchor="end">{escape(bottom)}</text>'
    )


def _label(x: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(text)}</text>'


def _svg(parts: Sequence[str]) -> Markup:
    return Markup(f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(parts)}</svg>')
