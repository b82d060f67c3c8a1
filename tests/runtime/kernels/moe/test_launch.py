"""The CUDA kernels against their torch twins, and the row invariance, bit for bit."""

import pytest
import torch

from kconvert.runtime.bench.moe import random_layer, random_routing
from kconvert.runtime.kernels.moe import launch, reference
from kconvert.runtime.kernels.moe.shape import MoeShape
from kconvert.runtime.kernels.w4a16.launch import w4a16_rows

pytestmark = pytest.mark.gpu

GPU = "cuda:0"
INVARIANT_TOKENS = (*range(1, 65), 128, 330, 1024, 2048, 4096)
SHAPES = {
    "tp8": MoeShape(7168, 256, 24, 8),
    "tp2": MoeShape(7168, 1024, 12, 8),
    "ep8": MoeShape(7168, 2048, 6, 8, total_experts=48, first_expert=12),
    "uneven": MoeShape(1600, 256, 128, 8),  # chunks of one and of two steps
    "g64": MoeShape(1024, 192, 16, 4, group=64),
    "g128": MoeShape(512, 384, 9, 3, group=128),
    "broad": MoeShape(1088, 640, 6, 3),  # w13 in units of 4, 4 and 2 pairs; w2 of 8, 8 and 1 runs
}


def generator(seed: int) -> torch.Generator:
    return torch.Generator(GPU).manual_seed(seed)


def inputs(shape: MoeShape, tokens: int, seed: int):
    """x bf16 [tokens, K] of unit variance, ids, weights."""
    g = generator(seed)
    x = torch.randn(tokens, shape.hidden, device=GPU, generator=g).bfloat16()
    return x, *random_routing(shape, tokens, GPU, g)


def poisoned(shape: MoeShape, tokens: int) -> launch.MoeWorkspace:
    """A workspace full of NaN, so that nothing unwritten can go unseen."""
    work = launch.MoeWorkspace(shape, tokens, GPU)
    work.act.fill_(float("nan"))
    work.y.fill_(float("nan"))
    work.items.fill_(-1)
    work.slots.fill_(1 << 30)
    return work


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return ((out.double() - reference.double()).norm() / reference.double().norm()).item()


def float64_moe(x, ids, weights, layer: launch.MoeWeights, shape: MoeShape) -> torch.Tensor:
    """The layer with no rounding after the weights' own."""
    out = torch.zeros(x.shape[0], shape.hidden, dtype=torch.float64, device=x.device)
    for expert in range(shape.experts):
        token, slot = (ids == expert + shape.first_expert).nonzero(as_tuple=True)
        w13 = reference.marlin_weight(layer.w13[expert], layer.w13_scale[expert]).double()
        w2 = reference.marlin_weight(layer.w2[expert], layer.w2_scale[expert]).double()
        gate, up = (x[token].double() @ w13.T).chunk(2, 1)
        act = gate * gate.sigmoid() * up
        out.index_add_(0, token, weights[token, slot, None].double() * (act @ w2.T))
    return out


@pytest.mark.parametrize("tokens", [1, 5, 33])
def test_golden_cases(golden, tokens):
    shape = MoeShape(hidden=256, intermediate=128, experts=8, top_k=4)
    names = ("w13_marlin", "w13_scale_marlin", "w2_marlin", "w2_scale_marlin")
    blobs = [golden[f"moe.0.{name}"].to(GPU) for name in names]
    case = [golden[f"moe.0.M{tokens}.{n}"].to(GPU) for n in ("x", "topk_ids", "topk_weights")]
    layer, work = launch.MoeWeights(*blobs), poisoned(shape, tokens)
    out = launch.moe(*case, layer, shape, work)
    assert relative_error(out, golden[f"moe.0.M{tokens}.reference_f64"].to(GPU)) <= 6e-3
    assert relative_error(out, reference.moe(*case, *blobs, shape)) <= 2e-3


@pytest.mark.parametrize("tokens", [1, 7, 40, 300])
@pytest.mark.parametrize("name", SHAPES)
def test_moe_agrees_with_float64_and_with_the_twin(name, tokens):
    shape = SHAPES[name]
    layer = random_layer(shape, GPU, generator(7))
    case = inputs(shape, tokens, seed=tokens)
    case[1][0, 0] = shape.first_expert  # at least one pair is on this rank
    out = launch.moe(*case, layer, shape, poisoned(shape, tokens))
    blobs = (layer.w13, layer.w13_scale, layer.w2, layer.w2_scale)
    assert relative_error(out, reference.moe(*case, *blobs, shape)) <= 2e-3
    assert relative_error(out, float64_moe(*case, layer, shape)) <= 6e-3


def test_weights_are_rounded_once_at_any_scale():
    """One-hot tokens show the up weights bit for bit: gate = 64, where SiLU(gate) is gate."""
    shape = MoeShape(128, 128, 1, 1)
    layer = random_layer(shape, GPU, generator(1))
    # Every bf16 from 2^-104 up to 2^15, and zero.
    bits = torch.randint(
        23 << 7, 142 << 7, layer.w13_scale.shape, device=GPU, generator=generator(2)
    )
    bits[..., ::5] = 0
    layer.w13_scale.copy_(bits.short().view(torch.bfloat16))
    layer.w13[..., : 2 * shape.intermediate] = 0xCCCCCCCC - (1 << 32)  # nibble 12: the value 4
    layer.w13_scale[..., : shape.intermediate] = 16.0
    up = reference.marlin_weight(layer.w13[0], layer.w13_scale[0])[128:]  # [N, K]
    x = torch.eye(128, device=GPU).bfloat16()
    ids, work = torch.zeros(128, 1, dtype=torch.int32, device=GPU), poisoned(shape, 128)
    launch.moe(x, ids, torch.ones(128, 1, device=GPU), layer, shape, work)
    expected = up.T * 64  # a row a token, which is a column of W
    assert torch.equal(work.act, expected[work.slots.long()])


@pytest.mark.parametrize("name", ["tp8", "ep8"])
def test_a_row_has_the_same_bits_among_any_others(name):
    """Four tokens alone, then at random places among random others, for every M."""
    shape = {
        "tp8": MoeShape(7168, 256, 384, 8),
        "ep8": MoeShape(7168, 2048, 48, 8, total_experts=384, first_expert=96),
    }[name]
    layer = random_layer(shape, GPU, generator(3))
    x, ids, weights = inputs(shape, 4, seed=4)
    ids[:2] += shape.first_expert - ids[:2].min(1, keepdim=True).values  # some are on this rank
    ids %= shape.total_experts
    work = poisoned(shape, max(INVARIANT_TOKENS))
    alone = torch.cat(
        [
            launch.moe(x[i : i + 1], ids[i : i + 1], weights[i : i + 1], layer, shape, work)
            for i in range(4)
        ]
    )
    assert alone.isfinite().all() and alone.any()
    for m in INVARIANT_TOKENS:
        for crowd in ("random", "same experts"):
            others_x, others_ids, others_weights = inputs(shape, m, seed=1000 + m)
            if crowd == "same experts":  # every row at the probes' experts: the longest lists
                others_ids = ids[torch.arange(m, device=GPU) % 4].contiguous()
            here = torch.randperm(m, device=GPU, generator=generator(m))[: min(m, 4)]
            for whole, probe in zip(
                (others_x, others_ids, others_weights), (x, ids, weights), strict=True
            ):
                whole[here] = probe[: len(here)]
            out = launch.moe(others_x, others_ids, others_weights, layer, shape, work)
            assert torch.equal(out[here].view(torch.int32), alone[: len(here)].view(torch.int32)), (
                f"M={m}, {crowd}"
            )


@pytest.mark.parametrize("crowd", ["random", "same experts"])
@pytest.mark.parametrize("name", SHAPES)
def test_many_rows_have_the_bits_of_their_slices(name, crowd):
    """Each form for fewer rows makes the same sums as those for dozens, whatever an expert has."""
    shape = SHAPES[name]
    layer = random_layer(shape, GPU, generator(8))
    per_expert = shape.total_experts / shape.top_k  # tokens that give an expert one row
    for rows in (34, 47, 85, 200):
        tokens = round(rows * per_expert)
        x, ids, weights = inputs(shape, tokens, seed=rows)
        if crowd == "same experts":  # lists of every length from none to all tokens
            ids[::2] = shape.first_expert + torch.arange(shape.top_k, device=GPU).int()
        plan = launch.moe_schedule(shape, tokens, x.device)
        assert (plan.w13, plan.w2) == ("moe/w13_many", "moe/w2_many")
        work = poisoned(shape, tokens)
        whole = launch.moe(x, ids, weights, layer, shape, work)
        for size in (3 * per_expert, 7 * per_expert, 25 * per_expert):
            parts = (t.split(round(size)) for t in (x, ids, weights))
            sliced = [launch.moe(*part, layer, shape, work) for part in zip(*parts, strict=True)]
            assert torch.equal(torch.cat(sliced).view(torch.int32), whole.view(torch.int32)), rows


def test_more_items_than_there_are_blocks_for():
    """Forty tokens at as many experts as forty can reach, which no uniform router does."""
    shape = MoeShape(512, 128, 384, 8)
    plan = launch.moe_schedule(shape, 40, torch.device(GPU))
    assert plan.w13 == "moe/w13" and plan.blocks_w13 // 2 < 320
    layer = random_layer(shape, GPU, generator(1))
    x, _, weights = inputs(shape, 40, seed=2)
    ids = torch.randperm(384, device=GPU, generator=generator(3))[:320].view(40, 8).int()
    out = launch.moe(x, ids, weights, layer, shape, poisoned(shape, 40))
    assert relative_error(out, float64_moe(x, ids, weights, layer, shape)) <= 6e-3


def test_repeated_runs_have_the_same_bits():
    shape = MoeShape(7168, 256, 384, 8)
    layer, work = random_layer(shape, GPU, generator(5)), launch.MoeWorkspace(shape, 90, GPU)
    case = inputs(shape, 90, seed=6)
    first = launch.moe(*case, layer, shape, work)
    for _ in range(20):
        assert torch.equal(launch.moe(*case, layer, shape, work), first)


def test_a_captured_graph_gives_the_same_bits():
    shape = SHAPES["tp8"]
    layer, work = random_layer(shape, GPU, generator(5)), launch.MoeWorkspace(shape, 16, GPU)
    x, ids, weights = inputs(shape, 16, seed=6)
    expected = launch.moe(x, ids, weights, layer, shape, work)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            out = launch.moe(x, ids, weights, layer, shape, work)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, expected)


def test_no_expert_on_this_rank_gives_zeros():
    shape = MoeShape(512, 128, 4, 2, total_experts=16, first_expert=8)
    layer, work = random_layer(shape, GPU, generator(1)), poisoned(shape, 5)
    x, ids, weights = inputs(shape, 5, seed=1)
    out = launch.moe(x, ids.remainder(8), weights, layer, shape, work)
    assert not out.any()


@pytest.mark.parametrize("tokens", [1, 3, 64, 1000, 9000])
def test_alignment_lists_every_local_pair_once(tokens):
    shape = MoeShape(7168, 2048, 48, 8, total_experts=384, first_expert=96)
    _, ids, _ = inputs(shape, tokens, seed=tokens)
    work = poisoned(shape, tokens)
    launch.align(ids, shape, work)
    block_rows = launch.moe_schedule(shape, tokens, ids.device).block_rows
    flat, slots, seen, sizes = ids.flatten().tolist(), work.slots.tolist(), [], []
    for expert, first, rows, tiles in work.items[: work.item_count.item()].tolist():
        assert 0 < rows <= tiles * 8 <= block_rows
        pairs = slots[first : first + rows]
        assert {flat[pair] for pair in pairs} == {expert + 96}
        seen += pairs
        sizes.append(tiles)
        items = -(-flat.count(expert + 96) // block_rows)
        assert tiles == (-(-flat.count(expert + 96) // items) + 7) // 8  # as few, as equal
    assert sizes == sorted(sizes, reverse=True)  # the largest first
    assert sorted(seen) == [i for i, e in enumerate(flat) if 96 <= e < 144]


@pytest.mark.parametrize("tokens", [1, 6, 500])
def test_router_agrees_with_its_twin(tokens):
    g = generator(tokens)
    logits = torch.randn(tokens, 384, device=GPU, generator=g)
    logits[:, 200:220] = logits[:, 100:120]  # ties
    bias = torch.randn(384, device=GPU, generator=g) * 0.1
    bias[200:220] = bias[100:120]
    ids, weights = launch.router(logits, bias, 8, 2.827)
    # The two exponentials may differ in the last bit and swap near ties: compare what was chosen.
    choice = (logits.sigmoid() + bias).gather(1, ids.long())
    wanted, _ = reference.router(logits, bias, 8, 2.827)
    torch.testing.assert_close(
        choice, (logits.sigmoid() + bias).gather(1, wanted.long()), rtol=0, atol=3e-7
    )
    assert all(len(set(row)) == 8 for row in ids.tolist())
    for row in ids.tolist():  # of a tie the lower id comes first
        for e in row:
            if 200 <= e < 220:
                assert e - 100 in row and row.index(e - 100) < row.index(e)
    scores = logits.sigmoid().gather(1, ids.long())
    torch.testing.assert_close(
        weights, scores * (2.827 / scores.sum(1, keepdim=True)), rtol=1e-6, atol=0
    )


def test_plain_w4a16_kernel_agrees_with_float64():
    g = generator(9)
    experts, n, k = 3, 192, 256
    packed = torch.empty(experts, n, k // 8, dtype=torch.int32, device=GPU)
    packed.random_(-(2**31), 2**31 - 1, generator=g)
    scales = (torch.rand(experts, n, k // 32, device=GPU, generator=g) * 0.01).bfloat16()
    x = torch.randn(5, k, device=GPU, generator=g).bfloat16()
    expert = torch.tensor([2, 0, -1, 1, 2], dtype=torch.int32, device=GPU)
    y = w4a16_rows(x, expert, packed, scales)
    for row, e in enumerate(expert.tolist()):
        if e < 0:
            assert not y[row].any()
            continue
        weight = reference.w4a16_weight(packed[e], scales[e]).double()
        assert relative_error(y[row], weight @ x[row].double()) <= 1e-5
