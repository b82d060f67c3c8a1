"""The one way to compile with numba: at first use, and once on each machine (numba's own cache
falls back to the user's cache folder if the install folder is read-only)."""

from collections.abc import Callable
from typing import Any

import numba


def jit(function: Callable[..., Any], **options: Any) -> Any:
    """Compile with numba at first call, without the GIL, cached on disk if that is possible."""
    try:
        return numba.njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:  # no folder anywhere that numba could write its cache to
        return numba.njit(nogil=True, **options)(function)
