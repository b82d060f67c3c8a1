"""SGLang loads a folder that has a kconvert.json. Tried with 0.5.17 and 0.5.23 (README.md).

SGLang's own loader reads the common blobs; experts go straight into the parameters of their layer,
whose own attributes say which experts they are. For a `marlin` folder, a layer is then left as
SGLang's own repacking leaves it, marked as converted.
"""

import functools
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_server_args

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

_log = logging.getLogger(f"sglang.{__name__}")
_SCHEME = "CompressedTensorsWNA16MoE"  # Marlin's; its subclasses belong to other backends
_ACT_ORDER = ("w13_weight_g_idx", "w2_weight_g_idx",
              "w13_g_idx_sort_indices", "w2_g_idx_sort_indices")  # fmt: skip
# Settings of the server that renumber experts or change them after they are loaded → the default.
_REFUSED = {
    "enable_lora": (None, False), "lora_paths": (None, []), "enable_eplb": (False,),
    "ep_num_redundant_experts": (0,), "init_expert_location": ("trivial",),
}  # fmt: skip


def register() -> None:
    """Let this process load converted folders as --load-format auto."""
    target = "sglang.srt.model_loader.loader.get_model_loader"
    HookRegistry.register(target, _choose, HookType.AROUND)


def _choose(original: Callable[..., Any], load_config: Any, *rest: Any, **options: Any) -> Any:
    """Our loader for a converted folder; SGLang's for anything else, such as a draft model."""
    model_config = rest[0] if rest else options.get("model_config")
    usual = getattr(load_config.load_format, "value", None) in ("auto", "safetensors")
    if usual and model_config is not None and is_output(Path(model_config.model_path)):
        return KconvertLoader(load_config)
    return original(load_config, *rest, **options)


class KconvertLoader(DefaultModelLoader):  # type: ignore[misc]
    """Loads an output of `kconvert convert`."""

    def __init__(self, load_config: Any) -> None:
        self._check, extra = take_option(load_config.model_loader_extra_config or {})
        self._output: Output | None = None  # while weights are loaded
        self._layers: list[tuple[ExpertLayer, torch.nn.Module]] = []
        self._common: list[Blob] = []
        self._filled = False
        automatic = type(load_config.load_format)("auto")
        config = replace(load_config, load_format=automatic, model_loader_extra_config=extra)
        super().__init__(config)

    def download_model(self, model_config: Any) -> None:
        pass

    def load_weights_and_postprocess(
        self, model: torch.nn.Module, weights: Iterable[Any], target_device: torch.device
    ) -> None:
        output, begin = self._loading(), time.perf_counter()
        self._filled = False
        try:
            with Filler(memory_of(layer for layer, _ in self._layers), self._check) as filler:
                for layer, module in self._layers:
                    fill(filler, output, layer, functools.partial(place, output.layout, layer))
                    fill_shapes(module, output.dims)
                # SGLang goes on from reading to processing in one call: experts come between.
                tensors = self._then_experts(weights, filler)
                super().load_weights_and_postprocess(model, tensors, target_device)
                if not self._filled:
                    raise UnsupportedError(
                        "SGLang went on before the experts were loaded: this version reads weights"
                        " in another way; see runtime/plugins/README.md for those that work."
                    )
                report = (len(self._layers), filler.bytes_read / 1e9, time.perf_counter() - begin)
        finally:
            self._output, self._layers = None, []
        _log.info(LOADED, *report, output.layout, *output.stored)

    def _then_experts(self, weights: Iterable[Any], filler: Filler) -> Iterator[Any]:
        yield from weights
        filler.wait()
        if self._loading().layout == "marlin":
            for _, module in self._layers:
                _mark_converted(module)
        self._filled = True

    def _get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[Any]:
        """Called by load_model, before load_weights_and_postprocess."""
        output = open_output(Path(model_config.model_path))
        _refuse_options()
        if not self._check:
            _log.warning("kconvert: digests are not checked; damaged blobs would go unnoticed.")
        self._layers = [
            (_expert_layer(output, name, module), module)
            for name, module in model.named_modules()
            if hasattr(module, "w13_weight_packed") and hasattr(module, "quant_method")
        ]
        parameters = [name for name, _ in model.named_parameters()]
        self._common = common_blobs(output, parameters, [layer for layer, _ in self._layers])
        self._output = output
        tensors = super()._get_all_weights(model_config, model)
        return checked(tensors, self._common, data_of if self._check else None)

    def _get_weights_iterator(self, *arguments: Any, **options: Any) -> Any:
        self._loading()
        return super()._get_weights_iterator(*arguments, **options)

    def _prepare_weights(self, folder: str, *arguments: Any, **options: Any) -> Any:
        # Further arguments and results differ from version to version, and are the engine's.
        common = str(Path(folder) / COMMON_FOLDER)
        _, _, *rest = super()._prepare_weights(common, *arguments, **options)
        return folder, [str(blob.path) for blob in self._common], *rest

    def _loading(self) -> Output:
        """The output that is being loaded. SGLang's updates of weights and its overlapped start go
        other ways, which would leave the experts out."""
        if self._output is None:
            raise UnsupportedError(
                "weights of a converted folder are loaded only at the start: restart the server,"
                " without options that overlap loading with the start."
            )
        return self._output


def _refuse_options() -> None:
    arguments = get_server_args()
    for name, harmless in _REFUSED.items():
        value = getattr(arguments, name, harmless[0])
        if value not in harmless:
            raise UnsupportedError(
                f"--{name.replace('_', '-')} does not work with converted folders, whose experts"
                " stay in their order and place: start without it, or serve the source checkpoint."
            )


def _expert_layer(output: Output, name: str, module: Any) -> ExpertLayer:
    """How a FusedMoE module is cut; UnsupportedError if it cannot take these blobs."""
    scheme = type(getattr(module, "scheme", None)).__name__
    if output.layout == "marlin" and scheme != _SCHEME:
        raise UnsupportedError(
            f"{output.folder} has layout marlin and SGLang chose {scheme}: start it with"
            " --moe-runner-backend marlin, or convert with --layout w4a16."
        )
    if getattr(module, "num_fused_shared_experts", 0):
        raise UnsupportedError(
            f"{name} has the shared experts among the routed ones: start with"
            " --disable-shared-experts-fusion."
        )
    places = map(module._map_global_expert_id_to_local_expert_id, range(output.dims.experts))
    rows = output.dims.intermediate // module.moe_tp_size
    first = module.moe_tp_rank * rows
    return ExpertLayer(
        module=name,
        wanted=RankSlice(
            experts_of(name, list(places), "start without options that move experts"),
            range(first, first + rows),
        ),
        parameters={tensor.name: getattr(module, tensor.name) for tensor in STACKED},
        transposed=bool(getattr(module.w13_weight_packed, "is_transposed", False)),
    )


def _mark_converted(module: Any) -> None:
    """Leave a layer as CompressedTensorsWNA16MoE leaves it: without act-order's indices, and with
    the kernel's workspace, four blocks a multiprocessor."""
    codes = module.w13_weight_packed.data
    for name in _ACT_ORDER:
        empty = codes.new_empty((len(codes), 0))
        setattr(module, name, torch.nn.Parameter(empty, requires_grad=False))
    own = sys.modules[type(module.scheme).__module__]
    module.workspace = own.marlin_make_workspace(codes.device, 4)
    module.is_marlin_converted = True
