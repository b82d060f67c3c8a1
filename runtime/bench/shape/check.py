"""Right at this size: two layers against the twins in float64, and the bits of 16 tokens through
all layers, one by one, in chains and in trees. What is not right is not timed."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kconvert.layouts.experts import STACKED
from kconvert.layouts.quantization import factors, integers
from kconvert.runtime.backends.cuda import Experts
from kconvert.runtime.backends.protocol import LatentNorms, Norm
from kconvert.runtime.backends.torch_twins import TwinBackend
from kconvert.runtime.bench.agreement import TOSS, margin, recorded
from kconvert.runtime.bench.shape.rank import make_context, some_tokens
from kconvert.runtime.drafting.ddtree import Tree
from kconvert.runtime.engine import Engine
from kconvert.runtime.model import Layer, Mlp, Model, Moe, Weights

NEAR = 6e-3  # of a layer's output, relative, from float64's
TOKENS = 16
CHAIN = 8
TREES = (16, 33)  # rows of a step


def check(engine: Engine, contexts: Sequence[int], seed: int) -> dict[str, Any]:
    """How far the dense layer and the first MoE layer are from float64, relatively; and for each
    context and way of running the 16 tokens, whether their logits have the bits of one by one."""
    near = [layer_near(engine, number, contexts[0], seed) for number in layers_compared(engine)]
    bits = [
        {"context": context, **found}
        for context in contexts
        for found in same_bits(engine.model, context, seed)
    ]
    right = all(row["right"] for row in near) and all(row["same"] for row in bits)
    return {"right": right, "near": NEAR, "layers": near, "bits": bits}


def layers_compared(engine: Engine) -> list[int]:
    """The dense layer, if there is one, and the first with experts; none if other ranks hold a part
    of the sums."""
    if engine.model.backend.ranks.gpus is not None:
        return []
    first = engine.model.config.first_moe
    return [0, first] if first else [0]


# ---- a layer against float64


def layer_near(engine: Engine, number: int, context: int, seed: int) -> dict[str, Any]:
    """One layer alone, 16 rows of a chain behind `context` tokens. A row whose experts are others
    because their scores are closer than rounding is left out, and counted."""
    whole, rows = engine.model, some_tokens(engine.model, TOKENS, seed)
    model = _only(whole, whole.weights.layers[number])
    cache = whole.new_cache(context + TOKENS)
    cache.layers = cache.layers[:1]
    make_context(cache.layers, context, seed)
    history = cache.layers[0][:context].double()
    with recorded(model) as kept:
        _, (found,) = model.forward(whole.backend.sequence(rows, context), cache, [0])
    twin = TwinBackend(whole.config, "float32", str(history.device), torch.float64)
    chosen = {int(e) for _, ids in kept.calls for e in np.unique(ids)}
    other = Model(whole.config, whole.blobs, twin)
    vars(other)["weights"] = _wide(model.weights, twin, whole, number, chosen)
    truth = twin.new_cache(context + TOKENS)
    truth.layers = truth.layers[:1]
    truth.layers[0][:context] = history
    with recorded(other) as wanted:
        _, (right,) = other.forward(twin.sequence(rows, context), truth, [0])
    margins = [margin(kept.calls, wanted.calls, row) for row in range(TOKENS)]
    same = torch.tensor([m is None for m in margins])
    far = torch.linalg.norm(found.cpu().double() - right.cpu(), dim=1)
    far = (far / torch.linalg.norm(right.cpu(), dim=1))[same]
    largest = float(far.max()) if len(far) else float("nan")
    tosses = all(m is None or m <= TOSS for m in margins)
    return {
        "layer": number, "rows": TOKENS, "tossed": int((~same).sum()),
        "largest": largest, "right": largest <= NEAR and tosses,
    }  # fmt: skip


def _only(whole: Model, layer: Layer) -> Model:
    """A model of one layer, with the weights of that layer in another model."""
    model = Model(whole.config, whole.blobs, whole.backend)
    vars(model)["weights"] = whole.weights._replace(layers=[layer])
    return model


def _wide(
    weights: Weights, twin: TwinBackend, whole: Model, number: int, chosen: set[int]
) -> Weights:
    """The weights of one layer as the twins read them; only the `chosen` experts."""

    def wide(value: Tensor) -> Tensor:
        return value.double()

    def norm(value: Norm | None) -> Norm | None:
        return value and Norm(wide(value.weight), value.epsilon)

    (layer,) = weights.layers
    moe = layer.moe
    table: Any = getattr(weights.embedding, "table", weights.embedding)
    return Weights(
        embedding=wide(table),
        layers=[Layer(
            input_norm=norm(layer.input_norm), low=wide(layer.low),  # type: ignore[arg-type]
            latent_norms=LatentNorms(*map(norm, layer.latent_norms)),  # type: ignore[arg-type]
            queries=wide(layer.queries), kv_b=wide(layer.kv_b), output=wide(layer.output),
            mlp_norm=norm(layer.mlp_norm),  # type: ignore[arg-type]
            moe=moe and Moe(
                wide(moe.first), wide(moe.bias),
                twin.experts_of(_Chosen(moe.experts, whole, number, chosen)),
                None if moe.down is None else wide(moe.down),
            ),
            mlp=layer.mlp and Mlp(*map(wide, layer.mlp)),
        )],
        norm=norm(weights.norm),  # type: ignore[arg-type]
        head=wide(weights.head[:1]),
    )  # fmt: skip


class _Chosen:
    """The protocol's ExpertSource: some experts, as they lie on the GPU."""

    def __init__(self, experts: Experts, whole: Model, layer: int, chosen: set[int]) -> None:
        self.layer, self._layout = layer, whole.blobs.layout
        self.experts: Any = sorted(chosen)
        self._stacks = dict(zip(
            ((tensor.matrix, tensor.role) for tensor in STACKED), vars(experts.weights).values(),
            strict=True,
        ))  # fmt: skip
        self._first = experts.shape.first_expert

    def stack(self, matrix: Any, role: Any) -> Any:
        return self._stacks[matrix, role]

    def codes(self, matrix: Any, expert: int) -> Any:
        return integers(self._layout.quantization, self._unpacked(matrix, "code", expert))  # type: ignore[union-attr]

    def scales(self, matrix: Any, expert: int) -> Any:
        return factors(self._layout.quantization, self._unpacked(matrix, "scale", expert))  # type: ignore[union-attr]

    def _unpacked(self, matrix: Any, role: Any, expert: int) -> NDArray[Any]:
        stored = self._stacks[matrix, role][expert - self._first].cpu()
        if role == "scale":
            return self._layout.unpack(role, stored.view(torch.int16).numpy().view(np.uint16))  # type: ignore[union-attr]
        return self._layout.unpack(role, stored.numpy())  # type: ignore[union-attr]


# ---- bits


def same_bits(model: Model, context: int, seed: int) -> Iterator[dict[str, Any]]:
    """16 tokens behind `context` others: the logits of this rank's columns, way by way."""
    tokens = some_tokens(model, TOKENS, seed)
    truth = _run(model, context, seed, tokens, [_chain(tokens[i : i + 1]) for i in range(TOKENS)])
    chains = [_chain(tokens[i : i + CHAIN]) for i in range(0, TOKENS, CHAIN)]
    ways = {
        "again": [_chain(tokens[i : i + 1]) for i in range(TOKENS)],
        f"chains of {CHAIN}": chains,
    } | {
        f"trees of {rows}": [
            _among(model, tokens[i : i + CHAIN], rows, seed + i) for i in range(0, TOKENS, CHAIN)
        ]
        for rows in TREES
    }
    for name, steps in ways.items():
        found = _run(model, context, seed, tokens, steps)
        equal = (found.view(np.uint32) == truth.view(np.uint32)).all(axis=1)
        finite = bool(np.isfinite(found).all())
        yield {"way": name, "same": bool(equal.all()) and finite, "tokens": int(equal.sum())}


Drafted = tuple[int, Tree, list[int]]  # the first token, the tree below it, the rows that count


def _chain(tokens: NDArray[np.int64]) -> Drafted:
    count = len(tokens)
    parents = np.arange(-1, count - 1)
    tree = Tree(tokens[1:], np.arange(1, count), parents, np.zeros(count - 1))
    return int(tokens[0]), tree, list(range(count))


def _among(model: Model, path: NDArray[np.int64], rows: int, seed: int) -> Drafted:
    """`path` down a tree of `rows` rows, the others hung anywhere, before and behind it."""
    rng = np.random.default_rng(seed)
    others = some_tokens(model, rows, seed + 1)
    at = [0, *sorted(rng.choice(np.arange(1, rows), len(path) - 1, replace=False).tolist())]
    tokens, depths, parents = [int(path[0])], [0], [-1]
    for row in range(1, rows):
        parent = at[at.index(row) - 1] if row in at else int(rng.integers(row))
        tokens.append(int(path[at.index(row)]) if row in at else int(others[row]))
        depths.append(depths[parent] + 1)
        parents.append(parent)
    tree = Tree(np.array(tokens[1:]), np.array(depths[1:]), np.array(parents), np.zeros(rows - 1))
    return tokens[0], tree, at


def _run(
    model: Model, context: int, seed: int, tokens: NDArray[np.int64], steps: Sequence[Drafted]
) -> NDArray[np.float32]:
    """float32 [T, V / ranks] of the rows that count, each step behind those of the steps before."""
    ops, made, start = model.backend, [], context
    cache = model.new_cache(context + TOKENS + max(TREES))
    make_context(cache.layers, context, seed)
    for token, tree, rows in steps:
        hidden, _ = model.forward(ops.drafted(token, start, tree), cache)
        logits = model.head(hidden)[rows]
        made.append(logits if isinstance(logits, np.ndarray) else logits.cpu().numpy())
        for layer in cache.layers:
            end = start + len(rows)
            layer[start:end] = layer[[start + row for row in rows]]
            layer[end : start + len(tree) + 1] = float("nan")
        start += len(rows)
    assert start == context + len(tokens)
    return np.concatenate(made)
