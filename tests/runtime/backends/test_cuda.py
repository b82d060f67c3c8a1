"""The GPU's operations against their twins on the same GPU and against float64, and against the CPU
where the bits must be the same."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import pytest
import torch
from kit import KIMI_MINI
from operations import STARTS, Inputs, relative, results

from kconvert.runtime.backends.cpu import CpuBackend
from kconvert.runtime.backends.cuda import CudaBackend
from kconvert.runtime.backends.protocol import Sampling
from kconvert.runtime.backends.torch_twins import TwinBackend
from kconvert.runtime.config import read_config
from kconvert.runtime.distributed import Ranks
from kconvert.runtime.drafting.ddtree import build_tree, top_k, walk
from kconvert.runtime.kernels.tree import launch as tree

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
MODELS = {"kimi-mini": KIMI_MINI, "tiny_kimi": Path(__file__).parents[2] / "tiny_kimi/model"}


def random_top_k(seed: int, levels: int = 7, width: int = 64) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    logprobs = np.sort(-rng.exponential(2, size=(levels, width)).astype(np.float32))[:, ::-1]
    ids = np.argsort(rng.random((levels, 512)), axis=1)[:, :width]
    return ids, np.ascontiguousarray(logprobs)


TREE = build_tree(*random_top_k(0), 32)


def put(kinds: dict[str, torch.dtype]):
    return lambda a, kind: torch.from_numpy(a).to(GPU, kinds[kind])


def get(a: torch.Tensor) -> np.ndarray:
    return a.double().cpu().numpy().copy()


NARROW = {"activations": torch.bfloat16, "sums": torch.float32}
WIDE = {"activations": torch.float64, "sums": torch.float64}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("rows", [TREE, 1, 40, 90, 330])
def test_operations_agree_with_their_twins_and_with_float64(model, start, rows) -> None:
    config = read_config(MODELS[model])
    cuda = CudaBackend(config, Ranks(), GPU)
    found = results(cuda, put(NARROW), get, Inputs(config, start, rows))
    twins = TwinBackend(config, "bfloat16", "cuda")
    wanted = results(twins, put(NARROW), get, Inputs(config, start, rows))
    wide = TwinBackend(config, "float32", "cuda", torch.float64)
    exact = results(wide, put(WIDE), get, Inputs(config, start, rows))
    for name, value in found.items():
        if name == "route.ids":
            assert np.array_equal(value, wanted[name])
            continue
        assert relative(value, wanted[name]) <= 2e-3, name
        assert relative(value, exact[name]) <= 6e-3, name


@pytest.mark.parametrize(
    ("n", "k"),
    [(272, 256), (384, 128), (1280, 256), (16, 256), (2112, 7168), (384, 7168), (1536, 1536),
     (7168, 1024), (512, 7168), (7168, 256), (4608, 7168), (64, 64)],
)  # fmt: skip
def test_a_rows_bits_do_not_depend_on_the_others(n: int, k: int) -> None:
    """Alone, and at any place among up to 1024."""
    g = torch.Generator(GPU).manual_seed(n + k)
    cuda = CudaBackend(read_config(KIMI_MINI), Ranks(), GPU)
    x = torch.randn(1024, k, device=GPU, generator=g).bfloat16()
    w = (torch.randn(n, k, device=GPU, generator=g) / k**0.5).bfloat16()
    whole = cuda.sums(x, w)
    assert relative(get(whole), get(x.double() @ w.double().T)) <= 1e-5
    assert torch.equal(cuda.linear(x, w), whole.bfloat16())
    for m in (1, 2, 7, 8, 9, 16, 17, 33, 40, 65, 72, 73, 90, 330):
        rows = torch.randperm(1024, device=GPU, generator=g)[:m]
        assert torch.equal(cuda.sums(x[rows].contiguous(), w), whole[rows]), m


@pytest.mark.parametrize("budget", [0, 1, 4, 7, 16, 33, 64])
@pytest.mark.parametrize("chain_seed", [False, True])
def test_trees_rows_and_walks_are_the_cpus(budget: int, chain_seed: bool) -> None:
    """From the device's own top-k arrays, of which some tie."""
    rng = np.random.default_rng(budget)
    start, rows = 120, 65
    cuda = CudaBackend(read_config(KIMI_MINI), Ranks(), GPU)
    logits = torch.from_numpy(rng.normal(size=(7, 5000)).astype(np.float32) * 3).round()
    keys, sums = tree.top_k(logits.to(GPU), 0)
    ids, logprobs = top_k(logits, max(budget, 1))
    order = keys.cpu().numpy().view(np.uint64)
    for level in range(7):
        merged = np.sort(order[level].ravel())[::-1][: ids.shape[1]]
        assert (~merged.astype(np.uint32)).tolist() == ids[level].tolist()
    wanted = build_tree(ids, logprobs, budget, chain_seed)
    state = torch.zeros(tree.STATE, dtype=torch.int32, device=GPU)
    state[tree.START], state[tree.TOKEN] = start, 77
    width = max(budget, 1)
    options = torch.tensor([7, width, budget, chain_seed, 0], dtype=torch.int32, device=GPU)
    seconds = torch.ones(tree.NODES + 2 + tree.LEARNT, dtype=torch.float64, device=GPU)
    step = tree.empty_rows(rows, 3, GPU)
    tree.grow(keys[None], sums[None], options, seconds, state, step)
    expected = cuda.drafted(77, start, wanted)
    n = len(wanted) + 1
    assert int(state[tree.COUNT]) == n
    for name in ("tokens", "positions", "slots", "prefix", "counts", "parents"):
        assert getattr(step, name)[:n].tolist() == getattr(expected, name).tolist(), name
    for r in range(n):
        count = int(step.counts[r])
        assert torch.equal(step.windows[r, :count], expected.windows[r, :count])
    assert (step.counts[n:] == 0).all() and (step.slots[n:] == -1).all()

    chosen = rng.integers(0, 5000, n)
    for node in range(1, n):  # so that walks go far
        if rng.random() < 0.7:
            chosen[wanted.parents[node]] = wanted.token_ids[node - 1]
    accepted_cpu, bonus = walk(wanted, chosen)
    values = torch.zeros(1, rows, 1, dtype=torch.float64, device=GPU)
    tokens = torch.zeros(1, rows, 1, dtype=torch.int32, device=GPU)
    tokens[0, :n, 0] = torch.from_numpy(chosen)
    accepted = torch.zeros(rows, dtype=torch.int32, device=GPU)
    ring = torch.zeros(4, tree.ROWS + tree.HEADER, dtype=torch.int32).pin_memory()
    tree.walk(values, tokens, step, state, accepted, torch.empty_like(accepted), None, ring)
    torch.cuda.synchronize()
    length = len(accepted_cpu)
    assert accepted[:length].tolist() == accepted_cpu.tolist()
    assert ring[0, :4].tolist() == [1, length, n, -1]
    assert ring[0, 8 : 8 + length].tolist() == chosen[accepted_cpu].tolist()
    assert state[:5].tolist() == [start + length, bonus, start, length, n]

    keys_of = torch.randn(3, 300, 80, device=GPU).bfloat16()
    twin = keys_of.clone()
    tree.compact(state, accepted, keys_of)
    twin[:, start : start + length] = twin[:, start + torch.from_numpy(accepted_cpu).to(GPU)]
    twin[:, start + length : start + n] = float("nan")
    assert torch.equal(keys_of.isnan(), twin.isnan())
    assert torch.equal(keys_of.nan_to_num(), twin.nan_to_num())


@pytest.mark.parametrize("how", [Sampling(), Sampling(0.8, 12345), Sampling(1.3, 2**64 - 1)])
def test_picks_are_the_cpus(how: Sampling) -> None:
    """The same noise, so the same tokens from the same logits; ties to the lowest."""
    config = read_config(KIMI_MINI)
    logits = np.random.default_rng(1).normal(size=(33, 20_000)).astype(np.float32).round(2)
    cpu, cuda = CpuBackend(config, Ranks(), "float32"), CudaBackend(config, Ranks(), GPU)
    wanted = cpu.pick(logits, cpu.sequence(np.arange(33), 500), how)
    found = cuda.pick(torch.from_numpy(logits).to(GPU), cuda.sequence(np.arange(33), 500), how)
    assert found.tolist() == wanted.tolist()
    from kconvert.runtime.backends.cuda import sampling_tensor
    from kconvert.runtime.sampling import best

    step = cuda.sequence(np.arange(33), 500)
    sampling = sampling_tensor(how, GPU)
    values, _ = tree.pick(torch.from_numpy(logits).to(GPU), 0, step.positions, sampling)
    exact = best(logits, np.arange(501, 534), how.temperature, how.seed, 0)[:, 0]
    assert values.max(dim=1).values.cpu().numpy().tolist() == exact.tolist()
