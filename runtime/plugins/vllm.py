"""vLLM's `--load-format kconvert`. Tried with 0.26.0, 0.32.0 and 0.33.0 (README.md).

vLLM's own loader reads the common blobs; experts go straight into the parameters of their layer,
whose own parallel configuration says which experts they are. For a `marlin` folder, the layer's
set-up is then told that repacking has been done: `convert_to_wna16_moe_kernel_format`, as its
quantization method calls it, returns what is there.
"""

import functools
import inspect
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from vllm.config import ModelConfig, get_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.logger import init_logger
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from kconvert.layouts.blob import COMMON_FOLDER
from kconvert.layouts.errors import UnsupportedError
from kconvert.layouts.experts import STACKED
from kconvert.layouts.sharding import RankSlice
from kconvert.layouts.stored.output import Blob, Output, is_output
from kconvert.runtime.filling.filler import Filler
from kconvert.runtime.plugins.device import data_of, fill_shapes, memory_of, place
from kconvert.runtime.plugins.loading import (
    LOADED,
    ExpertLayer,
    checked,
    common_blobs,
    experts_of,
    fill,
    open_output,
    take_option,
)

_log = init_logger(f"vllm.{__name__}")  # vLLM shows loggers below its own
_REPACK = "convert_to_wna16_moe_kernel_format"
_READY = "_kconvert_is_packed"  # on a layer: its parameters hold Marlin's bytes
_MARLIN = ("MARLIN", "BATCHED_MARLIN")


def register() -> None:
    """Make the load format known to this process."""
    register_model_loader("kconvert")(KconvertLoader)


class KconvertLoader(DefaultModelLoader):  # type: ignore[misc]
    """Loads an output of `kconvert convert`; a draft model that is no output is left to vLLM."""

    def __init__(self, load_config: LoadConfig) -> None:
        self._check, rest = take_option(load_config.model_loader_extra_config or {})
        plain = replace(load_config, load_format="auto", model_loader_extra_config=rest)
        self._default = DefaultModelLoader(plain)
        self._common: list[Blob] | None = None  # while weights are loaded
        super().__init__(replace(plain, load_format="safetensors"))

    def download_model(self, model_config: ModelConfig) -> None:
        if not is_output(Path(model_config.model)):
            self._default.download_model(model_config)

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        folder = Path(model_config.model)
        if model_config.runner_type == "draft" and not is_output(folder):
            _log.info("kconvert: %s is no converted folder; vLLM's own loader reads it.", folder)
            self._default.load_weights(model, model_config)
            return
        output, begin = open_output(folder), time.perf_counter()
        _refuse_options()
        layers = {
            name: module
            for name, module in model.named_modules()
            if hasattr(module, "w13_weight_packed") and hasattr(module, "quant_method")
        }
        experts = [_expert_layer(output, name, module) for name, module in layers.items()]
        parameters = [name for name, _ in model.named_parameters()]
        self._common = common_blobs(output, parameters, experts)
        if not self._check:
            _log.warning("kconvert: digests are not checked; damaged blobs would go unnoticed.")
        try:
            with Filler(memory_of(experts), self._check) as filler:
                for layer, module in zip(experts, layers.values(), strict=True):
                    fill(filler, output, layer, functools.partial(place, output.layout, layer))
                    fill_shapes(module, output.dims)
                    if output.layout == "marlin":
                        setattr(module, _READY, True)
                super().load_weights(model, model_config)
                filler.wait()
                report = (len(experts), filler.bytes_read / 1e9, time.perf_counter() - begin)
        finally:
            self._common = None
        _log.info(LOADED, *report, output.layout, *output.stored)

    def get_all_weights(
        self, model_config: ModelConfig, model: torch.nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        if self._common is None:  # called by vLLM's reload, which would leave the experts out
            raise UnsupportedError(
                "weights of a converted folder cannot be reloaded in place: restart the server."
            )
        tensors = super().get_all_weights(model_config, model)
        return checked(tensors, self._common, data_of if self._check else None)

    def _prepare_weights(self, folder: str, *arguments: Any, **options: Any) -> Any:
        # Further arguments and results differ from version to version, and are the engine's.
        common = str(Path(folder) / COMMON_FOLDER)
        _, _, *rest = super()._prepare_weights(common, *arguments, **options)
        return folder, [str(blob.path) for blob in self._common or ()], *rest


def _refuse_options() -> None:
    """Raise UnsupportedError naming an option that moves or changes experts after loading."""
    config = get_current_vllm_config()
    if config.lora_config is not None:
        raise UnsupportedError(
            "LoRA needs experts in the checkpoint's order: start without --enable-lora, or serve"
            " the source checkpoint."
        )
    if config.parallel_config.enable_eplb:
        raise UnsupportedError(
            "expert load balancing renumbers experts: start without --enable-eplb."
        )


def _expert_layer(output: Output, name: str, module: Any) -> ExpertLayer:
    """How a RoutedExperts module is cut; UnsupportedError if it cannot take these blobs."""
    method, parallel = module.quant_method, module.moe_config.moe_parallel_config
    backend = getattr(method, "wna16_backend", None)
    backend = getattr(backend, "value", type(method).__name__)
    activations = getattr(method, "input_dtype", getattr(method, "marlin_input_dtype", None))
    if output.layout == "marlin":
        if backend not in _MARLIN:
            raise UnsupportedError(
                f"{output.folder} has layout marlin and vLLM chose the backend {backend}: start it"
                " with --moe-backend marlin, or convert with --layout w4a16."
            )
        if activations is not None and activations.itemsize == 1:
            raise UnsupportedError(
                f"{output.folder} has layout marlin, for 16-bit activations: unset"
                " VLLM_MARLIN_INPUT_DTYPE, or convert with --layout w4a16."
            )
        _wrap_repack(method)
    rows = output.dims.intermediate // parallel.tp_size
    first = parallel.tp_rank * rows
    parameters = {tensor.name: getattr(module, tensor.name) for tensor in STACKED}
    return ExpertLayer(
        module=name,
        wanted=RankSlice(_experts(output, name, module), range(first, first + rows)),
        parameters=parameters,
        transposed=bool(getattr(module.w13_weight_packed, "is_transposed", False)),
    )


def _experts(output: Output, name: str, module: Any) -> range:
    """The experts of this rank by the layer's own map; all of them if it has none."""
    if module._expert_map is None:
        return range(output.dims.experts)
    advice = "start with --expert-placement-strategy linear"
    return experts_of(name, module._expert_map.tolist(), advice)


def _wrap_repack(method: Any) -> None:
    """Wrap the repacking in a method's module, so that it leaves ready layers alone."""
    module = sys.modules[type(method).__module__]
    original = getattr(module, _REPACK, None)
    if original is None:
        raise UnsupportedError(
            f"this version of vLLM repacks elsewhere than in {_REPACK}: convert with --layout"
            " w4a16, or use a version that runtime/plugins/README.md lists."
        )
    if getattr(original, _READY, False):
        return

    @functools.wraps(original)
    def unless_ready(*arguments: Any, **options: Any) -> Any:
        layer = inspect.signature(original).bind(*arguments, **options).arguments["layer"]
        # Once: a later update of the weights brings them in the checkpoint's order again.
        if not layer.__dict__.pop(_READY, False):
            return original(*arguments, **options)
        return _as_packed(layer)

    setattr(unless_ready, _READY, True)
    setattr(module, _REPACK, unless_ready)


def _as_packed(layer: torch.nn.Module) -> tuple[Any, ...]:
    """What the engine's repacking would return for a layer that is packed: codes, scales, and
    nothing for the rest. vLLM 0.26 has act-order's indices between them, which must be empty."""
    packed = tuple(
        getattr(layer, name)
        for name in ("w13_weight_packed", "w2_weight_packed", "w13_weight_scale", "w2_weight_scale")
    )
    if not hasattr(layer, "w13_weight_g_idx"):
        return *packed, *[None] * 6
    empty = [packed[0].new_empty((len(packed[0]), 0)) for _ in range(4)]
    return *packed, *empty, *[None] * 6
