"""Stand-ins of the engines: what the plugins touch of vLLM and SGLang, with the signatures that the
real versions have (each read in their source, and run in tests/engines)."""

import enum
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from engines import checkpoints
from safetensors import safe_open

from kconvert.convert import convert
from kconvert.layouts.sharding import Parallelism

HIDDEN, ROWS, EXPERTS, GROUP = 256, 256, 8, 32
WHOLE = Parallelism(1, 1)
INDICES = ("w13_weight_g_idx", "w2_weight_g_idx",
           "w13_g_idx_sort_indices", "w2_g_idx_sort_indices")  # fmt: skip


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The tiny checkpoint of the engines' tests, converted; its source is `source` beside it."""
    root = tmp_path_factory.mktemp("plugins")
    checkpoints.write(root / "source")

    def folder(layout: str = "marlin", tp: int = 1, ep: int = 1) -> Path:
        output = root / f"{layout}-{tp}-{ep}"
        if not output.exists():
            convert(str(root / "source"), output, layout=layout, tp=tp, ep=ep)
        return output

    return folder


def shapes(experts: int, rows: int, transposed: bool) -> dict[str, tuple[int, ...]]:
    """Of an engine's parameters before loading."""
    matrices = {
        "w13_weight_packed": (2 * rows, HIDDEN // 8),
        "w13_weight_scale": (2 * rows, HIDDEN // GROUP),
        "w2_weight_packed": (HIDDEN, rows // 8),
        "w2_weight_scale": (HIDDEN, rows // GROUP),
    }
    return {n: (experts, *(s[::-1] if transposed else s)) for n, s in matrices.items()}


class Experts(torch.nn.Module):
    """A layer of routed experts: RoutedExperts of vLLM, FusedMoE of SGLang."""

    def __init__(self, parallel: Parallelism, rank: int, transposed: bool, indices: bool) -> None:
        super().__init__()
        experts, rows = EXPERTS // parallel.ep, ROWS // parallel.moe_tp
        ep_rank, tp_rank = divmod(rank, parallel.moe_tp)
        for name, shape in shapes(experts, rows, transposed).items():
            dtype = torch.int32 if "packed" in name else torch.bfloat16
            self._add(name, torch.zeros(shape, dtype=dtype))
            getattr(self, name).is_transposed = transposed
        for name in ("w13_weight_shape", "w2_weight_shape"):
            self._add(name, torch.zeros(experts, 2))
        for name in INDICES if indices else ():
            self._add(name, torch.zeros((experts, 16), dtype=torch.int32))
        self._expert_map = None  # vLLM
        if parallel.ep > 1:
            self._expert_map = torch.full((EXPERTS,), -1)
            self._expert_map[ep_rank * experts : (ep_rank + 1) * experts] = torch.arange(experts)
        self.moe_config = SimpleNamespace(
            moe_parallel_config=SimpleNamespace(tp_size=parallel.moe_tp, tp_rank=tp_rank)
        )
        self.moe_tp_size, self.moe_tp_rank = parallel.moe_tp, tp_rank  # SGLang
        self.num_fused_shared_experts = 0

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))

    def _map_global_expert_id_to_local_expert_id(self, expert: int) -> int:
        return expert if self._expert_map is None else int(self._expert_map[expert])


class Model(torch.nn.Module):
    """Three layers, the first without experts; keeps what it is given."""

    def __init__(self, make: Callable[[], Experts], suffix: str = "") -> None:
        super().__init__()
        self.loaded: dict[str, torch.Tensor] = {}
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(3))
        self.moe = [make(), make()]
        for layer in self.model.layers:
            layer.norm = torch.nn.Linear(1, 1)
        for layer, experts in zip(self.model.layers[1:], self.moe, strict=True):
            layer.mlp = torch.nn.Module()
            layer.mlp.experts = experts
            if suffix:
                layer.mlp.experts = torch.nn.Module()
                setattr(layer.mlp.experts, suffix, experts)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        self.loaded.update(weights)
        return set(self.loaded)


def module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> ModuleType:
    """A module in sys.modules, and all above it."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        full = ".".join(parts[:i])
        if full not in sys.modules:
            monkeypatch.setitem(sys.modules, full, ModuleType(full))
    for key, value in content.items():
        setattr(sys.modules[name], key, value)
    return sys.modules[name]


def read(files: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                yield name, tensors.get_tensor(name)


def files_in(folder: str) -> list[str]:
    found = sorted(str(path) for path in Path(folder).glob("*.safetensors"))
    if not found:
        raise RuntimeError(f"Cannot find any model weights with `{folder}`")
    return found


@dataclass
class LoadConfig:
    load_format: Any = "kconvert"
    model_loader_extra_config: dict[str, Any] = field(default_factory=dict)


class Vllm:
    """One version of vLLM: `old` is 0.26, whose parameters are transposed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, old: bool) -> None:
        self.old, self.repacks, self.formats = old, 0, {}
        self.config = SimpleNamespace(
            lora_config=None, parallel_config=SimpleNamespace(enable_eplb=False)
        )
        self.log: list[str] = []

        class DefaultModelLoader:
            def __init__(self, load_config: LoadConfig) -> None:
                if set(load_config.model_loader_extra_config) - {"enable_multithread_load"}:
                    raise ValueError("Unexpected extra config keys")
                self.load_config = load_config

            def _prepare_weights(
                self, model_name_or_path, subfolder, revision, fall_back_to_pt,
                allow_patterns_overrides,
            ) -> Any:  # fmt: skip
                if self.load_config.load_format not in ("auto", "safetensors"):
                    raise ValueError(f"Unknown load_format: {self.load_config.load_format}")
                found = model_name_or_path, files_in(model_name_or_path), True
                return found if old else (*found, "model.safetensors.index.json")

            def get_all_weights(self, model_config, model) -> Iterator[Any]:
                _, files, *_ = self._prepare_weights(model_config.model, None, None, True, None)
                yield from read(files)

            def load_weights(self, model, model_config) -> None:
                model.load_weights(self.get_all_weights(model_config, model))

        def convert_to_wna16_moe_kernel_format(backend, layer, quant_config, input_dtype, w13):
            self.repacks += 1

        log = SimpleNamespace(
            info=lambda text, *values: self.log.append(text % values),
            warning=lambda text, *values: self.log.append(text % values),
        )
        base = "vllm.model_executor.model_loader"
        module(monkeypatch, "vllm.config", ModelConfig=object,
               get_current_vllm_config=lambda: self.config)  # fmt: skip
        module(monkeypatch, "vllm.config.load", LoadConfig=LoadConfig)
        module(monkeypatch, "vllm.logger", init_logger=lambda name: log)
        module(monkeypatch, base, register_model_loader=self._register)
        module(monkeypatch, f"{base}.default_loader", DefaultModelLoader=DefaultModelLoader)
        self.module = module(
            monkeypatch, "vllm.wna16",
            convert_to_wna16_moe_kernel_format=convert_to_wna16_moe_kernel_format,
        )  # fmt: skip
        self.method = type("Method", (), {"__module__": "vllm.wna16"})
        self.method.wna16_backend = SimpleNamespace(value="MARLIN")
        monkeypatch.delitem(sys.modules, "kconvert.runtime.plugins.vllm", raising=False)

    def _register(self, name: str) -> Callable[[type], type]:
        return lambda loader: self.formats.setdefault(name, loader)

    def experts(self, parallel: Parallelism, rank: int) -> Experts:
        layer = Experts(parallel, rank, transposed=self.old, indices=self.old)
        layer.quant_method = self.method()
        return layer

    def model(self, parallel: Parallelism = WHOLE, rank: int = 0) -> Model:
        return Model(lambda: self.experts(parallel, rank), "routed_experts")

    def load(self, folder: Path, model: Model, runner: str = "generate", **extra: Any) -> Any:
        """As vLLM does: load, then let each layer process its weights; what that returned."""
        from kconvert.runtime.plugins import entry

        entry.vllm()
        loader = self.formats["kconvert"](LoadConfig(model_loader_extra_config=extra))
        loader.load_weights(model, SimpleNamespace(model=str(folder), runner_type=runner))
        return loader, [self.process(layer) for layer in model.moe]

    def process(self, layer: Experts) -> Any:
        function = self.module.convert_to_wna16_moe_kernel_format
        return function(
            backend=None, layer=layer, quant_config=None, input_dtype=None,
            w13=layer.w13_weight_packed,
        )  # fmt: skip


class Sglang:
    """SGLang: `old` is 0.5.17."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, old: bool) -> None:
        self.hooks: dict[str, Callable[..., Any]] = {}
        self.repacks = 0
        self.arguments = SimpleNamespace(
            enable_lora=None, lora_paths=None, enable_eplb=False, ep_num_redundant_experts=0,
            init_expert_location="trivial",
        )  # fmt: skip
        self.format = enum.Enum("LoadFormat", [("AUTO", "auto"), ("PT", "pt")])

        class DefaultModelLoader:
            def __init__(self, load_config: LoadConfig) -> None:
                if set(load_config.model_loader_extra_config) - {"num_threads"}:
                    raise ValueError("Unexpected extra config keys")
                self.load_config = load_config

            def _get_all_weights(self, model_config, model) -> Iterator[Any]:
                yield from self._get_weights_iterator(model_config.model_path)

            def _get_weights_iterator(self, source) -> Iterator[Any]:
                _, files, _ = self._prepare_weights(source, None, True)
                return read(files)

            if old:

                def _prepare_weights(self, model_name_or_path, revision, fall_back_to_pt) -> Any:
                    return model_name_or_path, files_in(model_name_or_path), True
            else:

                def _prepare_weights(
                    self, model_name_or_path, revision, fall_back_to_pt,
                    allow_patterns_overrides=None,
                ) -> Any:  # fmt: skip
                    return model_name_or_path, files_in(model_name_or_path), True

            @staticmethod
            def load_weights_and_postprocess(model, weights, target_device) -> None:
                model.load_weights(weights)
                for layer in model.moe:
                    if not getattr(layer, "is_marlin_converted", False):
                        self.repacks += 1

        def hook(target: str, function: Callable[..., Any], kind: Any) -> None:
            assert kind == "around"
            self.hooks[target] = function

        module(monkeypatch, "sglang.srt.model_loader.loader", DefaultModelLoader=DefaultModelLoader)
        module(
            monkeypatch, "sglang.srt.plugins.hook_registry",
            HookRegistry=SimpleNamespace(register=hook),
            HookType=SimpleNamespace(AROUND="around"),
        )  # fmt: skip
        module(monkeypatch, "sglang.srt.runtime_context", get_server_args=lambda: self.arguments)
        module(
            monkeypatch, "sglang.scheme",
            marlin_make_workspace=lambda device, blocks: torch.zeros(blocks),
        )  # fmt: skip
        self.scheme = type("CompressedTensorsWNA16MoE", (), {"__module__": "sglang.scheme"})
        monkeypatch.delitem(sys.modules, "kconvert.runtime.plugins.sglang", raising=False)

    def experts(self, parallel: Parallelism, rank: int) -> Experts:
        layer = Experts(parallel, rank, transposed=True, indices=True)
        layer.quant_method, layer.scheme = object(), self.scheme()
        return layer

    def model(self, parallel: Parallelism = WHOLE, rank: int = 0) -> Model:
        return Model(lambda: self.experts(parallel, rank))

    def loader(self, folder: Path, **extra: Any) -> Any:
        """What the hooked get_model_loader gives; "theirs" where the original was asked."""
        from kconvert.runtime.plugins import entry

        entry.sglang()
        config = LoadConfig(self.format.AUTO, extra)
        model_config = SimpleNamespace(model_path=str(folder))
        (choose,) = self.hooks.values()
        return choose(lambda *_: "theirs", config, model_config)

    def load(self, folder: Path, model: Model, **extra: Any) -> Any:
        loader = self.loader(folder, **extra)
        weights = loader._get_all_weights(SimpleNamespace(model_path=str(folder)), model)
        loader.load_weights_and_postprocess(model, weights, torch.device("cpu"))
        return loader


@pytest.fixture(params=["0.26", "0.32"])
def vllm(request, monkeypatch: pytest.MonkeyPatch) -> Vllm:
    return Vllm(monkeypatch, request.param == "0.26")


@pytest.fixture(params=["0.5.17", "0.5.23"])
def sglang(request, monkeypatch: pytest.MonkeyPatch) -> Sglang:
    return Sglang(monkeypatch, request.param == "0.5.17")


@pytest.fixture
def held(converted) -> Callable[..., dict[str, torch.Tensor]]:
    """A rank's stacked tensors of layer 1 as a conversion for `parallel` has them."""

    def tensors(layout: str, parallel: Parallelism, rank: int) -> dict[str, torch.Tensor]:
        folder = converted(layout, parallel.tp, parallel.ep)
        file = folder / f"rank-{rank:05}-of-{parallel.tp:05}/layer-00001.safetensors"
        return {name.rpartition(".")[2]: tensor for name, tensor in read([str(file)])}

    return tensors
