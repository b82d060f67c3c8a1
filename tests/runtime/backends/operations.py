"""Every operation of a backend on the same random inputs, for comparing backends one by one."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.marlin import pack_weight, permute_scales
from kconvert.runtime.backends.cpu_loops import rounded
from kconvert.runtime.backends.protocol import LatentNorms, Norm
from kconvert.runtime.config import ModelConfig
from kconvert.runtime.drafting.ddtree import Tree

# Below the first boundary of a prefix, at it, past it, past several.
STARTS = (0, 31, 95, 96, 130, 300)


def bits(values: NDArray[np.float64]) -> NDArray[np.uint16]:
    """The bf16 nearest to each, as its bits."""
    narrow = values.astype(np.float32)
    rounded(narrow.reshape(-1), True)
    return (narrow.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


class RandomExperts:
    """An ExpertSource of experts 2, 3, … with random codes and bf16 scales."""

    layer = 1

    def __init__(self, config: ModelConfig, rng: np.random.Generator, count: int = 5) -> None:
        self.experts = range(2, 2 + count)
        sizes = {
            "w13": (2 * config.moe_intermediate, config.hidden),
            "w2": (config.hidden, config.moe_intermediate),
        }
        self._codes = {m: rng.integers(-8, 8, (count, *s), np.int8) for m, s in sizes.items()}
        self._scales = {
            m: bits(rng.uniform(0.005, 0.02, (count, n, k // 32))) for m, (n, k) in sizes.items()
        }

    def stack(self, matrix: str, role: str) -> NDArray[Any]:
        """As a Marlin blob has it."""
        codes, scales = self._codes[matrix], self._scales[matrix]
        if role == "scale":
            return np.stack([permute_scales(s) for s in scales])
        nibbles = (codes + 8).astype(np.uint32).reshape(*codes.shape[:2], -1, 8)
        packed = (nibbles << np.arange(0, 32, 4, dtype=np.uint32)).sum(-1, dtype=np.uint32)
        return np.stack([pack_weight(p.view(np.int32)) for p in packed])

    def codes(self, matrix: str, expert: int) -> NDArray[np.int8]:
        return self._codes[matrix][expert - 2]

    def scales(self, matrix: str, expert: int) -> NDArray[np.uint16]:
        return self._scales[matrix][expert - 2]


class Inputs:
    """Random inputs of a config's shapes: rows of a tree at `start`, or of a text from there on."""

    def __init__(self, config: ModelConfig, start: int, tree: Tree | int, seed: int = 0) -> None:
        self.config, self.start, self.tree = config, start, tree
        self.rows = tree if isinstance(tree, int) else len(tree) + 1
        self.rng = np.random.default_rng([seed, start, self.rows])
        self.experts = RandomExperts(config, np.random.default_rng(seed))

    def step(self, ops: Any) -> Any:
        tokens = np.arange(7, 7 + self.rows)
        if isinstance(self.tree, int):
            return ops.sequence(tokens, self.start)
        return ops.drafted(7, self.start, self.tree)

    def activations(self, *shape: int) -> NDArray[np.float32]:
        """Values that bf16 holds, so that all backends start from the same."""
        return from_bits(bits(self.rng.normal(size=shape)))

    def weight(self, *shape: int) -> NDArray[np.uint16]:
        return bits(self.rng.normal(size=shape) / np.sqrt(shape[-1]))


def from_bits(values: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)


def results(ops: Any, put: Any, get: Any, given: Inputs) -> dict[str, NDArray[Any]]:
    """Each operation's result. `put(array, "activations" or "sums")` makes an array the backend's,
    `get` makes it numpy's again."""
    c, t = given.config, given.rows
    heads, out = c.heads, {}
    cache, step = ops.new_cache(given.start + t + 1), given.step(ops)
    x = given.activations(t, c.hidden)
    sums = given.rng.normal(size=(t, c.hidden)).astype(np.float32)
    embedding = ops.embedding(given.weight(c.vocabulary, c.hidden))
    out["embed"] = get(ops.embed(embedding, step.tokens))
    parts = [ops.matrix(*(given.weight(n, c.hidden) for n in sizes)) for sizes in ((96, 40), (72,))]
    out["linear"] = get(ops.linear(put(x, "activations"), parts[0]))
    out["sums"] = get(ops.sums(put(x, "activations"), parts[1]))
    gates = [
        ops.matrix(*(given.weight(n, c.hidden) for n in sizes))
        for sizes in ((24, 24), (40, 40), (96, 24, 24), (64, 72, 72), (7, 16, 16))
    ]
    for i, weight in enumerate(gates[:2]):
        out[f"gated.{i}"] = get(ops.gated(put(x, "activations"), weight))
    for i, (weight, sums_of) in enumerate(zip(gates[2:], (96, 64, 7), strict=True)):
        pair = ops.sums_gated(put(x, "activations"), weight, sums_of)
        out[f"sums_gated.{i}.sums"], out[f"sums_gated.{i}"] = map(get, pair)
    norm = Norm(ops.vector(given.weight(c.hidden)), 1e-5)
    for name, residual in (("add_norm", put(sums, "sums")), ("norm", None)):
        for part, value in enumerate(ops.add_norm(put(x, "activations"), residual, norm)):
            out[f"{name}.{part}"] = get(value)
    low = given.activations(t, c.q_lora + c.kv_lora + c.rope_dim)
    norms = LatentNorms(
        Norm(ops.vector(given.weight(c.q_lora)), 1e-6),
        Norm(ops.vector(given.weight(c.kv_lora)), 1e-6),
    )
    history = given.activations(given.start, c.kv_lora + c.rope_dim)
    layer = cache.layers[0]
    layer[: given.start] = put(history, "activations")
    layer[given.start :] = float("nan")
    out["store_latents.low"] = get(ops.store_latents(put(low, "activations"), norms, step, layer))
    out["store_latents.keys"] = get(layer[given.start : given.start + t])
    q = given.activations(t, heads * (c.nope_dim + c.rope_dim))
    kv_b = ops.matrix(given.weight(heads * (c.nope_dim + c.value_dim), c.kv_lora))
    out["queries"] = get(ops.queries(put(q, "activations"), kv_b, step))
    queries = given.activations(t, heads, c.kv_lora + c.rope_dim)
    fresh = given.activations(t, c.kv_lora + c.rope_dim)
    layer[given.start : given.start + t] = put(fresh, "activations")
    out["attend"] = get(ops.attend(put(queries, "activations"), step, layer))
    context = given.activations(t, heads, c.kv_lora)
    out["expand"] = get(ops.expand(put(context, "activations"), kv_b))
    logits = given.rng.normal(size=(t, c.experts)).astype(np.float32)
    bias = given.rng.normal(size=c.experts).astype(np.float32)
    logits[:, 4:6], bias[4:6] = logits[:, 2:4], bias[2:4]  # ties
    ids, weights = ops.route(put(logits, "sums"), ops.vector(bias), step)
    out["route.ids"], out["route.weights"] = get(ids).astype(np.int64), get(weights)
    experts = ops.experts_of(given.experts)
    for name, shared in (("experts", None), ("experts.shared", put(sums, "sums"))):
        out[name] = get(ops.experts(put(x, "activations"), (ids, weights), experts, shared))
    return out


def relative(found: NDArray[Any], wanted: NDArray[Any]) -> float:
    """The norm of the difference over that of what was wanted; NaN never passes a bound."""
    assert found.shape == wanted.shape
    size = np.linalg.norm(wanted.astype(np.float64))
    difference = np.linalg.norm(found.astype(np.float64) - wanted.astype(np.float64))
    return float(difference / size if size else difference)
