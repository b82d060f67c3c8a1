"""Attention over long contexts: against float64, and a row's bits whatever else is in its step."""

import numpy as np
import pytest
import torch

from kconvert.runtime.backends.protocol import REACH
from kconvert.runtime.drafting.ddtree import Tree
from kconvert.runtime.kernels.attention import launch as attention
from kconvert.runtime.kernels.attention.launch import SPANS, AttentionShape, Form
from kconvert.runtime.kernels.gpu import Gpu
from kconvert.runtime.kernels.tree.launch import SPLIT, WINDOW
from kconvert.runtime.step import Step, drafted, sequence

GPU = torch.device("cuda", 0)
K26 = AttentionShape(heads=8, q_lora=1536, kv_lora=512, nope=128, rope=64, value=128)
NARROW = AttentionShape(heads=2, q_lora=0, kv_lora=64, nope=32, rope=16, value=32)
ODD = AttentionShape(heads=6, q_lora=0, kv_lora=128, nope=32, rope=64, value=32)
WIDE = AttentionShape(heads=64, q_lora=1536, kv_lora=512, nope=128, rope=64, value=128)
FORMS = (Form(16, 2), Form(16, 4), Form(32, 2), Form(32, 4), Form(64, 2), Form(64, 3))
EDGE = SPANS * SPLIT  # of a prefix: beyond it spans are longer
# Before the first boundary, at boundaries, where a tree has two prefixes, where spans grow.
STARTS = (
    0, 31, 95, 96, 130, 1023, SPLIT * 20 + REACH - 3, EDGE + REACH - 4, EDGE + REACH + 60,
    2 * EDGE + REACH - 3, 32767,
)  # fmt: skip


def tree_of(rows: int, depth: int = 8, seed: int = 0) -> Tree:
    """A root and nodes, hung anywhere above `depth`; a chain if that is as many as rows."""
    rng = np.random.default_rng(seed + rows)
    depths, parents = [0], [-1]
    for row in range(1, rows):
        parent = (
            row - 1 if depth >= rows else int(rng.choice(np.flatnonzero(np.array(depths) < depth)))
        )
        depths.append(depths[parent] + 1)
        parents.append(parent)
    return Tree(np.arange(rows - 1), np.array(depths[1:]), np.array(parents), np.zeros(rows - 1))


class Attention:
    """Random keys up to a step's rows, and NaN behind them; queries of every row."""

    def __init__(self, shape: AttentionShape, step: Step, seed: int = 0) -> None:
        g = torch.Generator(GPU).manual_seed(seed)
        self.shape, self.step, width = shape, step, shape.kv_lora + shape.rope
        self.scale = 3 * width**-0.5
        used = int(step.slots.max()) + 1
        self.keys = torch.full((used + 200, width), float("nan"), device=GPU).bfloat16()
        self.keys[:used] = torch.randn(used, width, device=GPU, generator=g).bfloat16()
        self.queries = torch.randn(
            len(step.tokens), shape.heads, width, device=GPU, generator=g
        ).bfloat16()  # fmt: skip
        self.parts = int(step.positions.max()) // SPLIT + 1

    def __call__(self, rows: list[int] | None = None, parts: int | None = None) -> torch.Tensor:
        step, chosen = self.step, np.arange(len(self.step.tokens)) if rows is None else rows

        def put(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(values[chosen].astype(np.int32)).to(GPU)

        windows = put(step.windows[:, :WINDOW]).contiguous()
        return attention.attend(
            self.queries[torch.tensor(np.array(chosen)).to(GPU)], self.keys, put(step.positions),
            put(step.prefix), put(step.counts), windows, parts or self.parts, self.scale,
            self.shape,
        )  # fmt: skip

    def exact(self, row: int) -> torch.Tensor:
        prefix, count = int(self.step.prefix[row]), int(self.step.counts[row])
        window = torch.from_numpy(self.step.windows[row, :count].copy()).to(GPU)
        keys = self.keys[torch.cat([torch.arange(prefix, device=GPU), window])].double()
        weights = (self.queries[row].double() @ keys.T * self.scale).softmax(dim=1)
        return weights @ keys[:, : self.shape.kv_lora]


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(torch.linalg.norm(found.double() - wanted) / torch.linalg.norm(wanted))


def forced(monkeypatch: pytest.MonkeyPatch, made: Form) -> None:
    monkeypatch.setattr(attention, "form", lambda *_: made)


@pytest.mark.gpu
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("rows", [1, 2, 16, 33, 65])
def test_rows_are_near_float64_and_no_form_changes_a_bit(start, rows, monkeypatch) -> None:
    """Trees, and chains of up to 33 rows; the least bound of parts and a larger one."""
    for depth in (8, 33) if rows <= 33 else (8,):
        given = Attention(K26, drafted(7, tree_of(rows, depth), start, SPLIT), start)
        found = given()
        for row in {0, rows // 2, rows - 1}:
            assert relative(found[row], given.exact(row)) <= 2e-3, row
        assert torch.equal(found, given(parts=4 * given.parts))
        for made in FORMS:
            with monkeypatch.context() as patch:
                forced(patch, made)
                assert torch.equal(found, given()), made


@pytest.mark.gpu
@pytest.mark.parametrize("start", STARTS)
def test_a_rows_bits_do_not_depend_on_the_others(start) -> None:
    """Alone, among others in any order, in a chain and in a tree."""
    given, rng = (
        Attention(K26, drafted(7, tree_of(65), start, SPLIT), start),
        np.random.default_rng(1),
    )
    whole = given()
    for row in (0, 1, 17, 64):
        assert torch.equal(given([row])[0], whole[row]), row
    for count in (2, 3, 5, 8, 16, 33, 40, 64):
        rows = rng.permutation(65)[:count].tolist()
        assert torch.equal(given(rows), whole[rows]), count


@pytest.mark.gpu
@pytest.mark.parametrize("start", [0, 100, 1000, EDGE - 200])
def test_a_drafted_row_has_the_bits_of_a_committed_one(start) -> None:
    """A chain of 20 whose slots are those of a tree's rows, beside a text of 330 rows."""
    text = Attention(K26, sequence(np.arange(330), start, SPLIT), start)
    whole = text()
    for row in (0, 100, 329):
        assert relative(whole[row], text.exact(row)) <= 2e-3
    for begin in (0, 63, 200):
        tree = tree_of(40, 20, seed=3)
        path = [int(np.argmax(tree.depths)) + 1]
        while path[0]:
            path.insert(0, int(tree.parents[path[0]]))
        made = Attention(K26, drafted(7, tree, start + begin, SPLIT))
        made.keys[: start + begin] = text.keys[: start + begin]
        made.keys[start + begin + torch.tensor(path)] = text.keys[
            start + begin : start + begin + len(path)
        ]
        made.queries[path] = text.queries[begin : begin + len(path)]
        assert torch.equal(made()[path], whole[begin : begin + len(path)]), begin


@pytest.mark.gpu
@pytest.mark.parametrize("start", [40, 1023, EDGE + REACH - 4, 32767])
def test_a_row_reads_its_own_slots_alone(start) -> None:
    """NaN in the slot of a row that is no other's ancestor is in that row alone."""
    tree = tree_of(33)
    given = Attention(K26, drafted(7, tree, start, SPLIT), start)
    whole = given()
    leaves = sorted(set(range(1, 33)) - set(tree.parents.tolist()))
    for leaf in leaves[::5]:
        kept = given.keys[start + leaf].clone()
        given.keys[start + leaf] = float("nan")
        found, others = given(), [row for row in range(33) if row != leaf]
        assert found[leaf].isnan().all() and torch.equal(found[others], whole[others])
        given.keys[start + leaf] = kept
    given.keys[5] = float("inf")
    assert given().isnan().any(dim=2).all()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [NARROW, ODD, WIDE])
@pytest.mark.parametrize("start", [0, 95, 1023, EDGE + REACH - 4])
def test_other_shapes(shape, start, monkeypatch) -> None:
    given = Attention(shape, drafted(7, tree_of(33), start, SPLIT), start)
    found = given()
    for row in (0, 32):
        assert relative(found[row], given.exact(row)) <= 2e-3
        assert torch.equal(given([row])[0], found[row])
    for made in FORMS:
        if made.lines <= 32 * shape.heads:
            with monkeypatch.context() as patch:
                forced(patch, made)
                assert torch.equal(found, given()), made


@pytest.mark.gpu
def test_rows_that_read_nothing_become_zeros() -> None:
    given = Attention(K26, drafted(7, tree_of(8), 500, SPLIT))
    whole = given()
    given.step.counts[[2, 5, 6, 7]] = 0
    given.step.positions[[2, 5, 6, 7]] = given.step.prefix[[2, 5, 6, 7]] = 0
    found = given()
    assert (found[[2, 5, 6, 7]] == 0).all()
    assert torch.equal(found[[0, 1, 3, 4]], whole[[0, 1, 3, 4]])


SMALL, LARGE = Gpu("sm_120a", 100 * 1024, 188), Gpu("sm_90a", 228 * 1024, 132)


@pytest.mark.parametrize(
    ("gpu", "rows", "slots", "made"),
    [(LARGE, 1, 2048, Form(16, 4)), (LARGE, 16, 2048, Form(16, 2)), (LARGE, 33, 2048, Form(32, 2)),
     (LARGE, 65, 2048, Form(64, 2)),
     (LARGE, 1, 65536, Form(16, 4)), (LARGE, 4, 65536, Form(16, 4)), (LARGE, 8, 65536, Form(32, 4)),
     (LARGE, 16, 65536, Form(64, 3)), (LARGE, 300, 65536, Form(64, 3)),
     (SMALL, 1, 65536, Form(16, 2)), (SMALL, 65, 65536, Form(16, 2))],
)  # fmt: skip
def test_forms(gpu, rows, slots, made) -> None:
    parts = slots // SPLIT + 1
    assert attention.form(K26, rows, parts, gpu) == made
    assert made.shared(K26) <= gpu.shared_per_sm - 1024
    assert made.grid(K26, rows, attention.spans(parts)) <= 2 * rows + SPANS * rows
