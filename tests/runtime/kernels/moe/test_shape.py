"""Schedules and launches, without a GPU: what orders sums, what must fit, what kernels get."""

import re

import pytest
import torch

from kconvert.layouts.errors import UnavailableError
from kconvert.runtime.bench import moe as bench_moe
from kconvert.runtime.kernels import nvrtc
from kconvert.runtime.kernels.moe import launch
from kconvert.runtime.kernels.moe.shape import Gpu, MoeShape, most_items, schedule

GPUS = (
    Gpu("sm_90a", 228 * 1024, 132),
    Gpu("sm_100a", 228 * 1024, 148),
    Gpu("sm_120a", 100 * 1024, 188),
)
SHAPES = bench_moe.SHAPES | {
    "golden": MoeShape(256, 128, 8, 4),
    "g128": MoeShape(512, 384, 9, 3, group=128),
}
TOKENS = (*range(1, 70), 96, 128, 192, 193, 330, 1024, 2048, 4096, 16384)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_chunks_depend_on_the_shape_alone(shape):
    """Neither the number of tokens nor the GPU reaches a macro that orders a sum."""
    orders = set()
    for gpu in GPUS:
        for tokens in TOKENS:
            plan = schedule(shape, tokens, gpu)
            (_, w13, _, _), (_, w2, _, _) = launch.gemm_kernels(shape, plan)
            orders.add((w13["SPLIT"], w2["CHUNKS"]))
            assert w2["WARPS_K"] in (1, w2["CHUNKS"])
            assert w2["WARPS"] % w2["WARPS_K"] == 0
            assert w2["WARPS_K"] == 1 or plan.tiles_per_warp == 1
    assert len(orders) == 1


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_grid_covers_the_longest_list(shape):
    """Counts that make as many items as any: one row everywhere, then whole blocks and a row."""
    for tokens in TOKENS:
        plan, pairs = schedule(shape, tokens, GPUS[0]), tokens * shape.top_k
        counts = [0] * shape.experts
        for left in range(min(pairs, shape.experts)):
            counts[left] = 1
        counts[0] += pairs - sum(counts)
        worst = sum(-(-count // plan.block_rows) for count in counts)
        assert worst <= most_items(shape, pairs, plan.block_rows) <= pairs


@pytest.mark.parametrize(("name", "too_many"), [("tp8", 48), ("ep8", 20)])
def test_narrow_blocks_are_rarely_too_few_and_never_many_too_many(name, too_many):
    """Of 50 uniform routings at each size hardly one needs a second turn, few blocks do nothing."""
    shape, g = bench_moe.SHAPES[name], torch.Generator().manual_seed(0)
    for tokens in (1, 2, 9, 33, 90, 128, 192):
        plan, second_turns = schedule(shape, tokens, GPUS[0]), 0
        assert plan.w13 == "moe/w13"
        listed = plan.blocks_w13 // (shape.intermediate // 64)
        for _ in range(50):
            ids = torch.rand(tokens, 384, generator=g).topk(8, dim=1).indices
            counts = ids.flatten().bincount(minlength=384)
            counts = counts[shape.first_expert : shape.first_expert + shape.experts]
            needed = int(((counts + 7) // 8).sum())
            assert listed <= needed + too_many
            second_turns += needed > listed
        assert second_turns <= 1


def test_shared_memory_fits_every_gpu():
    for gpu, limit in zip(GPUS, (232_448, 232_448, 101_376), strict=True):
        for shape in SHAPES.values():
            for tokens in TOKENS:
                for _, _, shared, _ in launch.gemm_kernels(shape, schedule(shape, tokens, gpu)):
                    assert shared <= limit


def parameters(file: str) -> int:
    source = (nvrtc.SOURCES / f"{file}.cu").read_text()
    (found,) = re.findall(r'extern "C" __global__.*?\n?.*?\w+\((const [^{]*?)\)\s*\{', source, re.S)
    return found.count(",") + 1


@pytest.mark.parametrize(
    ("tokens", "w13", "w2"),
    [
        (1, "moe/w13", "moe/w2"),
        (12, "moe/w13_group", "moe/w2"),
        (63, "moe/w13_group", "moe/w2"),
        (64, "moe/w13_many", "moe/w2_many"),
        (1024, "moe/w13_many", "moe/w2_many"),
    ],
)
def test_every_kernel_is_given_what_it_takes(monkeypatch, tokens, w13, w2):
    """Launches are recorded in place of being made."""
    made = []
    monkeypatch.setattr(launch, "gpu", lambda index: GPUS[0])
    monkeypatch.setattr(
        launch,
        "launch",
        lambda file, defines, grid, block, args, **more: made.append((file, grid, block, args)),
    )
    shape = MoeShape(256, 128, 8, 4)
    work = launch.MoeWorkspace(shape, tokens, "cpu")
    x = torch.zeros(tokens, 256, dtype=torch.bfloat16)
    ids = torch.zeros(tokens, 4, dtype=torch.int32)
    layer = launch.MoeWeights(*(torch.zeros(1) for _ in range(4)))
    launch.moe(x, ids, torch.zeros(tokens, 4), layer, shape, work)
    launch.router(torch.zeros(tokens, 8), torch.zeros(8), 4, 1.0)
    files = [file for file, *_ in made]
    assert files == ["moe/align", w13, w2, "moe/combine", "moe/router"]
    for file, grid, block, args in made:
        assert len(args) == parameters(file), file
        assert all(size > 0 for size in grid) and block % 32 == 0


def test_wrong_arguments_are_refused():
    shape = MoeShape(256, 128, 8, 4)
    work = launch.MoeWorkspace(shape, 2, "cpu")
    x = torch.zeros(3, 256, dtype=torch.bfloat16)
    ids, weights = torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3, 4)
    with pytest.raises(ValueError, match="workspace is for 2"):
        launch.check(x, ids, weights, shape, work)
    with pytest.raises(ValueError, match=r"ids is torch\.int64"):
        launch.check(x, ids.long(), weights, shape, work)
    with pytest.raises(ValueError, match="contiguous"):
        launch.check(x[:, ::2].repeat(1, 2).T.contiguous().T, ids, weights, shape, work)


def test_the_benchmark_says_what_it_needs():
    # Three layers of 384 experts of 3,096,576 bytes, and room for the rest.
    assert 3.57e9 < bench_moe.memory_needed(bench_moe.SHAPES["tp8"], 1) < 4.6e9


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_benchmark_refuses_without_a_gpu():
    with pytest.raises(UnavailableError, match="NVIDIA GPU"):
        bench_moe.bench_moe()


def test_results_are_saved_a_row_a_line(tmp_path):
    import json

    from kconvert.runtime.bench.result import save

    result = {"bench": "moe", "card": "X", "rows": [{"M": 1, "us": 2.5}, {"M": 2, "us": 3.0}]}
    save(result, tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text()) == result
    assert len((tmp_path / "r.json").read_text().splitlines()) == 8
