"""The operations of a forward pass on the CPU, each row by itself.

Exactness by construction (DESIGN.md): every function computes a row's result with one and the
same sequence of instructions whatever else is in the step, so its bits cannot depend on it. A
library's matmul would not do (another row count, another blocking, other bits).

Activations are C-contiguous float32 [rows, …]; rounding them to bf16 is the caller's. Weights are
read as they lie in the blobs: bf16 as their bits, uint16, or float32. Sums are float32; the
compiler may spread them over SIMD lanes, the same way for every row.
"""

import math
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from kconvert.layouts.numba_jit import jit

Array = NDArray[np.float32]
Weight = NDArray[Any]  # uint16 (bf16 bits) or float32

SPLIT = 64  # keys a split of the committed prefix: its boundaries are multiples of this
MAX_DRAFT_DEPTH = 32  # a drafted token is less than this far from its last committed ancestor


# Reassociation lets sums use SIMD lanes. NaN and infinity keep their meaning: rejected slots are
# NaN, and a NaN that gets anywhere must show.
_jit = partial(jit, fastmath={"reassoc", "contract"})


@intrinsic
def _widen(typingctx, value):  # type: ignore[no-untyped-def]
    """A weight as float32: bf16 bits moved up, float32 as it is."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        if signature.args[0] == types.float32:
            return arguments[0]
        wide = builder.zext(arguments[0], ir.IntType(32))
        wide = builder.shl(wide, ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(wide, ir.FloatType())

    return types.float32(value), codegen


@_jit
def _linear(x, w, out):  # type: ignore[no-untyped-def]
    for n in range(w.shape[0]):
        row = w[n]
        for t in range(x.shape[0]):
            total = np.float32(0)
            for k in range(row.size):
                total += x[t, k] * _widen(row[k])
            out[t, n] = total


def linear(x: Array, w: Weight) -> Array:
    """x [T, K] times the transpose of w [N, K] → [T, N]."""
    out = np.empty((len(x), len(w)), np.float32)
    _linear(x, w, out)
    return out


@_jit
def _rms_norm(x, weight, eps, out):  # type: ignore[no-untyped-def]
    for t in range(x.shape[0]):
        total = np.float32(0)
        for k in range(x.shape[1]):
            total += x[t, k] * x[t, k]
        scale = np.float32(1) / np.sqrt(total / np.float32(x.shape[1]) + eps)
        for k in range(x.shape[1]):
            out[t, k] = _widen(weight[k]) * (x[t, k] * scale)


def rms_norm(x: Array, weight: Weight, eps: float) -> Array:
    """x [T, D] over the root of its mean square, times weight [D] → [T, D]."""
    out = np.empty(x.shape, np.float32)
    _rms_norm(np.ascontiguousarray(x), weight, np.float32(eps), out)
    return out


@_jit
def _silu_mul(gate, up, out):  # type: ignore[no-untyped-def]
    for t in range(gate.shape[0]):
        for k in range(gate.shape[1]):
            g = gate[t, k]
            out[t, k] = g / (np.float32(1) + np.float32(math.exp(-g))) * up[t, k]


def silu_mul(gate: Array, up: Array) -> Array:
    """SiLU(gate) · up, elementwise [T, N]."""
    out = np.empty(gate.shape, np.float32)
    _silu_mul(gate, up, out)
    return out


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """RoPE on interleaved pairs: x [T, H, R] with cos and sin [T, R/2] → [T, H, R]."""
    even, odd = x[..., ::2], x[..., 1::2]
    out = np.empty(x.shape, np.float32)
    out[..., ::2] = even * cos[:, None] - odd * sin[:, None]
    out[..., 1::2] = odd * cos[:, None] + even * sin[:, None]
    return out


@_jit
def _absorb(q, kv_b, out):  # type: ignore[no-untyped-def]
    for t in range(q.shape[0]):
        for h in range(q.shape[1]):
            for n in range(q.shape[2]):
                for c in range(out.shape[2]):
                    out[t, h, c] += q[t, h, n] * _widen(kv_b[h, n, c])


def absorb(q: Array, kv_b: Weight) -> Array:
    """Queries into latent space: q [T, H, nope] times the key rows of kv_b [H, nope + v, C] →
    [T, H, C]."""
    out = np.zeros((*q.shape[:2], kv_b.shape[2]), np.float32)
    _absorb(np.ascontiguousarray(q), kv_b, out)
    return out


@_jit
def _expand(context, kv_b, nope, out):  # type: ignore[no-untyped-def]
    for t in range(context.shape[0]):
        for h in range(context.shape[1]):
            for v in range(out.shape[2]):
                total = np.float32(0)
                for c in range(context.shape[2]):
                    total += context[t, h, c] * _widen(kv_b[h, nope + v, c])
                out[t, h, v] = total


def expand(context: Array, kv_b: Weight, nope: int) -> Array:
    """Attended latents [T, H, C] times the value rows of kv_b [H, nope + v, C] → [T, H, v]."""
    out = np.empty((*context.shape[:2], kv_b.shape[1] - nope), np.float32)
    _expand(context, kv_b, nope, out)
    return out


@_jit
def prefix_length(position):  # type: ignore[no-untyped-def]
    """How many keys below a query at `position` are read in splits: a fixed function of the
    position, a multiple of SPLIT, at most position − MAX_DRAFT_DEPTH: none of them is drafted."""
    return max(position - MAX_DRAFT_DEPTH, 0) // SPLIT * SPLIT


@_jit
def _split(query, keys, slots, count, scale, scores, best, total, sums):  # type: ignore[no-untyped-def]
    """Fold the keys at slots[:count] of one query into its running maximum, sum and values."""
    latent = sums.size
    highest = np.float32(-np.inf)
    for j in range(count):
        key = keys[slots[j]]
        score = np.float32(0)
        for c in range(key.size):
            score += query[c] * key[c]
        scores[j] = score * scale
        highest = max(highest, scores[j]) if scores[j] == scores[j] else scores[j]
    new = max(best, highest) if highest == highest else highest
    kept = np.float32(math.exp(best - new)) if total > 0 else np.float32(0)
    total *= kept
    for c in range(latent):
        sums[c] *= kept
    for j in range(count):
        weight = np.float32(math.exp(scores[j] - new))
        total += weight
        key = keys[slots[j]]
        for c in range(latent):
            sums[c] += weight * key[c]
    return new, total


@_jit
def _attend(queries, keys, prefix, windows, counts, scale, out):  # type: ignore[no-untyped-def]
    positions = np.arange(SPLIT)
    scores = np.empty(max(SPLIT, windows.shape[1]), np.float32)
    for t in range(queries.shape[0]):
        for h in range(queries.shape[1]):
            best, total, sums = np.float32(-np.inf), np.float32(0), out[t, h]
            for start in range(0, prefix[t], SPLIT):
                best, total = _split(
                    queries[t, h], keys[start:], positions, SPLIT, scale, scores, best, total, sums
                )
            best, total = _split(
                queries[t, h], keys, windows[t], counts[t], scale, scores, best, total, sums
            )
            for c in range(sums.size):
                sums[c] /= total


def attend(
    queries: Array,
    keys: Array,
    prefix: NDArray[np.int64],
    windows: NDArray[np.int64],
    counts: NDArray[np.int64],
    scale: float,
    latent: int,
) -> Array:
    """Multi-query attention over the latent cache, each query over its own keys.

    queries [T, H, C + R], keys [slots, C + R] (latent, then rotated key). A query reads the slots
    0 … prefix[t] − 1 in splits of SPLIT, then windows[t, :counts[t]] in that order, which is the
    order of positions; the parts are merged by log-sum-exp in that order. → [T, H, C = latent].
    """
    out = np.zeros((*queries.shape[:2], latent), np.float32)
    _attend(queries, keys, prefix, windows, counts, np.float32(scale), out)
    return out


@_jit
def _route(logits, bias, weights, ids, normalise, factor):  # type: ignore[no-untyped-def]
    experts = logits.shape[1]
    scores, ranked = np.empty(experts, np.float32), np.empty(experts, np.float32)
    for t in range(logits.shape[0]):
        for e in range(experts):
            scores[e] = np.float32(1) / (np.float32(1) + np.float32(math.exp(-logits[t, e])))
            ranked[e] = scores[e] + bias[e]
        total = np.float32(0)
        for slot in range(ids.shape[1]):
            chosen = 0
            for e in range(1, experts):
                if ranked[e] > ranked[chosen]:  # ties: the lowest id stays
                    chosen = e
            ids[t, slot], weights[t, slot] = chosen, scores[chosen]
            ranked[chosen] = -np.inf
            total += scores[chosen]
        for slot in range(ids.shape[1]):
            if normalise:
                weights[t, slot] /= total + np.float32(1e-20)
            weights[t, slot] *= factor


def route(
    logits: Array, bias: Array, top_k: int, normalise: bool, factor: float
) -> tuple[NDArray[np.int64], Array]:
    """noaux_tc router: top_k of sigmoid(logits) + bias, best first, ties to the lowest id; the
    weights are the scores without bias, normalised, times factor. → ids, weights [T, top_k]."""
    ids = np.empty((len(logits), top_k), np.int64)
    weights = np.empty((len(logits), top_k), np.float32)
    _route(logits, bias, weights, ids, normalise, np.float32(factor))
    return ids, weights


@_jit
def _add_slots(y, weights, out):  # type: ignore[no-untyped-def]
    for t in range(y.shape[0]):
        for slot in range(y.shape[1]):
            for k in range(y.shape[2]):
                out[t, k] += weights[t, slot] * y[t, slot, k]


def add_slots(y: Array, weights: Array) -> Array:
    """A token's experts y [T, top_k, D], weighted and added in slot order → [T, D]."""
    out = np.zeros((len(y), y.shape[2]), np.float32)
    _add_slots(y, weights, out)
    return out


def round_bf16(x: Array) -> Array:
    """To the nearest bf16, ties to even, as float32; infinities and NaN stay."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)))
    rounded &= np.uint32(0xFFFF0000)
    return np.where(np.isfinite(x), rounded.view(np.float32), x)


def widen(bits: Weight) -> Array:
    """bf16 bits → float32; float32 as it is."""
    if bits.dtype == np.float32:
        return bits
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
