"""The engine: a converted model run with draft trees, and the CUDA kernels it is made of."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kconvert.runtime.engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    """`kconvert.runtime.Engine`, loaded when it is asked for: torch takes seconds."""
    if name != "Engine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kconvert.runtime.engine import Engine

    return Engine
