"""Trees and walks against the DDTree reference's own, and against every path counted out."""

import itertools
import json
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import DATA
from safetensors.numpy import load_file

from kconvert.layouts.errors import CheckpointError, UnsupportedError
from kconvert.runtime.drafting.ddtree import Tree, build_tree, chain, top_k, walk
from kconvert.runtime.step import drafted

CASES = json.loads((DATA / "ddtree_cases.json").read_text())["cases"]
GOLDEN = load_file(DATA / "ddtree_cases.safetensors")
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])


def golden(case: dict, name: str) -> np.ndarray:
    return GOLDEN[f"{case['case']}.{name}"]


def possible_nodes(case: dict) -> int:
    """How many of the golden nodes have a probability; the reference makes others after them."""
    logprobs = golden(case, "path_logprobs")
    count = int(np.isfinite(logprobs).sum())
    assert np.isfinite(logprobs[:count]).all()
    return count


def assert_golden(case: dict, tree: Tree) -> None:
    count = possible_nodes(case)
    assert len(tree) == count
    assert tree.token_ids.tolist() == golden(case, "token_ids")[:count].tolist()
    assert tree.depths.tolist() == golden(case, "depths")[:count].tolist()
    assert tree.parents.tolist() == golden(case, "parents")[: count + 1].tolist()
    step = drafted(0, tree, case["start"], 64)
    positions = golden(case, "positions")[: count + 1]
    assert step.positions.tolist() == positions.tolist()
    for row, visible in enumerate(golden(case, "visibility")[: count + 1, : count + 1]):
        window = step.windows[row, : step.counts[row]] - case["start"]
        assert window[window >= 0].tolist() == np.flatnonzero(visible).tolist()


def golden_top_k(case: dict) -> tuple[np.ndarray, np.ndarray]:
    return golden(case, "topk_ids"), golden(case, "topk_logprobs")


@every_case
def test_tree_from_top_k_is_the_references(case: dict) -> None:
    tree = build_tree(*golden_top_k(case), case["B"])
    assert_golden(case, tree)
    assert tree.path_logprobs.tolist() == golden(case, "path_logprobs")[: len(tree)].tolist()


@pytest.mark.parametrize(
    "case", [case for case in CASES if case["order"] == "strict"], ids=lambda case: case["case"]
)
def test_tree_from_logits_is_the_references(case: dict) -> None:
    logits = torch.from_numpy(golden(case, "logits").astype(np.float32))
    ids, logprobs = top_k(logits, case["B"])
    possible = np.isfinite(golden(case, "topk_logprobs"))
    assert np.array_equal(ids[possible], golden(case, "topk_ids")[possible])
    assert np.array_equal(np.isfinite(logprobs), possible)
    np.testing.assert_allclose(
        logprobs[possible], golden(case, "topk_logprobs")[possible], rtol=1e-6, atol=1e-6
    )
    assert_golden(case, build_tree(ids, logprobs, case["B"]))


@every_case
def test_top_k_takes_the_most_probable_and_ties_by_the_lowest_id(case: dict) -> None:
    logits = golden(case, "logits").astype(np.float32)
    ids, logprobs = top_k(torch.from_numpy(logits), case["B"])
    assert (ids.dtype, logprobs.dtype) == (np.int64, np.float32)
    assert ids.tolist() == reference_ids(logits, case["B"]).tolist()
    np.testing.assert_allclose(logprobs, golden(case, "topk_logprobs"), rtol=1e-6, atol=1e-6)


@every_case
def test_walks_are_the_references(case: dict) -> None:
    tree = build_tree(*golden_top_k(case), case["B"])
    for path in case["walks"]:
        choices = path["posterior"][: len(tree) + 1]
        # A node of probability zero, which the reference has and we have not, ends our walk.
        expected = [node for node in path["accepted"] if node <= len(tree)]
        accepted, bonus = walk(tree, choices)
        assert (accepted.tolist(), bonus) == (expected, choices[expected[-1]])
        if len(expected) == len(path["accepted"]):
            assert choices[expected[-1]] == path["next_token"]


def reference_ids(logits: np.ndarray, k: int) -> np.ndarray:
    return np.argsort(-logits, axis=1, kind="stable")[:, :k]


# Small integers tie often, and their sums are exact in any order.
impossible = st.just(float("-inf"))
small = st.integers(-9, 0).map(float)


@st.composite
def marginals(draw) -> tuple[np.ndarray, np.ndarray]:
    """ids [L, K] and falling log-probabilities [L, K] with ties and impossible tokens."""
    depths, width = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    row = st.lists(small | impossible, min_size=width, max_size=width)
    rows = draw(st.lists(row, min_size=depths, max_size=depths))
    ids = [draw(st.permutations(range(width))) for _ in range(depths)]
    return np.array(ids, np.int64), -np.sort(-np.array(rows, np.float32))


def every_path(logprobs: np.ndarray) -> list[tuple[float, tuple[int, ...]]]:
    """(cost, ranks) of every possible path, best first."""
    depths, width = logprobs.shape
    paths = []
    for depth in range(1, depths + 1):
        for ranks in itertools.product(range(width), repeat=depth):
            cost = -sum(float(logprobs[d, rank]) for d, rank in enumerate(ranks))
            if cost < float("inf"):
                paths.append((cost, ranks))
    return sorted(paths)


def paths_of(tree: Tree, ids: np.ndarray) -> list[tuple[int, ...]]:
    """The ranks along each node's path, from its parents."""
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree) + 1):
        depth, parent = int(tree.depths[node - 1]), int(tree.parents[node])
        assert parent < node and len(paths[parent]) == depth - 1
        rank = ids[depth - 1].tolist().index(tree.token_ids[node - 1])
        paths.append((*paths[parent], rank))
    return paths[1:]


@settings(deadline=None)
@given(marginals(), st.integers(0, 40))
def test_tree_is_the_best_of_its_size(marginal, budget: int) -> None:
    ids, logprobs = marginal
    tree = build_tree(ids, logprobs, budget)
    expected = every_path(logprobs)[:budget]
    assert paths_of(tree, ids) == [ranks for _, ranks in expected]
    assert tree.path_logprobs.tolist() == [-cost for cost, _ in expected]


@settings(deadline=None)
@given(marginals(), st.integers(0, 40))
def test_seeded_tree_is_the_chain_and_then_the_best_of_the_rest(marginal, budget: int) -> None:
    ids, logprobs = marginal
    tree = build_tree(ids, logprobs, budget, chain_seed=True)
    paths = every_path(logprobs)
    is_chain = [set(ranks) == {0} for _, ranks in paths]
    spine = [path for path, seeded in zip(paths, is_chain, strict=True) if seeded]
    spine.sort(key=lambda path: len(path[1]))  # certain tokens tie with their parents
    rest = [path for path, seeded in zip(paths, is_chain, strict=True) if not seeded]
    expected = (spine + rest)[:budget]
    assert paths_of(tree, ids) == [ranks for _, ranks in expected]
    assert tree.path_logprobs.tolist() == [-cost for cost, _ in expected]


@settings(deadline=None)
@given(marginals(), st.integers(0, 20), st.integers(0, 20), st.booleans())
def test_first_nodes_are_the_tree_of_that_budget(marginal, budget, smaller, seed) -> None:
    whole = build_tree(*marginal, budget, chain_seed=seed).first(smaller)
    part = build_tree(*marginal, min(budget, smaller), chain_seed=seed)
    for field in ("token_ids", "depths", "parents", "path_logprobs"):
        assert getattr(whole, field).tolist() == getattr(part, field).tolist()
        assert getattr(whole, field).dtype == getattr(part, field).dtype


def test_seed_ends_where_the_chain_does() -> None:
    """Afterwards the first child of another node is no seed."""
    impossible = float("-inf")
    logprobs = np.array([[0, 0], [-1, -1], [impossible] * 2, [0, 0]], np.float32)
    ids = np.tile(np.arange(2), (4, 1))
    tree = build_tree(ids, logprobs, 4, chain_seed=True)
    assert paths_of(tree, ids) == [(0,), (0, 0), (1,), (0, 1)]


@settings(deadline=None)
@given(marginals(), st.integers(0, 6))
def test_chain_is_the_seed_alone(marginal, budget: int) -> None:
    ids, logprobs = marginal
    tree = chain(ids, logprobs, budget)
    possible = int(np.isfinite(logprobs[:, 0]).cumprod().sum())
    assert len(tree) == min(budget, possible)
    assert tree.token_ids.tolist() == ids[: len(tree), 0].tolist()
    assert tree.depths.tolist() == list(range(1, len(tree) + 1))
    assert tree.parents.tolist() == list(range(-1, len(tree)))
    seeded = build_tree(ids, logprobs, budget, chain_seed=True)
    assert seeded.token_ids[: len(tree)].tolist() == tree.token_ids.tolist()
    assert seeded.path_logprobs[: len(tree)].tolist() == tree.path_logprobs.tolist()


@settings(deadline=None)
@given(marginals(), st.integers(0, 20), st.booleans(), st.randoms(use_true_random=False))
def test_walk_accepts_the_longest_path_the_target_chose(marginal, budget, seed, random) -> None:
    ids, logprobs = marginal
    tree = build_tree(ids, logprobs, budget, chain_seed=seed)
    choices = np.array([random.randrange(ids.shape[1] + 1) for _ in tree.parents])
    accepted, bonus = walk(tree, choices)
    assert accepted[0] == 0
    for parent, node in itertools.pairwise(accepted):
        assert tree.parents[node] == parent
        assert tree.token_ids[node - 1] == choices[parent]
    assert bonus == choices[accepted[-1]]
    siblings = tree.token_ids[tree.parents[1:] == accepted[-1]]
    assert bonus not in siblings


@settings(deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([-2.0, -0.0, 0.0, 1.0]) | impossible, min_size=6, max_size=6),
        min_size=1,
        max_size=3,
    ),
    st.integers(0, 8),
)
def test_top_k_of_ties_and_impossible_tokens(rows, k: int) -> None:
    logits = np.array(rows, np.float32)
    ids, logprobs = top_k(torch.from_numpy(logits), k)
    assert ids.tolist() == reference_ids(logits, k).tolist()
    assert logprobs.shape == ids.shape
    chosen = np.take_along_axis(logits, ids, axis=1)
    assert np.array_equal(np.isneginf(logprobs), np.isneginf(chosen))
    assert not np.isnan(logprobs).any() and (logprobs <= 0).all()
    for seed in (True, False):
        tree = build_tree(ids, logprobs, k, chain_seed=seed)
        assert np.isfinite(tree.path_logprobs).all()


def test_a_row_without_a_possible_token_ends_the_tree_above_it() -> None:
    logits = torch.zeros(3, 4)
    logits[1] = float("-inf")
    for seed in (True, False):
        tree = build_tree(*top_k(logits, 16), 16, chain_seed=seed)
        assert tree.depths.tolist() == [1, 1, 1, 1]
        assert tree.token_ids.tolist() == [0, 1, 2, 3]
    logits[0] = float("-inf")
    assert len(build_tree(*top_k(logits, 16), 16)) == 0
    assert len(chain(*top_k(logits, 16), 16)) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("others", [0.0, float("-inf")])
def test_logits_nothing_can_be_drawn_from_are_refused(value: float, others: float) -> None:
    logits = torch.full((3, 4), others)
    logits[1, 2] = value
    with pytest.raises(CheckpointError, match="slot 2"):
        top_k(logits, 2)


def test_a_negative_budget_is_refused() -> None:
    ids, logprobs = top_k(torch.zeros(2, 4), 2)
    tree = build_tree(ids, logprobs, 2)
    for attempt in (
        lambda: top_k(torch.zeros(2, 4), -1),
        lambda: build_tree(ids, logprobs, -1),
        lambda: chain(ids, logprobs, -1),
        lambda: tree.first(-1),
    ):
        with pytest.raises(UnsupportedError, match="-1 nodes"):
            attempt()


def test_a_walk_with_another_number_of_rows_is_a_mistake() -> None:
    tree = build_tree(*top_k(torch.zeros(2, 4), 2), 2)
    for count in (2, 4):
        with pytest.raises(ValueError, match=f"{count} tokens for 3 nodes"):
            walk(tree, [0] * count)


def test_sixty_four_nodes_are_built_and_walked_far_within_a_millisecond() -> None:
    logits = torch.randn(7, 2048, generator=torch.Generator().manual_seed(0)) * 4
    ids, logprobs = top_k(logits, 64)
    best = float("inf")
    for _ in range(50):  # the best of many: other work on the machine must not fail it
        start = time.perf_counter()
        tree = build_tree(ids, logprobs, 64)
        walk(tree, [int(tree.token_ids[0])] * 65)
        best = min(best, time.perf_counter() - start)
    assert best < 0.5e-3
