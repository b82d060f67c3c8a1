"""The CPU's operations against their twins in torch and against float64, one by one."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import pytest
import torch
from kit import KIMI_MINI
from operations import STARTS, Inputs, relative, results

from kconvert.runtime.backends.cpu import CpuBackend
from kconvert.runtime.backends.protocol import Sampling
from kconvert.runtime.backends.torch_twins import TwinBackend
from kconvert.runtime.config import read_config
from kconvert.runtime.distributed import Ranks
from kconvert.runtime.drafting.ddtree import build_tree

MODELS = {"kimi-mini": KIMI_MINI, "tiny_kimi": Path(__file__).parents[2] / "tiny_kimi/model"}
RNG = np.random.default_rng(0)
LOGPROBS = np.sort(-RNG.exponential(size=(7, 16)).astype(np.float32))[:, ::-1]
TREE = build_tree(np.tile(np.arange(16), (7, 1)), LOGPROBS, 16)


def cpu_results(config, dtype: str, given: Inputs) -> dict[str, np.ndarray]:
    return results(CpuBackend(config, Ranks(), dtype), lambda a, kind: a, np.array, given)


def twin_results(config, dtype: str, wide: torch.dtype, given: Inputs) -> dict[str, np.ndarray]:
    twins = TwinBackend(config, dtype, wide=wide)
    kinds = {"activations": torch.bfloat16 if dtype == "bfloat16" else wide, "sums": wide}
    return results(
        twins,
        lambda a, kind: torch.from_numpy(a).to(kinds[kind]),
        lambda a: a.double().numpy().copy(),
        given,
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_operations_agree_with_their_twins_and_with_float64(model: str, dtype: str) -> None:
    config = read_config(MODELS[model])
    bounds = (2e-6, 2e-6) if dtype == "float32" else (2e-3, 6e-3)
    for start in STARTS[::2] if dtype == "float32" else STARTS[1::2]:
        for tree in (TREE, 1, 40):
            found = cpu_results(config, dtype, Inputs(config, start, tree))
            twins = twin_results(config, dtype, torch.float32, Inputs(config, start, tree))
            exact = twin_results(config, "float32", torch.float64, Inputs(config, start, tree))
            for name, value in found.items():
                where = f"{name}, start {start}, {len(value)} rows"
                if name == "route.ids":
                    assert np.array_equal(value, twins[name]), where
                    continue
                assert relative(value, twins[name]) <= bounds[0], where
                assert relative(value, exact[name]) <= bounds[1], where


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rows_bits_do_not_depend_on_the_others(dtype: str) -> None:
    """Inputs of 40 rows of text; the first 1, 7 and 33 of them alone."""
    config = read_config(KIMI_MINI)
    ops = CpuBackend(config, Ranks(), dtype)
    given = Inputs(config, 0, 40)
    x, gate_up = given.activations(40, config.hidden), given.activations(40, 256)
    w = ops.matrix(given.weight(144, config.hidden))
    router = ops.matrix(given.weight(config.experts, config.hidden))
    bias, experts = ops.vector(np.zeros(config.experts, np.float32)), ops.experts_of(given.experts)

    def outputs(rows: np.ndarray) -> list[np.ndarray]:
        h = x[rows]
        routing = ops.route(ops.sums(h, router), bias, None)
        return [
            ops.linear(h, w), ops.sums(h, w), ops.silu_mul(gate_up[rows]), *routing,
            ops.experts(h, routing, experts, None),
        ]  # fmt: skip

    whole = outputs(np.arange(40))
    for rows in (np.arange(1), np.arange(7), RNG.permutation(40)[:33]):
        for alone, among in zip(outputs(rows), whole, strict=True):
            assert np.array_equal(alone, among[rows])


def test_pick_takes_what_the_whole_row_would() -> None:
    """A rank's columns each, as two ranks see them."""

    class Half(Ranks):
        def gather(self, part):
            return [part, other]

    config = read_config(KIMI_MINI)
    logits = RNG.normal(size=(5, 512)).astype(np.float32)
    logits[2, [3, 300]] = 9  # a tie over both ranks
    for how in (Sampling(), Sampling(0.8, 3)):
        backends = [CpuBackend(config, Half(rank, 2), "float32") for rank in (0, 1)]
        step = backends[0].sequence(np.arange(5), 11)
        whole = CpuBackend(config, Ranks(), "float32").pick(logits, step, how)
        from kconvert.runtime.sampling import best

        other = best(logits[:, 256:], step.positions + 1, how.temperature, how.seed, 256)
        found = backends[0].pick(np.ascontiguousarray(logits[:, :256]), step, how)
        assert np.array_equal(found, whole)
        assert how.temperature or found[2] == 3


def test_compact_is_the_twins() -> None:
    config = read_config(KIMI_MINI)
    found, twins = CpuBackend(config, Ranks(), "float32"), TwinBackend(config, "float32")
    caches = found.new_cache(60), twins.new_cache(60)
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        values = RNG.normal(size=layers[0].shape).astype(np.float32)
        layers[0][:] = values
        layers[1][:] = torch.from_numpy(values)
    accepted = np.array([0, 2, 5])
    found.compact(caches[0], found.drafted(1, 30, TREE), accepted)
    twins.compact(caches[1], twins.drafted(1, 30, TREE), accepted)
    for mine, theirs in zip(*(cache.layers for cache in caches), strict=True):
        assert np.array_equal(mine, theirs.numpy(), equal_nan=True)
        assert np.isnan(mine[33:47]).all() and np.isfinite(mine[:33]).all()
