"""What the loaders of both engines have in common: filling a model from an output."""

import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from kconvert.layouts.blob import digest
from kconvert.layouts.errors import CheckpointError, UnsupportedError
from kconvert.layouts.experts import STACKED
from kconvert.layouts.families.deepseek_v3 import DeepSeekV3
from kconvert.layouts.quantization import Quantization
from kconvert.layouts.sharding import RankSlice
from kconvert.layouts.stored.output import Blob, Output
from kconvert.layouts.stored.slicing import (
    cut_axis,
    pieces,
    refuse_uncuttable,
    spans,
    target_shape,
)
from kconvert.layouts.w4a16 import W4A16
from kconvert.runtime.filling.filler import Filler, Transfer

OPTION = "kconvert_digests"  # in an engine's extra config: false leaves digests unchecked
LOADED = (
    "kconvert: experts of %d layers, %.2f GB, and all else in %.2f s (%s, converted for tp %d ep"
    " %d)"
)
_HASHERS = 2  # threads: beside those that fill the experts, and faster than the engine copies
_MOST_BEGUN = 8  # tensors that are kept for their digest after the engine has copied them
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_VISION = re.compile(r"(?:^|\.)(?:vision_tower|mm_projector|multi_modal_projector)\.")
_TORCH = {"I32": "torch.int32", "BF16": "torch.bfloat16", "F16": "torch.float16",
          "F32": "torch.float32"}  # fmt: skip


def open_output(folder: Path) -> Output:
    """The output in `folder`; UnsupportedError if an engine cannot be filled with its experts."""
    output = Output(folder)
    q, family = output.dims.quantization, output.family
    if not isinstance(family, DeepSeekV3) or q != Quantization(q.group_size):
        raise UnsupportedError(
            f"{folder} is {type(family).__name__} with experts in {q.text}: engines are filled with"
            " DeepSeek-V3-style models in symmetric INT4 alone; give the engine the checkpoint."
        )
    return output


class ExpertLayer(NamedTuple):
    """A layer of routed experts in an engine's model, before its weights are there."""

    module: str  # its path in the model
    wanted: RankSlice  # the experts and rows that this rank of the engine holds
    parameters: Mapping[str, Any]  # torch tensors by the names of `experts.STACKED`
    transposed: bool  # whether the engine keeps a matrix [n, k] as [k, n] here

    @property
    def number(self) -> int:
        """Which layer it is, as the checkpoint counts. UnsupportedError if the path has none."""
        number = _layer_of(self.module)
        if number is None:
            raise UnsupportedError(f"{self.module}: experts outside of `layers.N` are not known.")
        return number


def take_option(extra: Mapping[str, Any]) -> tuple[bool, dict[str, Any]]:
    """Whether to check digests, and the other keys of the engine's extra config."""
    rest = dict(extra)
    check = rest.pop(OPTION, True)
    if type(check) is not bool:
        raise UnsupportedError(f"{OPTION} is {check!r:.40}, expected true or false.")
    return check, rest


def experts_of(module: str, places: Sequence[int], advice: str) -> range:
    """The experts that a rank holds, from its table of all experts' places (below 0: not here).

    Raises UnsupportedError with `advice` if they are not next to one another and in order.
    """
    mine = [expert for expert, place in enumerate(places) if place >= 0]
    if not mine or [places[e] for e in range(mine[0], mine[-1] + 1)] != list(range(len(mine))):
        raise UnsupportedError(
            f"{module}: the experts of this rank do not lie together in the checkpoint's order:"
            f" {advice}."
        )
    return range(mine[0], mine[-1] + 1)


def common_blobs(
    output: Output, parameters: Collection[str], layers: Iterable[ExpertLayer]
) -> list[Blob]:
    """The blobs of the tensors that are not cut, those that a model with these parameters needs: a
    pipeline's stage has only some layers, a text model no vision tower.

    Raises UnsupportedError if the model has experts that the plugin did not find, or a vision
    tower that the output lacks.
    """
    present = {number for name in parameters if (number := _layer_of(name)) is not None}
    lost = (present & output.moe_layers()) - {layer.number for layer in layers}
    if lost:
        raise UnsupportedError(
            f"the engine's layer {min(lost)} has no W4A16 experts that kconvert knows: this version"
            " or backend keeps them in another way; see runtime/plugins/README.md for what works."
        )
    vision = any(_VISION.search(name) for name in parameters)
    if vision and output.manifest.text_only:
        raise UnsupportedError(
            f"{output.folder} was converted with --text-only and the engine builds the vision"
            " tower: serve the language model alone (vLLM: --language-model-only), or convert"
            " again."
        )
    return list(output.common(present, vision))


def checked(
    tensors: Iterable[tuple[str, Any]],
    blobs: Iterable[Blob],
    data: Callable[[Any], memoryview] | None,
) -> Iterator[tuple[str, Any]]:
    """The tensors that an engine reads from common blobs, each compared with its digest while the
    engine copies it. `data` gives a tensor's bytes; None: digests are not compared.

    Raises CheckpointError, at the end or before, if one differs or is missing.
    """
    expected = {
        name: (blob.path, blob.info.digests[name]) for blob in blobs for name in blob.header.tensors
    }
    begun: deque[Future[None]] = deque()
    with ThreadPoolExecutor(_HASHERS, "kconvert-digests") as pool:
        for name, tensor in tensors:
            if (known := expected.pop(name, None)) is not None and data is not None:
                begun.append(pool.submit(_compare, known[0], name, data(tensor), known[1]))
            yield name, tensor
            if len(begun) > _MOST_BEGUN:
                begun.popleft().result()
        for work in begun:
            work.result()
    for name, (path, _) in expected.items():
        raise CheckpointError(
            f"{path}, tensor {name}: the engine did not read it, as this version reads weights in"
            " another way; see runtime/plugins/README.md for what works."
        )


def _compare(path: Path, name: str, data: memoryview, wanted: str) -> None:
    if digest(data) != wanted:
        raise CheckpointError(
            f"{path}, tensor {name}: its bytes were changed, the digest disagrees: copy the file"
            " again, or convert it again."
        )


def fill(
    filler: Filler,
    output: Output,
    layer: ExpertLayer,
    place: Callable[[str, tuple[int, ...]], Any],
) -> None:
    """Begin to fill a layer's experts. `place(name, shape)` gives the memory that a parameter is
    read into, in the blob's layout and shape.

    Raises UnsupportedError if the engine's shapes are not those that are known, or if the blobs
    cannot be cut as it does, CheckpointError and OutputError if a blob is missing or foreign.
    """
    dims, wanted = output.dims, layer.wanted
    if dims.quantization != Quantization(dims.quantization.group_size):
        raise UnsupportedError(
            f"{output.folder} holds {dims.quantization.text}: this plugin fills an engine with"
            " symmetric INT4 alone; serve the checkpoint itself."
        )
    refuse_uncuttable(dims, output.layout, output.stored, wanted)
    parts = [
        (piece, output.experts(layer.number, piece.rank))
        for piece in pieces(dims, output.stored, wanted)
    ]
    for tensor in STACKED:
        parameter = layer.parameters[tensor.name]
        cut = tensor.cut(wanted.rows, dims.hidden)
        matrix = W4A16(dims.quantization).shape(tensor.role, cut.n, cut.k)
        expected = (len(wanted.experts), *(matrix[::-1] if layer.transposed else matrix))
        if tuple(parameter.shape) != expected:
            raise UnsupportedError(
                f"{layer.module}.{tensor.name} is {list(parameter.shape)} in the engine,"
                f" {list(expected)} expected for {len(wanted.experts)} experts with"
                f" {len(wanted.rows)} rows; options that add, pad or renumber experts do not work"
                " with converted folders."
            )
        axis = cut_axis(output.layout, tensor)
        target = None
        for piece, blob in parts:
            entry = blob.stacked(tensor)
            if str(parameter.dtype) != _TORCH.get(entry.dtype):
                raise UnsupportedError(
                    f"{blob.path}, tensor {entry.name} is {entry.dtype}, the engine computes with"
                    f" {parameter.dtype}: start it with --dtype"
                    f" {_TORCH.get(entry.dtype, entry.dtype).removeprefix('torch.')}."
                )
            if target is None:
                shape = target_shape(
                    tensor, dims.quantization, axis, entry.shape, piece.all_rows, wanted
                )
                target = place(tensor.name, shape)
            found = spans(tensor, dims.quantization, piece, entry.shape[axis], len(wanted.rows))
            if found:
                filler.add(
                    Transfer(
                        path=blob.path,
                        entry=entry,
                        digests=blob.info.expert_digests[entry.name],
                        experts=piece.experts,
                        target=target,
                        expert_at=piece.expert_at,
                        axis=axis,
                        spans=found,
                    )
                )


def _layer_of(name: str) -> int | None:
    match = _LAYER.search(name)
    return int(match[1]) if match else None
