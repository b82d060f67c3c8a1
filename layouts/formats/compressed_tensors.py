"""compressed-tensors `pack-quantized`: what its quantization_config says and its tensors hold.

A quantized matrix [N, K] is stored as `weight_packed` I32 [N, K/8], nibble j of word m being
column 8m+j with value nibble − 8; `weight_scale` [N, K/group_size] (channelwise: [N, 1]); and
`weight_shape` [2] = (N, K), I32 at Moonshot, I64 elsewhere. Field names and values as in
compressed-tensors' QuantizationConfig, QuantizationScheme and QuantizationArgs.
"""

import json
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.checkpoint import SourceTensor
from kconvert.layouts.errors import CheckpointError, UnsupportedError
from kconvert.layouts.fields import CONFIG_NAME, text_config
from kconvert.layouts.header import DTYPE_BYTES
from kconvert.layouts.quantization import Quantization

SCALE_DTYPES = ("BF16", "F16", "F32")
SHAPE_DTYPES = ("I32", "I64")
MATRIX_TENSORS = ("weight_packed", "weight_scale", "weight_shape")
GROUP_SIZES = (32, 64, 128)

_ANY = object()
_EMPTY = (None, {}, [])
# A SparsityCompressionConfig of format "dense" stores weights as they are, whatever else it says.
_SPARSITY_FIELDS = {
    "format", "targets", "ignore", "global_sparsity", "sparsity_structure",
    "registry_requires_subclass",
}  # fmt: skip
# field → values that change nothing here. A field that is not listed is refused by name.
_CONFIG_FIELDS: dict[str, Any] = {
    "config_groups": _ANY, "format": _ANY, "ignore": _ANY, "quant_method": _ANY, "version": _ANY,
    "quantization_status": ("compressed", "frozen", None), "global_compression_ratio": _ANY,
    "kv_cache_scheme": _EMPTY, "sparsity_config": _EMPTY,
    "transform_config": (*_EMPTY, {"config_groups": {}}),
    "run_compressed": _ANY,
}  # fmt: skip
_GROUP_FIELDS: dict[str, Any] = {
    "targets": _ANY, "weights": _ANY, "format": ("pack-quantized", None),
    "input_activations": (None,), "output_activations": (None,),
}  # fmt: skip
_WEIGHT_FIELDS: dict[str, Any] = {
    "num_bits": (4,), "type": ("int",), "symmetric": (True,), "strategy": ("group", "channel"),
    "group_size": _ANY, "actorder": (None, False, "weight", "static"), "dynamic": (False,),
    "observer": _ANY, "observer_kwargs": _ANY, "block_structure": (None,),
    "scale_dtype": _ANY, "zp_dtype": _ANY,
}  # fmt: skip


class QuantizedMatrix(NamedTuple):
    """The stored tensors of one quantized [N, K] matrix, by role."""

    code: SourceTensor  # I32 [N, K/8]
    scale: SourceTensor  # [N, groups]
    dropped: tuple[SourceTensor, ...]  # checked and not kept: weight_shape [2] = (N, K)

    @property
    def tensors(self) -> tuple[SourceTensor, ...]:
        """All of them."""
        return self.code, self.scale, *self.dropped


def read_quantization(config: dict[str, Any]) -> Quantization:
    """The quantization that `config` (a whole config.json) declares.

    Raises CheckpointError where it is malformed, UnsupportedError naming the field otherwise.
    """
    table = find_quantization_config(config)
    if any("mxfp4" in str(table.get(key, "")).lower() for key in ("format", "quant_method")):
        raise UnsupportedError(
            f"{CONFIG_NAME}: the weights are MXFP4 (4-bit floats, as Kimi K3 uses);"
            " only symmetric INT4 checkpoints can be converted."
        )
    if table.get("quant_method") != "compressed-tensors":
        raise UnsupportedError(
            f"{CONFIG_NAME}: quant_method is {table.get('quant_method')!r},"
            " only compressed-tensors can be converted."
        )
    if _is_dense(table.get("sparsity_config")):
        table = {**table, "sparsity_config": None}
    _check_fields("quantization_config", table, _CONFIG_FIELDS)
    if table.get("format") != "pack-quantized":
        raise UnsupportedError(
            f"{CONFIG_NAME}: format is {table.get('format')!r}, only pack-quantized (INT4) can be"
            " converted."
        )
    groups = table.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        found = len(groups) if isinstance(groups, dict) else repr(groups)
        raise UnsupportedError(
            f"{CONFIG_NAME}: expected one entry in config_groups, found {found};"
            " mixed quantization cannot be converted."
        )
    ((name, group),) = groups.items()
    _check_fields(f"config_groups.{name}", group, _GROUP_FIELDS)
    where = f"config_groups.{name}.weights"
    weights = group.get("weights")
    _check_fields(where, weights, _WEIGHT_FIELDS)
    for key in ("num_bits", "type", "symmetric", "strategy"):
        if key not in weights:
            raise CheckpointError(f"{CONFIG_NAME}: {where} has no {key}.")
    size = weights.get("group_size")
    if weights["strategy"] == "channel":
        if size not in (None, -1):
            raise CheckpointError(
                f"{CONFIG_NAME}: {where} has strategy channel and group_size {size!r};"
                " channelwise scales have none."
            )
        return Quantization(None)
    if type(size) is not int or size not in GROUP_SIZES:
        raise UnsupportedError(
            f"{CONFIG_NAME}: {where}.group_size is {size!r}, only 32, 64, 128 and channelwise"
            " scales can be converted."
        )
    return Quantization(size)


def _is_dense(sparsity: Any) -> bool:
    """Whether a sparsity_config says in so many words that there is none."""
    return sparsity == "dense" or (
        isinstance(sparsity, dict)
        and sparsity.get("format") == "dense"
        and sparsity.keys() <= _SPARSITY_FIELDS
    )


def find_quantization_config(config: dict[str, Any]) -> dict[str, Any]:
    """The quantization_config at the first of its three places (the order engines look in)."""
    places = (
        config.get("quantization_config"),
        text_config(config).get("quantization_config"),
        config.get("compression_config"),
    )
    for table in places:
        if table is not None:
            if not isinstance(table, dict):
                raise CheckpointError(f"{CONFIG_NAME}: quantization_config is not an object.")
            return table
    raise UnsupportedError(
        f"{CONFIG_NAME} has no quantization_config (nor text_config.quantization_config,"
        " nor compression_config): only quantized checkpoints can be converted."
    )


def quantized_matrix(
    tensors: Mapping[str, SourceTensor], base: str, n: int, k: int, quantization: Quantization
) -> QuantizedMatrix:
    """The [n, k] matrix stored under `base` ("…gate_proj."), its companions found by name.

    Raises CheckpointError naming file, tensor, expected and found.
    """
    packed, scale, shape = (_companion(tensors, base, name) for name in MATRIX_TENSORS)
    _expect(packed, ("I32",), (n, k // 8))
    groups = len(quantization.groups(range(k)))
    if len(scale.shape) == 2 and scale.shape[1] != groups:
        raise CheckpointError(
            f"{scale.shard}, tensor {scale.name}: {scale.shape[1]} scales a row found, {groups}"
            f" expected for {k} columns and {quantization} ({CONFIG_NAME})."
        )
    _expect(scale, SCALE_DTYPES, (n, groups))
    _expect(shape, SHAPE_DTYPES, (2,))
    return QuantizedMatrix(packed, scale, (shape,))


def matrix_tensors(
    base: str,
    n: int,
    k: int,
    quantization: Quantization,
    scale_dtype: str,
    dropped: Mapping[str, str],
    shard: str,
) -> Iterator[SourceTensor]:
    """The tensors of an [n, k] matrix under `base`, as `quantized_matrix` finds them, without a
    place in `shard`; `dropped`: the dtype of each companion that a blob does not keep.

    Raises UnsupportedError where the blob's writer dropped what is not known here.
    """
    if dropped.keys() != {"weight_shape"} or dropped["weight_shape"] not in SHAPE_DTYPES:
        raise UnsupportedError(
            f"{shard} says that {dict(dropped)!r:.80} was dropped of the source; this version knows"
            f" weight_shape, {' or '.join(SHAPE_DTYPES)}."
        )
    groups = len(quantization.groups(range(k)))
    for name, dtype, shape in (
        ("weight_packed", "I32", (n, k // 8)),
        ("weight_scale", scale_dtype, (n, groups)),
        ("weight_shape", dropped["weight_shape"], (2,)),
    ):
        nbytes = DTYPE_BYTES[dtype] * prod(shape)
        yield SourceTensor(f"{base}{name}", dtype, shape, shard, 0, nbytes)


def shape_bytes(dtype: str, n: int, k: int) -> bytes:
    """What a weight_shape tensor of this dtype says of an [n, k] matrix."""
    width = DTYPE_BYTES[dtype]
    return b"".join(size.to_bytes(width, "little") for size in (n, k))


def unpack_codes(packed: NDArray[np.int32]) -> NDArray[np.int8]:
    """int32 [N, K/8] → the signed codes int8 [N, K]: nibble − 8, low nibble first."""
    nibbles = packed.view(np.uint32)[:, :, None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
    return (nibbles.astype(np.int8) - 8).reshape(len(packed), -1)


def check_weight_shape(tensor: SourceTensor, raw: memoryview, n: int, k: int) -> None:
    """Check the stored values of a weight_shape tensor against the matrix they describe."""
    width = DTYPE_BYTES[tensor.dtype]
    found = [int.from_bytes(raw[i : i + width], "little", signed=True) for i in (0, width)]
    if found != [n, k]:
        raise CheckpointError(
            f"{tensor.shard}, tensor {tensor.name}: weight_shape is {found}, expected {[n, k]}"
            " from the packed weights."
        )


def _companion(tensors: Mapping[str, SourceTensor], base: str, name: str) -> SourceTensor:
    tensor = tensors.get(base + name)
    if tensor is None:
        raise CheckpointError(
            f"tensor {base}{name} is in no shard: every quantized matrix needs"
            f" {', '.join(MATRIX_TENSORS)}."
        )
    return tensor


def _expect(tensor: SourceTensor, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    if tensor.dtype not in dtypes or tensor.shape != shape:
        raise CheckpointError(
            f"{tensor.shard}, tensor {tensor.name}: expected {' or '.join(dtypes)} {list(shape)},"
            f" found {tensor.dtype} {list(tensor.shape)}."
        )


def _check_fields(where: str, table: Any, fields: dict[str, Any]) -> None:
    if not isinstance(table, dict):
        raise CheckpointError(f"{CONFIG_NAME}: {where} is not an object.")
    for key, value in table.items():
        if key not in fields:
            raise UnsupportedError(
                f"{CONFIG_NAME}: {where}.{key} is not a field this version knows;"
                " it will not be guessed at."
            )
        allowed = fields[key]
        if allowed is not _ANY and not any(value == a and type(value) is type(a) for a in allowed):
            expected = " or ".join(json.dumps(a) for a in allowed)
            raise UnsupportedError(
                f"{CONFIG_NAME}: {where}.{key} is {json.dumps(value):.80}, only {expected} can be"
                " converted."
            )
