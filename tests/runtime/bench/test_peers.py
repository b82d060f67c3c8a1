"""vLLM and Humming beside kconvert in ``bench moe``, without a GPU and without either.

Small modules stand in for them: the names and defaults of vllm 0.33.0 and humming-kernels 0.1.19,
computed row by row in float32.
"""

import subprocess
import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kconvert.convert.cli import bench_text
from kconvert.runtime.bench import humming as bench_humming
from kconvert.runtime.bench import moe as bench_moe
from kconvert.runtime.bench import peers as bench_peers
from kconvert.runtime.kernels.moe import launch, reference
from kconvert.runtime.kernels.moe.shape import MoeShape

SHAPES = {
    "tp": MoeShape(256, 128, 8, 4),
    "ep": MoeShape(256, 128, 4, 4, total_experts=12, first_expert=4),
}
LAYERS = "vllm/model_executor/layers"
FUSED = f"{LAYERS}/fused_moe/experts/marlin_moe.py"
VLLM = {
    "vllm/__init__.py": "",
    "vllm/scalar_type.py": """
class scalar_types:
    class uint4b8:
        id = 77
""",
    "vllm/_custom_ops.py": """
def moe_sum(input, output, topk_ids=None, expert_map=None):
    if expert_map is not None:
        input = input.masked_fill((expert_map[topk_ids.long()] < 0)[..., None], 0)
    output.copy_(input.sum(1))
""",
    f"{LAYERS}/quantization/utils/marlin_utils.py": """
import torch

def marlin_make_workspace_new(device, max_blocks_per_sm=1):
    return torch.zeros(3 * max_blocks_per_sm, dtype=torch.int, device=device)
""",
    FUSED: """
import torch
from kconvert.runtime.kernels.moe.reference import marlin_weight

def fused_marlin_moe(
    hidden_states, w1, w2, bias1, bias2, w1_scale, w2_scale, topk_weights, topk_ids, quant_type_id,
    apply_router_weight_on_input=False, global_num_experts=-1, activation="silu",
    activation_func=None, moe_sum=None, expert_map=None, input_global_scale1=None,
    input_global_scale2=None, global_scale1=None, global_scale2=None, w1_zeros=None, w2_zeros=None,
    workspace=None, intermediate_cache13=None, intermediate_cache2=None, output=None,
    input_dtype=None, activation_config=None, mul_topk_weights_in_gemm2=True,
):
    (m, k), (e, n) = hidden_states.shape, (w1.shape[0], w2.shape[1] * 16)
    assert bias1 is bias2 is None and quant_type_id == 77
    assert w1.shape == (e, k // 16, 4 * n) and w2.shape == (e, n // 16, 2 * k)
    assert w1_scale.shape == (e, k // 32, 2 * n) and w2_scale.shape == (e, n // 32, k)
    assert w1.dtype == w2.dtype == torch.int32 == topk_ids.dtype == workspace.dtype
    assert hidden_states.dtype == w1_scale.dtype == w2_scale.dtype == output.dtype == torch.bfloat16
    assert topk_weights.dtype == torch.float32 and topk_weights.shape == topk_ids.shape
    assert len(workspace) == 12 and not workspace.any()
    if expert_map is None:
        assert global_num_experts == e
    else:
        assert expert_map.dtype == torch.int32 and expert_map.shape == (global_num_experts,)
    y = torch.full((m, topk_ids.shape[1], k), torch.nan)
    for token, slot in torch.cartesian_prod(*map(torch.arange, topk_ids.shape)).tolist():
        expert = int(topk_ids[token, slot])
        expert = expert if expert_map is None else int(expert_map[expert])
        if expert >= 0:
            x = hidden_states[token].float()
            both = marlin_weight(w1[expert], w1_scale[expert]).float() @ x
            act = torch.nn.functional.silu(both[:n]) * both[n:]
            down = marlin_weight(w2[expert], w2_scale[expert]).float()
            y[token, slot] = topk_weights[token, slot] * (down @ act)
    moe_sum(y, output, topk_ids, expert_map)
""",
}
HUMMING = {
    "humming/__init__.py": "",
    "humming/schema.py": """
import dataclasses

@dataclasses.dataclass(kw_only=True)
class HummingWeightSchema:
    quant_method: str = "humming"
    b_dtype: str
    bs_dtype: str | None = None
    weight_scale_group_size: int = 0
    weight_scale_group_size_n: int = 0
    weight_scale_type: str | None = None
    weight_scale_2_type: str | None = None
    has_zero_point: bool = False
    is_fp_zero_point: bool = False
    hadamard_block_size: int = 0
""",
    "humming/transform.py": """
import torch

def prepare_and_transform_humming_tensors(
    tensors, shape_n, shape_k, weight_schema, input_schema=None, num_experts=None,
    pad_n_to_multiple=1, pad_k_to_multiple=1, has_bias=False, torch_dtype=None, device=None,
):
    weight, scale = tensors["weight"], tensors["weight_scale"]
    assert weight_schema.b_dtype == "uint4" and weight_schema.weight_scale_group_size == 32
    assert weight.shape == (num_experts, shape_n, shape_k // 8) and weight.dtype == torch.int32
    assert scale.shape == (num_experts, shape_n, shape_k // 32) and scale.dtype == torch_dtype
    assert weight.is_contiguous() and scale.is_contiguous() and weight.device == device
    return ("config", shape_n, shape_k), tensors
""",
    "humming/tune.py": """
def get_heuristics_config(
    layer_config, shape_m=None, use_f16_accum=False, use_batch_invariant=False,
    use_m_major_input_scale=False, gemm_type="dense", device=None,
):
    assert layer_config[0] == "config" and gemm_type in ("indexed", "grouped_contiguous")
    return [[0, 8, {"block_shape": [8, 64, 64]}], [8, 99, {"block_shape": [16, 64, 64]}]]
""",
    "humming/forward.py": """
import torch
from kconvert.runtime.kernels.moe.reference import w4a16_weight

def humming_forward(
    config, inputs, weight, weight_scale=None, zero_point=None, bias=None, weight_scale_2=None,
    outputs=None, input_scale=None, input_scale_2=None, sorted_ids=None, expert_ids=None,
    num_tokens_padded=None, expert_layout=None, locks=None, top_k=1, valid_shape_m=0,
    compute_config=None, tuning_config=None, hadamard_block_size=None, use_pdl=None,
):
    _, n, k = config
    assert inputs.dtype == outputs.dtype == torch.bfloat16
    if compute_config["gemm_type"] == "grouped_contiguous":
        assert inputs.shape[1] == k and outputs.shape == (len(inputs), n)
        assert expert_layout.dtype == torch.int64 and expert_layout.shape == (len(weight) + 1,)
        outputs.fill_(torch.nan)
        for expert, (first, end) in enumerate(zip(expert_layout, expert_layout[1:])):
            values = w4a16_weight(weight[expert], weight_scale[expert]).double()
            outputs[first:end] = (inputs[first:end].double() @ values.T).bfloat16()
        return outputs
    assert compute_config["gemm_type"] == "indexed"
    assert inputs.shape[1] == k and outputs.shape == (len(inputs) * top_k, n)
    assert locks.dtype == sorted_ids.dtype == expert_ids.dtype == torch.int32
    assert num_tokens_padded.dtype == torch.int32 and num_tokens_padded.shape == (1,)
    block = next(c["block_shape"][0] for low, to, c in tuning_config if low < valid_shape_m <= to)
    outputs.fill_(torch.nan)
    for place in range(int(num_tokens_padded)):
        row, expert = int(sorted_ids[place]), int(expert_ids[place // block])
        if row < len(outputs):
            assert outputs[row].isnan().all(), "a row twice"
            values = w4a16_weight(weight[expert], weight_scale[expert]).double()
            outputs[row] = (values @ inputs[row // top_k].double()).bfloat16()
    return outputs
""",
}


class Absent(MetaPathFinder):
    """Packages that cannot be imported, even where they are installed."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path, target=None) -> None:
        if fullname in self.names:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Forgets what a test imported under the peers' names."""
    forget = [name for name in sys.modules if name.split(".")[0] in ("vllm", "humming")]
    kept = {name: sys.modules.pop(name) for name in forget}
    yield
    for name in list(sys.modules):
        if name.split(".")[0] in ("vllm", "humming"):
            del sys.modules[name]
    sys.modules.update(kept)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts modules on the path, in front of others; neither package can be imported otherwise."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(files: dict[str, str]) -> list[str]:
        absent = Absent({"vllm", "humming"} - {file.partition("/")[0] for file in files})
        monkeypatch.setattr(sys, "meta_path", [absent, *sys.meta_path])
        for file, source in files.items():
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text(source)
        said: list[str] = []
        write.found = bench_peers.find(said.append)
        return said

    return write


def case(shape: MoeShape, tokens: int):
    """A layer, and x, ids, weights, as the benchmark makes them; ids of all ranks' experts."""
    g = torch.Generator().manual_seed(tokens)
    layer = bench_moe.random_layer(shape, "cpu", g)
    x = torch.randn(tokens, shape.hidden, generator=g).bfloat16()
    return layer, (x, *bench_moe.random_routing(shape, tokens, "cpu", g))


def expected(layer, call, shape: MoeShape) -> torch.Tensor:
    blobs = (layer.w13, layer.w13_scale, layer.w2, layer.w2_scale)
    return reference.moe(*call, *blobs, shape)


def assert_near(out: torch.Tensor, reference: torch.Tensor) -> None:
    assert out.shape == reference.shape and not out.isnan().any()
    assert (out.float() - reference).norm() <= 6e-3 * reference.norm()


def test_what_is_not_there_is_not_listed(install):
    assert install({}) == []
    assert install.found == []


@pytest.mark.parametrize(
    ("file", "source", "named"),
    [
        (FUSED, VLLM[FUSED].replace("moe_sum=None, expert_map", "expert_map"), "moe_sum"),
        (FUSED, VLLM[FUSED].replace("quant_type_id,\n", "quant_type_id, score,\n"), "score"),
        (FUSED, "", "fused_marlin_moe"),
        ("vllm/__init__.py", "raise OSError('libcudart.so.12: cannot open\\nat all')", "libcudart"),
        ("vllm/__init__.py", "import not_there_either", "not_there_either"),
    ],
)
def test_another_signature_is_a_sentence(install, file, source, named):
    (said,) = install(VLLM | {file: source})
    assert install.found == []
    assert "vllm is left out" in said and named in said and "\n" not in said


def test_a_vllm_from_before_the_module_moved_is_a_sentence(install):
    (said,) = install({"vllm/__init__.py": ""})
    assert "vllm is left out" in said and "vllm.model_executor" in said


def test_another_humming_is_a_sentence(install):
    forward = HUMMING["humming/forward.py"].replace("top_k=1, ", "").replace("top_k", "1")
    (said,) = install(HUMMING | {"humming/forward.py": forward})
    assert install.found == [] and "humming is left out" in said and "top_k" in said


def test_a_package_that_is_only_called_humming_is_a_sentence(install):
    (said,) = install({"humming/__init__.py": "hum = 1"})
    assert install.found == [] and "humming is left out" in said


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("tokens", [1, 5])
def test_vllm_gets_what_it_documents(install, shape, tokens):
    assert install(VLLM) == []
    (peer,) = install.found
    layer, call = case(shape, tokens)
    assert peer.backend == "vllm"
    step = peer.load(layer, shape)(*call)
    for _ in range(2):
        assert_near(step(), expected(layer, call, shape))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("tokens", [1, 5, 9])
def test_humming_gets_what_it_documents(install, shape, tokens):
    assert install(HUMMING) == []
    indexed, grouped = install.found
    layer, (x, ids, weights) = case(shape, tokens)
    assert [indexed.backend, grouped.backend] == ["humming indexed", "humming grouped"]
    y = indexed.load(layer, shape)(x, ids, weights)().view(*ids.shape, -1).float()
    mine = (ids >= shape.first_expert) & (ids < shape.first_expert + shape.experts)
    assert torch.equal(y.isnan().all(2), ~mine)
    out = (y.nan_to_num() * weights[..., None]).sum(1)
    assert_near(out, expected(layer, (x, ids, weights), shape))
    order = bench_humming.sorted_pairs(ids, shape)[0]
    rows = grouped.load(layer, shape)(x, ids, weights)()
    assert torch.equal(rows[: len(order)].float(), y.flatten(0, 1)[order])
    assert len(order) == mine.sum() and rows[len(order) :].isnan().all()


@pytest.fixture
def one_process(monkeypatch):
    """The benchmark on the CPU, in small: a step is called once, peers are timed right here."""
    for name in ("align", "experts", "w13", "w2", "router_into"):
        monkeypatch.setattr(launch, name, lambda *_: None)
    monkeypatch.setattr(launch, "moe_schedule", lambda *_: None)
    monkeypatch.setattr(launch, "MoeWorkspace", lambda *_: SimpleNamespace(share=lambda: None))
    monkeypatch.setattr(bench_moe, "read_experts", lambda *_: None)
    monkeypatch.setattr(bench_moe, "graph_us", lambda steps: 3.0 + len([s() for s in steps]))
    monkeypatch.setattr(bench_moe, "SHAPES", SHAPES)
    monkeypatch.setattr(bench_moe, "memory_needed", lambda *_: 0)
    monkeypatch.setattr(bench_moe.bench_peers, "memory_needed", lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 1))
    monkeypatch.setattr(bench_moe, "_device", lambda: "cpu")

    def here(backend, name, tokens, seed, report):
        sent = []
        bench_moe.time_peer(SimpleNamespace(send=sent.append), backend, name, tokens, seed)
        assert sent[-1] == ("end",)
        for kind, *rest in sent[:-1]:
            if kind == "time":
                yield tuple(rest)
            else:
                report(rest[0])

    monkeypatch.setattr(bench_moe, "peer_times", here)


def test_rows_of_peers_stand_beside_kconverts(install, one_process):
    assert install(VLLM | HUMMING) == []
    said = []
    rows = list(bench_moe.bench_shape("tp", (1, 2), 0, said.append, install.found))
    names = ["kconvert", "vllm", "humming indexed", "humming grouped"]
    assert [row["backend"] for row in rows] == [name for name in names for _ in range(2)]
    assert [row["M"] for row in rows] == [1, 2] * 4
    assert {row["us"] for row in rows} == {15.0}  # three layers, four routings
    assert {row["ratio"] for row in rows[2:]} == {1.0}
    assert [row["against"] for row in rows[2::2]] == ["layer_us", "gemms_us", "gemms_us"]
    table = {"card": "X", "date": "D", "rows": rows, "inside": {"vllm": "the whole layer"}}
    lines = bench_text.moe_text(table).splitlines()
    assert len(lines) == 2 + 2 * 3 + 1
    assert lines[3].strip() == (
        "GEMMs 15.0; humming indexed 15.0, kconvert's is 1.00 of it; "
        "humming grouped 15.0, kconvert's is 1.00 of it"
    )
    assert "layer 15.0; vllm 15.0, kconvert's is 1.00 of it" in lines[4]
    assert lines[-1] == "vllm: the whole layer"


def test_a_peer_that_fails_keeps_what_it_had(install, one_process, monkeypatch):
    assert install(VLLM) == []
    made = bench_moe.graph_us

    def failing(steps):
        steps = list(steps)
        if len(steps) == 12 and not made_of_ours(steps):
            failing.calls += 1
            if failing.calls == 2:
                raise RuntimeError("no kernel image\nfor this card")
        return made(steps)

    def made_of_ours(steps):
        return hasattr(steps[0], "func")

    failing.calls = 0
    monkeypatch.setattr(bench_moe, "graph_us", failing)
    said = []
    rows = list(bench_moe.bench_shape("tp", (1, 2), 0, said.append, install.found))
    assert [(row["backend"], row["M"]) for row in rows] == [
        ("kconvert", 1), ("kconvert", 2), ("vllm", 1),
    ]  # fmt: skip
    assert "vllm is left out from here on, it failed: RuntimeError: no kernel image" in said


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("os.abort()", "its process ended with -6"),
        ("time.sleep(60)", "nothing from it for"),
    ],
)
def test_a_peer_that_crashes_or_hangs_costs_its_own_times_alone(monkeypatch, tmp_path, does, said):
    """Really in a process of its own, whose start imports a module that ends it."""
    (tmp_path / "ends_badly.py").write_text(
        f"import os, time\n\ndef target(to, *_):\n    to.send(('time', 1, 2.0))\n    {does}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(bench_moe, "time_peer", __import__("ends_badly").target)
    monkeypatch.setattr(bench_moe, "SILENCE_S", 5.0)
    heard = []
    assert list(bench_moe.peer_times("vllm", "tp8", (1, 2), 0, heard.append)) == [(1, 2.0)]
    assert said in heard[-1]


def test_a_result_is_kept_after_every_shape(monkeypatch):
    kept = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "X")
    monkeypatch.setattr(bench_moe.bench_peers, "find", lambda report: [])
    monkeypatch.setattr(bench_moe, "bench_shape", lambda name, *_: iter([{"shape": name}]))
    result = bench_moe.bench_moe(
        ("tp8", "ep8"), report=print, keep=lambda r: kept.append(len(r["rows"]))
    )
    assert kept == [1, 2] and [row["shape"] for row in result["rows"]] == ["tp8", "ep8"]
    assert result["driver"] and "router weight" in result["inside"]["gemms_us"]


def test_the_commit_is_the_projects_own(monkeypatch, tmp_path):
    found = bench_moe.commit_here()
    assert found == "unknown" or len(found) == 40
    other = tmp_path / "other" / "moe.py"
    other.parent.mkdir()
    other.write_text("")
    subprocess.run(["git", "init", "-q", str(tmp_path / "other")], check=True)
    monkeypatch.setattr(bench_moe, "__file__", str(other))
    assert bench_moe.commit_here() == "unknown"
