"""The engine of one rank, opened without a checkpoint."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kconvert.layouts.errors import UnavailableError, UnsupportedError
from kconvert.runtime.backends.cuda import CudaBackend
from kconvert.runtime.backends.cuda_decoder import DRAFTED, CudaDecoder
from kconvert.runtime.bench.shape.standin import StandIn
from kconvert.runtime.bench.shape.weights import MadeUpBlobs, drafter_weights
from kconvert.runtime.config import ModelConfig
from kconvert.runtime.distributed import Ranks
from kconvert.runtime.drafting.cuda_drafter import CudaDrafter, check
from kconvert.runtime.drafting.dflash_config import ARCHITECTURE, DrafterConfig
from kconvert.runtime.drafting.sharding import share_of
from kconvert.runtime.engine import Engine
from kconvert.runtime.kernels.tree.launch import SPLIT, StepRows
from kconvert.runtime.model import Model

_ROOM = 16 << 30  # bytes beside the weights: caches of 32k tokens, work, graphs, CUDA's own


def open_rank(config: ModelConfig, size: int, here: Ranks, seed: int, device: Any) -> Engine:
    """`here`'s rank of `size`, which exchanges with those that are processes. The drafter is one of
    z-lab's sizes for such a target.

    Raises UnsupportedError where the model does not divide, UnavailableError where the GPU's memory
    is too small.
    """
    ranks = here if here.size == size else StandIn.around(here, size)
    shape = drafter_config(config, size)
    share = share_of(shape, ranks)
    check(share.config)
    blobs = MadeUpBlobs(config, ranks, seed)
    _check_memory(weight_bytes(blobs, config) + share.nbytes, device)
    backend = CudaBackend(config, ranks, device)
    model = Model(config, blobs, backend)
    _ = model.weights
    drafter = CudaDrafter(share, drafter_weights(share, seed, ranks.rank, device), model)
    return Engine(model, drafter, RankDecoder(model, drafter, seed))


def weight_bytes(blobs: MadeUpBlobs, config: ModelConfig) -> int:
    """Bytes of the target's weights on a rank: made on torch's device without memory, so nothing
    is allocated."""
    ranks = Ranks(blobs.rank, blobs.manifest.tp)
    alone = _Weighed(ranks.rank, ranks.size)
    weights = Model(config, blobs, CudaBackend(config, alone, torch.device("meta"))).weights
    return nbytes_of(weights)


class _Weighed(Ranks):
    def shared_memory(self, size: int, device: Any) -> None:
        return None


def nbytes_of(weights: Any) -> int:
    """Bytes of all tensors in them."""
    if isinstance(weights, Tensor):
        return weights.nbytes
    if isinstance(weights, (tuple, list)):
        return sum(map(nbytes_of, weights))
    return sum(map(nbytes_of, vars(weights).values())) if hasattr(weights, "__dict__") else 0


def _check_memory(weights: int, device: torch.device) -> None:
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    if weights + _ROOM > free:
        raise UnavailableError(
            f"one rank has {weights / 1e9:.1f} GB of weights and wants {_ROOM / 1e9:.1f} GB beside"
            f" them, {free / 1e9:.1f} GB of the GPU's memory are free: give a larger --rank-of."
        )


def drafter_config(config: ModelConfig, size: int) -> DrafterConfig:
    """A DFlash drafter as z-lab makes them for such a target: of K2.6's sizes its Kimi-K2.6-DFlash,
    but for the mask's token, which is one that rank 0 of `size` has."""
    if config.layers < 4:
        raise UnsupportedError(f"{config.layers} layers: a drafter reads some of at least 4.")
    layers = min(6, config.layers - 3)
    spaced = [1 + round(i * (config.layers - 4) / max(1, layers - 1)) for i in range(layers)]
    return DrafterConfig.from_json({
        "architectures": [ARCHITECTURE], "model_type": "qwen3", "hidden_act": "silu",
        "hidden_size": config.hidden, "num_hidden_layers": layers,
        "num_attention_heads": config.heads, "num_key_value_heads": max(1, config.heads // 8),
        "head_dim": config.nope_dim, "intermediate_size": config.dense_intermediate,
        "vocab_size": config.vocabulary, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0, "block_size": 8, "num_target_layers": config.layers,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096,
            "beta_fast": 32.0, "beta_slow": 1.0,
        },
        "dflash_config": {
            "mask_token_id": config.vocabulary // size - 1, "target_layer_ids": spaced,
        },
        "use_sliding_window": True, "sliding_window": 2048,
        "layer_types": ["sliding_attention"] * (layers - 1) + ["full_attention"],
    })  # fmt: skip


class RankDecoder(CudaDecoder):
    """Its texts' prompts are taken for read: what lies in the caches for all of their tokens but
    the last is made up. Tokens are those that rank 0 has: an absent rank's have no embedding."""

    def __init__(self, model: Model, drafter: CudaDrafter | None, seed: int) -> None:
        super().__init__(model, drafter)
        self._seed = seed

    def _prefill(
        self, prompt: NDArray[np.int64], at_once: int, drafts: bool, first: int = 0
    ) -> Tensor:
        context = len(prompt) - 1
        caches = [*self._cache.layers, *(self.drafter._caches if self.drafter else ())]
        make_context(caches, context, self._seed)
        return super()._prefill(prompt, at_once, drafts, context)

    def unlike_tokens(self, count: int) -> NDArray[np.int64]:
        return some_tokens(self.model, count)

    def again(self, rows: int) -> None:
        """One more step, with its draft, of the text before, kernel by kernel."""
        self._step(rows, DRAFTED)

    def verify(self, step: StepRows) -> None:
        """What a step does with drafted rows: forward, logits, each rank's choices."""
        step = replace(step, parts=self._capacity // SPLIT + 1)  # as a step that `grow` writes
        hidden, _ = self.model.forward(step, self._cache)
        self._ops.choices(self.model.head(hidden), step, self._sampling)

    @property
    def slots(self) -> int:
        """The cache's slots, which attention's grid follows."""
        return self._capacity


def make_context(caches: list[Any], length: int, seed: int) -> None:
    """N(0, 1) in the first `length` slots: latents after their norm, or keys and values."""
    for number, cache in enumerate(caches):
        if isinstance(cache, Tensor):
            generator = torch.Generator(cache.device).manual_seed(seed + number)
            cache[:length].normal_(generator=generator)
        else:
            rng = np.random.default_rng([seed, number])
            cache[:length] = rng.standard_normal(cache[:length].shape, np.float32)


def some_tokens(model: Model, count: int, seed: int = 0) -> NDArray[np.int64]:
    """Unlike tokens, as far as there are so many, of those that rank 0 has."""
    here = model.config.vocabulary // model.backend.ranks.size
    order = np.random.default_rng(seed).permutation(here)
    return np.resize(order, count).astype(np.int64)
