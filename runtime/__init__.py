"""The engine: it runs a converted model with draft trees, on the CPU or with its CUDA kernels."""

from typing import TYPE_CHECKING

from kconvert.layouts import lazily

__all__ = ["Engine", "Generation", "Ranks", "Tokenizer", "ranks_from_environment"]

if TYPE_CHECKING:
    from kconvert.runtime.distributed import Ranks, ranks_from_environment
    from kconvert.runtime.engine import Engine, Generation
    from kconvert.runtime.tokenizer import Tokenizer
else:
    __getattr__ = lazily(
        __name__,
        {
            "Engine": "engine",
            "Generation": "engine",
            "Ranks": "distributed",
            "Tokenizer": "tokenizer",
            "ranks_from_environment": "distributed",
        },
    )
