"""The layouts by name."""

from kconvert.layouts.errors import OptionError
from kconvert.layouts.layout import Layout
from kconvert.layouts.marlin import Marlin
from kconvert.layouts.w4a16 import W4A16

_LAYOUTS: dict[str, type[Layout]] = {layout.name: layout for layout in (Marlin, W4A16)}
NAMES = tuple(_LAYOUTS)


def layout_named(name: str) -> type[Layout]:
    """The class of the layout called `name`, which is made for a quantization.

    Raises OptionError with the known names if there is none.
    """
    if not isinstance(name, str) or name not in _LAYOUTS:
        raise OptionError(f"layout {name!r} is unknown; known are {', '.join(NAMES)}.")
    return _LAYOUTS[name]
