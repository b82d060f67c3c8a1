"""The operations that a forward pass is written over, and what a backend promises.

The exactness rule (../EXACTNESS.md): each operation is row-wise, or cuts and orders its sums by
shapes and absolute positions alone, so that a row's bits never depend on what else is in a step.
Where it rounds is one table, in ../kernels/NOTES.md.

Shapes: T rows, D hidden, H heads of this rank, C kv_lora, R rope, V vocabulary; k experts a token.
An array is the backend's own kind (numpy, a tensor on some device): "activations" are rounded to
the backend's dtype, "sums" are float32. A model passes them on and never looks inside.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.experts import Matrix
from kconvert.layouts.quantization import Role
from kconvert.runtime.distributed import Ranks

DTYPES = ("float32", "bfloat16")  # what activations are rounded to
REACH = 32  # a drafted token is less than this far from its last committed ancestor

Array = Any
Weight = Any  # what `matrix` or `vector` made
Step = Any  # what `sequence` or `drafted` made: rows, and what each of them reads
Cache = Any  # what `new_cache` made
Layer = Any  # one of a cache's `layers`
Source = NDArray[Any]  # a tensor of the blobs: bf16 as its bits, uint16, or float32


class Norm(NamedTuple):
    """RMSNorm: a weight [D] and what is added to the mean square."""

    weight: Weight
    epsilon: float


class LatentNorms(NamedTuple):
    """The norms of MLA's low-rank rows; `query` is None if queries have no such rows."""

    query: Norm | None
    key: Norm


class Sampling(NamedTuple):
    """How a token is chosen (sampling.py): greedily at temperature 0."""

    temperature: float = 0.0
    seed: int = 0


class ExpertSource(Protocol):
    """A layer's routed experts on this rank, as its blob holds them."""

    layer: int
    experts: range  # the model's numbers

    def stack(self, matrix: Matrix, role: Role) -> Source:
        """All of them, as they lie in the blob."""

    def codes(self, matrix: Matrix, expert: int) -> Source:
        """Integers int8 [n, k] of the expert with this number, whose products with `scales` are its
        weights: signed codes, or for MXFP4 twice their values."""

    def scales(self, matrix: Matrix, expert: int) -> Source:
        """The scales of these codes [n, groups]."""


class Backend(Protocol):
    """Where a model's arrays live and what is done with them."""

    dtype: str
    ranks: Ranks

    # ---- weights, when a model is opened

    def matrix(self, *parts: Source) -> Weight:
        """Matrices [n, K] that multiply the same rows, stacked: [N, K]."""

    def embedding(self, table: Source) -> Weight:
        """The whole table [V, D], for `embed`; a rank may keep only its part."""

    def vector(self, values: Source) -> Weight:
        """A norm's weight or a bias, read as float32 where it is used."""

    def experts_of(self, source: ExpertSource) -> Weight:
        """A layer's routed experts, ready for `experts`."""

    # ---- a text

    def new_cache(self, slots: int) -> Cache:
        """Room for the latents of `slots` tokens; `cache.layers` are the layers' [slots, C + R]."""

    def sequence(self, tokens: NDArray[np.int64], start: int) -> Step:
        """A step of consecutive committed tokens, from position `start` on."""

    def drafted(self, token: int, start: int, tree: Any) -> Step:
        """A committed token at position `start`, not yet run, and the drafted tree below it. Node
        i's latent goes to slot start + i; it reads the committed positions, its ancestors' slots
        and its own: the same values in the same order as a committed row."""

    # ---- the forward pass, in its order

    def embed(self, table: Weight, tokens: Array) -> Array:
        """The embeddings of tokens [T], of a step or not: activations [T, D]."""

    def linear(self, x: Array, weight: Weight) -> Array:
        """x [T, K] times the transpose of weight [N, K]: activations [T, N]."""

    def sums(self, x: Array, weight: Weight) -> Array:
        """The same product as sums [T, N], not rounded."""

    def gated(self, x: Array, weight: Weight) -> Array:
        """SiLU(gate) · up, where gate and up are `linear` by the halves of a weight [gate N | up N,
        K]: activations [T, N]."""

    def sums_gated(self, x: Array, weight: Weight, sums: int) -> tuple[Array, Array]:
        """`sums` by the weight's first `sums` rows, which are a `matrix`'s first part, and `gated`
        by the others: [T, sums] and activations [T, N]."""

    def add_norm(self, x: Array, sums: Array | None, norm: Norm) -> tuple[Array, Array]:
        """x + the ranks' sums [T, D], added in rank order; that, and it normed: activations [T, D]
        both."""

    def store_latents(self, low: Array, norms: LatentNorms, step: Step, layer: Layer) -> Array:
        """low [T, Q + C + R]: norm the first Q, which is the result; norm the next C, rotate the
        last R, and write both to the rows' slots of a cache's layer."""

    def queries(self, q: Array, kv_b: Weight, step: Step) -> Array:
        """q [T, H·(nope + R)] into latent space, by the key rows of kv_b [H·(nope + v), C], and
        rotated: activations [T, H, C + R]."""

    def attend(self, queries: Array, step: Step, layer: Layer) -> Array:
        """Each query over its own keys, in the order of positions: activations [T, H, C]."""

    def expand(self, context: Array, kv_b: Weight) -> Array:
        """Attended latents times the value rows of kv_b: activations [T, H·v]."""

    def route(self, logits: Array, bias: Weight, step: Step) -> tuple[Array, Array]:
        """noaux_tc: the k experts with the greatest sigmoid(logit) + bias, best first, ties to the
        lowest id; weights are their sigmoids, normalized, times a factor. → ids, weights [T, k]."""

    def experts(
        self, h: Array, routing: tuple[Array, Array], experts: Weight, shared: Array | None
    ) -> Array:
        """This rank's part of each token's experts, added in the order of its k slots, and then
        `shared`, its part of the shared expert's sums [T, D]: sums [T, D]."""

    # ---- tokens

    def pick(self, logits: Array, step: Step, sampling: Sampling) -> Array:
        """The token that follows each row, chosen from all ranks' columns of logits; this rank has
        [T, V / ranks]. → int64 [T]. Raises CheckpointError if a row is not finite."""

    def gather(self, logits: Array) -> NDArray[np.float32]:
        """All ranks' columns of logits, in the host's memory: [T, V]."""


class HostBackend(Backend, Protocol):
    """A backend whose texts the host leads: between two forward passes it takes what a step
    accepted, and grows a tree. On a GPU that is part of a step's graph (`cuda_decoder`)."""

    def grow(
        self, ids: NDArray[np.int64], logprobs: NDArray[np.float32], budget: int, chain_seed: bool
    ) -> Any:
        """The draft tree of at most `budget` nodes over top-k tokens: drafting/ddtree.py."""

    def walk(self, tree: Any, chosen: Array) -> tuple[NDArray[np.int64], int]:
        """Follow the chosen tokens from the root: the accepted rows, and the token after them."""

    def compact(self, cache: Cache, step: Step, accepted: NDArray[np.int64]) -> None:
        """Keep a step's accepted rows, which move to their positions' slots. The others become NaN:
        if one is read in error, it shows."""
