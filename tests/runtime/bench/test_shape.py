"""`bench decode --shape` without a GPU: K2.6's rank on torch's device without memory, its launches
recorded; the whole table of a small rank with launches that do nothing; the checks on the CPU."""

import copy
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "backends"))

import numpy as np
import pytest
import torch

pytest.importorskip("cuda.core", reason="the cuda extra is not installed")

from recorded import recording
from test_cuda_launches import SHARED, assert_fits

from kconvert.convert.cli.bench_text import shape_text
from kconvert.convert.synth.presets import PRESETS
from kconvert.layouts.errors import UnavailableError, UnsupportedError
from kconvert.runtime.backends.cpu import CpuBackend
from kconvert.runtime.backends.cuda_decoder import ALONE, AUTO, DRAFTED, CudaDecoder
from kconvert.runtime.backends.torch_twins import TwinBackend
from kconvert.runtime.bench.agreement import recorded
from kconvert.runtime.bench.shape import bench, rank
from kconvert.runtime.bench.shape.check import NEAR, _Chosen, layer_near, same_bits
from kconvert.runtime.bench.shape.standin import StandIn
from kconvert.runtime.bench.shape.weights import MadeUpBlobs, fill
from kconvert.runtime.bench.timeline import summary
from kconvert.runtime.config import ModelConfig, config_of
from kconvert.runtime.distributed import Ranks
from kconvert.runtime.drafting.dflash_config import DrafterConfig
from kconvert.runtime.kernels import nvrtc
from kconvert.runtime.kernels.moe.launch import MoeWeights
from kconvert.runtime.kernels.tree import launch as tree
from kconvert.runtime.model import Model

K26 = PRESETS["k2.6"].config
SMALL = {
    "hidden_size": 512, "num_hidden_layers": 6, "n_routed_experts": 32, "num_experts_per_tok": 4,
    "moe_intermediate_size": 1024, "intermediate_size": 1024, "num_attention_heads": 8,
    "num_key_value_heads": 8, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 16, "v_head_dim": 64, "vocab_size": 1024,
}  # fmt: skip


def small(**sizes: int) -> ModelConfig:
    config = copy.deepcopy(K26)
    config["text_config"] |= SMALL | sizes
    return config_of(config)


class HostBlobs(MadeUpBlobs):
    """Arrays, as backends on the CPU want them."""

    def get(self, name: str, shape: tuple[int, ...]) -> Any:
        return np.asarray(super().get(name, shape))

    def columns(self, name: str, shape: tuple[int, int], part: range) -> Any:
        return np.asarray(super().columns(name, shape, part))

    def expert(self, name: str, local: int) -> Any:
        kept = vars(self).setdefault("kept", {})
        if name not in kept:
            kept[name] = np.asarray(self.stack(name))
        return kept[name][local]


def host_model(backend: Any, seed: int = 0) -> Model:
    return Model(backend.config, HostBlobs(backend.config, Ranks(), seed), backend)


# ---- the true size


@pytest.fixture
def launches(monkeypatch) -> list[Any]:
    return recording("sm_120a", monkeypatch)


def test_a_rank_of_k26(launches) -> None:
    """Its bytes are those that were counted; every kernel is given what it takes, compiles for the
    smallest GPU without a spill, and fits."""
    config = config_of(K26)
    engine = rank.open_rank(config, 8, Ranks(), 0, torch.device("meta"))
    blobs = engine.model.blobs
    experts = 60 * 384 * 3 * 7168 * 256 * (1 / 2 + 2 / 32)
    rest = rank.weight_bytes(blobs, config) - experts
    assert 4.6e9 < rest < 5.1e9  # and the drafter's 0.87
    decoder = engine.decoder
    decoder._reserve(1300)
    for rows in (1, 8, 16, 33, 65):
        for kind in (ALONE, DRAFTED, AUTO):
            begin = len(launches)
            decoder._step(rows, kind)
            layers = Counter(launch.kernel for launch in launches[begin:])
            assert sum(count // 60 for count in layers.values()) <= 19
    kernels = {(launch.kernel, *sorted(launch.defines.items())): launch for launch in launches}
    for launch in kernels.values():
        assert_fits(launch)
        found = nvrtc.resources(launch.kernel, "sm_120a", launch.defines)
        assert found.spills == found.stack == 0, launch
        assert launch.shared + found.static_shared <= SHARED["sm_120a"], launch


def test_the_drafter_of_k26_is_the_published_one() -> None:
    shape = rank.drafter_config(config_of(K26), 8)
    assert shape.target_layer_ids == (1, 12, 24, 35, 47, 58) and shape.block == 8
    assert sum(2 * int(np.prod(size)) for size in shape.shapes().values()) == 6_958_554_112
    assert shape.windows == (2048,) * 5 + (None,) and isinstance(shape, DrafterConfig)


def test_a_gpu_that_is_too_small(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (80 << 30, 80 << 30))
    with pytest.raises(UnavailableError, match=r"76\.\d GB of weights .* larger --rank-of"):
        rank._check_memory(76_200_000_000, torch.device("cuda"))


@pytest.mark.parametrize("size", [3, 128])
def test_what_does_not_divide(size) -> None:
    with pytest.raises(UnsupportedError):
        rank.open_rank(config_of(K26), size, Ranks(), 0, torch.device("meta"))


# ---- ranks that are not there


def test_a_rank_without_the_others_has_its_part_and_its_own_sums() -> None:
    ranks = StandIn.around(Ranks(), 4)
    part = torch.arange(6.0).view(2, 3)
    assert torch.equal(ranks.all_gather_tensor(part), part[None])
    assert ranks.shared_memory(64, "cpu") is None
    assert ranks.broadcast(7) == 7 and ranks.rank_slice("rows", 8) == range(2)


# ---- the table of a small rank


class Graph:
    """What was launched while it was captured; a replay walks again."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def replay(self) -> None:
        for launch in self.made:
            if launch.kernel == "tree/walk":
                walked(launch.arguments)


def walked(arguments: tuple[Any, ...]) -> None:
    """tree/walk of a draft of which nothing is accepted."""
    rows, state, ring = arguments[3], arguments[7], arguments[11]
    state[tree.BEFORE] = state[tree.START]
    state[tree.START] += 1
    state[tree.ACCEPTED], state[tree.COUNT] = 1, rows
    step = int(state[tree.STEPS])
    ring[step % len(ring), : tree.HEADER + 1] = torch.tensor([step + 1, 1, rows, -1, 0, 1, 0, 0, 5])
    state[tree.STEPS] = step + 1


@pytest.fixture
def pretended(monkeypatch) -> list[Any]:
    """A GPU that launches nothing and writes zeros."""
    made = recording("sm_90a", monkeypatch)
    record = tree.launch

    def launch(kernel: str, *arguments: Any, **options: Any) -> None:
        record(kernel, *arguments, **options)
        if kernel == "tree/walk" and not capturing:
            walked(made[-1].arguments)

    capturing: list[int] = []

    class Capture:
        def __init__(self, graph: Graph, **_: Any) -> None:
            self.graph = graph

        def __enter__(self) -> None:
            capturing.append(len(made))

        def __exit__(self, *_: object) -> None:
            self.graph.made = made[capturing.pop() :]

    class Event:
        def __init__(self, **_: Any) -> None: ...
        def record(self) -> None: ...
        def synchronize(self) -> None: ...
        def elapsed_time(self, _: object) -> float:
            return 2.0

    monkeypatch.setattr(tree, "launch", launch)
    for name, value in (("CUDAGraph", Graph), ("graph", Capture), ("Event", Event)):
        monkeypatch.setattr(torch.cuda, name, value)
    empty = torch.empty

    def zeros(*sizes: Any, **options: Any) -> torch.Tensor:
        made = empty(*sizes, **options)
        return made if made.is_meta else made.zero_()

    monkeypatch.setattr(torch, "empty", zeros)
    seen = {"kernels": {"moe_w13": 9.0}, "launched": {"moe_w13": 5.0, "linear": 32.0}}
    monkeypatch.setattr(bench, "timeline", lambda *_: seen)
    monkeypatch.setattr(bench, "where", lambda run: (run(), seen)[1])
    return made


def small_rank(size: int = 8) -> Any:
    return rank.open_rank(small(), size, Ranks(), 0, torch.device("cpu"))


def test_the_table_of_a_small_rank(pretended, monkeypatch) -> None:
    monkeypatch.setattr(bench, "COLLAPSED", 0.0)  # zeros go to the same experts
    engine, told = small_rank(), []
    rows = list(bench.measured(engine, Ranks(), (256, 96), told.append))
    assert len(told) == len(rows) == 2 * 12
    assert [row["context"] for row in rows] == [96] * 12 + [256] * 12
    kinds = [(r["what"], r.get("texts"), r.get("budget"), r.get("rows")) for r in rows[:12]]
    assert kinds == [
        ("ar", 1, 0, 1), *(("verify", 1, None, m) for m in (8, 16, 33, 65)),
        ("verify", 10, None, 90), ("verify", 10, None, 330),
        ("ddtree", 1, 3, 4), ("ddtree", 1, 7, 8), ("ddtree", 1, 15, 16), ("ddtree", 1, 32, 33),
        ("ddtree", 1, "auto", None),
    ]  # fmt: skip
    assert rows[1]["ms"] == 2.0 and rows[5]["tokens_per_second"] == 5000.0
    assert rows[0]["timeline"]["launches_a_layer"] == 1 + 6 and "timeline" not in rows[12]
    sums = [m for m in pretended if m.kernel == "rows/add_norm" and m.arguments[1] is not None]
    assert sums and all(launch.arguments[2] == 1 for launch in sums)  # this rank's
    table = {
        "rank_of": 8, "shape": "small", "layers": 6, "card": "none", "date": "", "gpu_bytes": 0,
        "exchange": bench.exchange_text(8, 1), "rows": rows,
        "check": {"near": NEAR, "right": True, "bits": [
            {"context": 5, "way": "again", "same": True}, {"context": 5, "way": "b", "same": False},
        ], "layers": [{"layer": 0, "largest": 1e-3, "tossed": 1}]},
    }  # fmt: skip
    text = shape_text(table)
    assert len(text.splitlines()) == 5 + 24 + 12
    assert "NOT THE SAME in b at 5" in text and "1 of 8 ranks is there" in text
    assert "not told" not in text and "verify, 10 texts" in text
    assert shape_text({**table, "rows": [], "check": None}).endswith("not checked")


def test_where_routing_collapses_nothing_is_told(pretended) -> None:
    rows = list(bench.measured(small_rank(), Ranks(), (96,), lambda _: None))
    collapsed = [row for row in rows if row.get("collapsed")]
    assert len(collapsed) == 6 + 4 and not any("ms" in row for row in collapsed)
    assert "routing collapsed: not told" in shape_text({
        "rank_of": 8, "shape": "small", "layers": 6, "card": "", "date": "", "gpu_bytes": 0,
        "exchange": "", "check": None, "rows": rows,
    })  # fmt: skip


def test_a_prompt_is_taken_for_read(pretended, monkeypatch) -> None:
    engine = small_rank()
    ran: list[int] = []
    forward = Model.forward
    monkeypatch.setattr(
        Model, "forward", lambda self, step, *rest: (ran.append(len(step.tokens)),
                                                     forward(self, step, *rest))[1],
    )  # fmt: skip
    engine.generate(rank.some_tokens(engine.model, 100).tolist(), 2)
    assert ran == [1] * len(ran)
    keys = engine.decoder._cache.keys
    assert 0.9 < keys[:, :99].float().std() < 1.1 and not keys[:, 100:].any()


def test_several_texts_trees_have_slots_of_their_own(pretended) -> None:
    engine = small_rank()
    step = bench.drafted_rows(engine, bench.Verified(3, 9), 200)
    assert step.slots.tolist() == list(range(200, 227))
    own = [engine.model.backend.drafted(0, 200, bench._tree(8)) for _ in range(2)]
    for text in range(3):
        mine = slice(9 * text, 9 * text + 9)
        assert torch.equal(step.positions[mine], own[0].positions)
        for row in range(9):
            count = int(step.counts[9 * text + row])
            found = step.windows[9 * text + row, :count]
            wanted = own[0].windows[row, :count]
            assert torch.equal(found, torch.where(wanted >= 200, wanted + 9 * text, wanted))
    assert len(step.tokens.unique()) == 27


# ---- the checks


def test_bits_of_all_ways_are_the_same_on_the_cpu() -> None:
    few = small(num_hidden_layers=3, n_routed_experts=8)
    found = list(same_bits(host_model(CpuBackend(few, Ranks(), "bfloat16")), 150, 3))
    assert [row["way"] for row in found] == ["again", "chains of 8", "trees of 16", "trees of 33"]
    assert all(row["same"] and row["tokens"] == 16 for row in found)


def test_bits_that_depend_on_the_rows_are_found() -> None:
    class Wrong(CpuBackend):
        def linear(self, x: Any, weight: Any) -> Any:
            return super().linear(x, weight) * np.float32(1 + 1e-6 * (len(x) == 16))

    few = small(num_hidden_layers=2, n_routed_experts=8)
    found = list(same_bits(host_model(Wrong(few, Ranks(), "float32")), 150, 3))
    assert [row["same"] for row in found] == [True, True, False, True]


class Rounding(TwinBackend):
    """bf16 twins with experts as a GPU holds them, and an error on demand."""

    wrong = 0.0

    def experts_of(self, source: Any) -> Any:
        stacks = [
            torch.from_numpy(np.asarray(source.stack(m, r)).view(f"i{4 if r == 'code' else 2}"))
            for m in ("w13", "w2") for r in ("code", "scale")
        ]  # fmt: skip
        return SimpleNamespace(
            weights=MoeWeights(*stacks), shape=SimpleNamespace(first_expert=0), source=source
        )

    def experts(self, h: Any, routing: Any, experts: Any, shared: Any) -> Any:
        chosen = set(routing[0].flatten().tolist())
        whole = SimpleNamespace(blobs=experts.source.blobs)
        pairs = super().experts_of(_Chosen(experts, whole, 1, chosen))
        for number in chosen:  # as the blob's own reader has them
            assert np.array_equal(
                _Chosen(experts, whole, 1, chosen).codes("w2", number),
                experts.source.codes("w2", number),
            )
        return super().experts(h, routing, pairs, shared) * (1 + self.wrong)

    def expand(self, context: Any, kv_b: Any) -> Any:
        return super().expand(context, kv_b) * (1 + self.wrong)


@pytest.mark.parametrize("number", [0, 1])
def test_a_layer_is_near_float64(number, monkeypatch) -> None:
    backend = Rounding(small(), "bfloat16")
    engine: Any = SimpleNamespace(model=host_model(backend))
    found = layer_near(engine, number, 96, 1)
    assert found["right"] and 1e-4 < found["largest"] <= NEAR and found["tossed"] < 8
    monkeypatch.setattr(backend, "wrong", 0.1)
    assert not layer_near(engine, number, 96, 1)["right"]


def test_made_up_tokens_go_to_unlike_experts() -> None:
    """About as many as chance would touch; of one token all rows touch the same."""
    config = replace(small(num_hidden_layers=4), top_k=2)
    model = host_model(CpuBackend(config, Ranks(), "float32"))
    cache = model.new_cache(40)
    rank.make_context(cache.layers, 8, 0)
    for tokens, least, most in ((rank.some_tokens(model, 16), 15, 26), (np.full(16, 3), 2, 8)):
        with recorded(model) as kept:
            model.forward(model.backend.sequence(tokens, 8), cache)
        counts = bench.touched(kept)
        assert len(counts) == 3 and least <= np.mean(counts) <= most, counts
    assert round(bench.expected_experts(config_of(K26), 16)) == 110


def test_times_of_a_graph() -> None:
    events = [(0, 10, "tree_grow"), (8, 20, "moe_w13"), (21, 30, "moe_w13")]
    found = summary([[(b + d, e + d, n) for b, e, n in events] for d in (0, 100, 200)])
    assert found["launched"] == {"moe_w13": 2.0, "tree_grow": 1.0} and found["between_us"] == 0.07
    assert found["kernels"] == {"moe_w13": 0.02, "tree_grow": 0.01}


def test_decoders_are_the_engines() -> None:
    """What is measured is what users run: nothing of a step is another's."""
    own = {name for name in vars(rank.RankDecoder) if not name.startswith("__")}
    assert own & set(vars(CudaDecoder)) == {"_prefill", "unlike_tokens"}


def test_made_up_codes_are_as_often_below_zero_as_above() -> None:
    words = torch.empty(64, 1000, dtype=torch.int32)
    fill(words, "w13_weight_packed", 0)
    nibbles = torch.stack([words >> shift & 15 for shift in range(0, 32, 4)]).long()
    counts = torch.bincount(nibbles.flatten(), minlength=16) / nibbles.numel()
    assert counts[0] == 0 and abs(counts[8] - 2 / 16) < 2e-3
    assert abs((nibbles - 8).double().mean()) < 0.02
