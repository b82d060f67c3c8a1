"""Config and tensors compared both ways: every tensor that config.json implies is there, with its
shape and a dtype that can be read, and there is no tensor that it does not imply."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from kconvert.layouts.families.family import BLOCKS, Family, Stated
from kconvert.layouts.fields import CONFIG_NAME
from kconvert.layouts.formats.format import Format, Kind
from kconvert.layouts.header import Described

FLOATS = ("BF16", "F16", "F32")


class Disagreement(NamedTuple):
    """A tensor and what is wrong with it, to be read behind its name."""

    tensor: str
    text: str


def disagreements(
    family: Family,
    layer: int | None,
    prefix: str,
    tensors: Mapping[str, Described | None],
    experts: str = "",
) -> Iterator[Disagreement]:
    """Where a layer's tensors (None: the outer ones), routed experts aside, do not fit config.json.

    `tensors` are by full name; None if a tensor's shard is not here and only its name is known.
    `prefix` is what the model's names begin with, `language_model.` or nothing; `experts` is what
    the names of the layer's routed experts begin with, if it has some.
    """
    if not family.complete:
        return
    base = prefix if layer is None else f"{prefix}model.layers.{layer}."
    known: set[str] = set()
    for module, stated in family.stated(layer, _block(base, [experts, *tensors])).items():
        expected = _parameters(f"{base}{module}", stated, family.format, tensors)
        known |= expected.keys()
        if stated.optional and not expected.keys() & tensors.keys():
            continue
        for name, (dtypes, shape) in expected.items():
            if name not in tensors:
                yield Disagreement(name, f"is missing: by {CONFIG_NAME} it is {list(shape)}")
                continue
            tensor = tensors[name]
            if tensor is not None and (tensor.dtype not in dtypes or tensor.shape != shape):
                yield Disagreement(
                    name,
                    f"is {tensor.dtype} {list(tensor.shape)}, expected {' or '.join(dtypes)}"
                    f" {list(shape)} by {CONFIG_NAME}",
                )
    for name in sorted(tensors.keys() - known):
        yield Disagreement(name, f"is not implied by {CONFIG_NAME}: the engines would leave it out")


def _block(base: str, names: Iterable[str]) -> str:
    """What a layer calls its MLP: exporters of one family differ."""
    called = {name.removeprefix(base).partition(".")[0] for name in names if name.startswith(base)}
    return next((block for block in BLOCKS if block in called), BLOCKS[0])


def _parameters(
    module: str, stated: Stated, format: Format, tensors: Mapping[str, Described | None]
) -> dict[str, Kind]:
    """A module's tensors. A matrix may be quantized as the experts are."""
    expected = {}
    for parameter in stated.parameters:
        shape = stated.shape if parameter == "weight" else stated.shape[:1]
        expected[f"{module}.{parameter}"] = Kind(FLOATS, shape)
    if len(stated.shape) != 2 or format.fused:
        return expected
    quantized = {
        f"{module}.{companion}": kind for companion, kind in format.kinds(*stated.shape).items()
    }
    if any(name in tensors for name in quantized):
        del expected[f"{module}.weight"]
        absent = {f"{module}.{companion}" for companion in format.optional} - tensors.keys()
        expected |= {name: kind for name, kind in quantized.items() if name not in absent}
    return expected
