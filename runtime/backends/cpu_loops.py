"""The CPU backend's loops: the same sequence of instructions for each row.

They are exact by construction: a row's sums are taken in the same order whatever else is in the
step, so its bits cannot depend on it. (A library's matmul gives other bits for other row counts.)
Arrays are C-contiguous float32 [rows, …]; weights are read as they lie in the blobs,
bf16 as their bits, uint16, or float32. Sums are float32; the compiler may spread them over SIMD
lanes, the same way for every row. `bf16` says whether results are rounded to it.
"""

import math
from functools import partial

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kconvert.layouts.numba_jit import jit

# Reassociation lets sums use SIMD lanes. NaN and infinity keep their meaning: rejected slots are
# NaN, and a NaN that gets anywhere must show.
fast = partial(jit, fastmath={"reassoc", "contract"})


@intrinsic
def wide(typingctx, value):  # type: ignore[no-untyped-def]
    """A weight as float32: bf16 bits moved up, float32 as it is."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        if signature.args[0] == types.float32:
            return arguments[0]
        long = builder.zext(arguments[0], ir.IntType(32))
        long = builder.shl(long, ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(long, ir.FloatType())

    return types.float32(value), codegen


@intrinsic
def nearest_bf16(typingctx, value):  # type: ignore[no-untyped-def]
    """A float32 to the nearest bf16, ties to even, as float32; infinities and NaN stay."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        word = ir.IntType(32)
        bits = builder.bitcast(arguments[0], word)
        odd = builder.and_(builder.lshr(bits, ir.Constant(word, 16)), ir.Constant(word, 1))
        up = builder.add(bits, builder.add(odd, ir.Constant(word, 0x7FFF)))
        up = builder.and_(up, ir.Constant(word, 0xFFFF0000))
        exponent = builder.and_(bits, ir.Constant(word, 0x7F800000))
        special = builder.icmp_unsigned("==", exponent, ir.Constant(word, 0x7F800000))
        return builder.bitcast(builder.select(special, bits, up), ir.FloatType())

    return types.float32(types.float32), codegen


@fast
def rounded(values, bf16):  # type: ignore[no-untyped-def]
    """Round values [n] to bf16 in place, if `bf16`."""
    if bf16:
        for i in range(values.size):
            values[i] = nearest_bf16(values[i])


@fast
def embed(table, tokens, out):  # type: ignore[no-untyped-def]
    for t in range(tokens.size):
        row = table[tokens[t]]
        for k in range(row.size):
            out[t, k] = wide(row[k])


@fast
def linear(x, w, first, bf16, out):  # type: ignore[no-untyped-def]
    """x [T, K] times the transpose of w [N, K] into the columns of out from `first` on."""
    for n in range(w.shape[0]):
        row = w[n]
        for t in range(x.shape[0]):
            total = np.float32(0)
            for k in range(row.size):
                total += x[t, k] * wide(row[k])
            out[t, first + n] = nearest_bf16(total) if bf16 else total


@fast
def add(x, sums, bf16, out):  # type: ignore[no-untyped-def]
    for t in range(x.shape[0]):
        for k in range(x.shape[1]):
            out[t, k] = x[t, k] + sums[t, k]
        rounded(out[t], bf16)


@fast
def rms_norm(x, weight, epsilon, bf16, out):  # type: ignore[no-untyped-def]
    """x over the root of its mean square, times weight: all [D]."""
    total = np.float32(0)
    for k in range(x.size):
        total += x[k] * x[k]
    scale = np.float32(1) / np.sqrt(total / np.float32(x.size) + epsilon)
    for k in range(x.size):
        out[k] = wide(weight[k]) * (x[k] * scale)
    rounded(out, bf16)


@fast
def norm_rows(x, weight, epsilon, bf16, out):  # type: ignore[no-untyped-def]
    for t in range(x.shape[0]):
        rms_norm(x[t], weight, epsilon, bf16, out[t])


@jit  # no sum here: the backends' rotations have the same bits
def rotate(x, cos, sin, out):  # type: ignore[no-untyped-def]
    """RoPE on interleaved pairs: x, out [R], cos and sin [R/2]."""
    for i in range(cos.size):
        even, odd = x[2 * i], x[2 * i + 1]
        out[2 * i] = even * cos[i] - odd * sin[i]
        out[2 * i + 1] = odd * cos[i] + even * sin[i]


@fast
def store_latents(low, weight, epsilon, positions, slots, cos, sin, latent, bf16, keys):  # type: ignore[no-untyped-def]
    """Norm the latents of low [T, C + R], rotate its keys, and write both into keys [slots,
    C + R]."""
    for t in range(low.shape[0]):
        row, p = keys[slots[t]], positions[t]
        rms_norm(low[t, :latent], weight, epsilon, bf16, row[:latent])
        rotate(low[t, latent:], cos[p], sin[p], row[latent:])
        rounded(row[latent:], bf16)


@fast
def queries(q, kv_b, positions, cos, sin, bf16, out):  # type: ignore[no-untyped-def]
    """q [T, H, nope + R] times the key rows of kv_b [H, nope + v, C] → out [T, H, C + R]."""
    latent = kv_b.shape[2]
    nope = q.shape[2] - (out.shape[2] - latent)
    for t in range(q.shape[0]):
        p = positions[t]
        for h in range(q.shape[1]):
            row = out[t, h, :latent]
            row[:] = np.float32(0)
            for n in range(nope):
                for c in range(latent):
                    row[c] += q[t, h, n] * wide(kv_b[h, n, c])
            rotate(q[t, h, nope:], cos[p], sin[p], out[t, h, latent:])
            rounded(out[t, h], bf16)


@fast
def expand(context, kv_b, nope, bf16, out):  # type: ignore[no-untyped-def]
    """context [T, H, C] times the value rows of kv_b [H, nope + v, C] → out [T, H, v]."""
    for t in range(context.shape[0]):
        for h in range(context.shape[1]):
            for v in range(out.shape[2]):
                total = np.float32(0)
                for c in range(context.shape[2]):
                    total += context[t, h, c] * wide(kv_b[h, nope + v, c])
                out[t, h, v] = nearest_bf16(total) if bf16 else total


@fast
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


@fast
def attend(queries, keys, split, prefix, windows, counts, scale, bf16, out):  # type: ignore[no-untyped-def]
    """A query reads the slots 0 … prefix[t] − 1 in splits, then windows[t, :counts[t]] in order,
    which is that of their positions; the parts are merged by log-sum-exp in the same order."""
    positions = np.arange(split)
    scores = np.empty(max(split, windows.shape[1]), np.float32)
    for t in range(queries.shape[0]):
        for h in range(queries.shape[1]):
            query, sums = queries[t, h], out[t, h]
            best, total = np.float32(-np.inf), np.float32(0)
            sums[:] = np.float32(0)
            for start in range(0, prefix[t], split):
                best, total = _split(
                    query, keys[start:], positions, split, scale, scores, best, total, sums
                )
            best, total = _split(
                query, keys, windows[t], counts[t], scale, scores, best, total, sums
            )
            for c in range(sums.size):
                sums[c] /= total
            rounded(sums, bf16)


@fast
def silu_mul(gate_up, bf16, out):  # type: ignore[no-untyped-def]
    size = out.shape[1]
    for t in range(out.shape[0]):
        for k in range(size):
            g = gate_up[t, k]
            out[t, k] = g / (np.float32(1) + np.float32(math.exp(-g))) * gate_up[t, size + k]
        rounded(out[t], bf16)


@fast
def route(logits, bias, normalize, factor, ids, weights):  # type: ignore[no-untyped-def]
    experts = logits.shape[1]
    scores, ranked = np.empty(experts, np.float32), np.empty(experts, np.float32)
    for t in range(logits.shape[0]):
        for e in range(experts):
            scores[e] = np.float32(1) / (np.float32(1) + np.float32(math.exp(-logits[t, e])))
            ranked[e] = scores[e] + wide(bias[e])
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
            if normalize:
                weights[t, slot] /= total + np.float32(1e-20)
            weights[t, slot] *= factor


@fast
def expert(h, ids, weights, number, w13, w2, bf16, y):  # type: ignore[no-untyped-def]
    """Write the weighted output of the expert `number` into y [T, k, D], for the rows of h [T, D]
    and the slots that chose it."""
    chosen = 0
    for t in range(ids.shape[0]):
        for slot in range(ids.shape[1]):
            chosen += ids[t, slot] == number
    where, rows = np.empty((chosen, 2), np.int64), np.empty((chosen, h.shape[1]), np.float32)
    at = 0
    for t in range(ids.shape[0]):
        for slot in range(ids.shape[1]):
            if ids[t, slot] == number:
                where[at, 0], where[at, 1] = t, slot
                rows[at] = h[t]
                at += 1
    size = w2.shape[1]
    gate_up, act = np.empty((chosen, 2 * size), np.float32), np.empty((chosen, size), np.float32)
    linear(rows, w13, 0, False, gate_up)
    silu_mul(gate_up, bf16, act)
    linear(act, w2, 0, False, rows)
    for i in range(chosen):
        t, slot = where[i]
        for k in range(h.shape[1]):
            y[t, slot, k] = weights[t, slot] * rows[i, k]
        rounded(y[t, slot], bf16)


@fast
def add_slots(y, out):  # type: ignore[no-untyped-def]
    """Add each token's experts y [T, k, D] in slot order into out [T, D]."""
    for t in range(y.shape[0]):
        for slot in range(y.shape[1]):
            for k in range(y.shape[2]):
                out[t, k] += y[t, slot, k]
