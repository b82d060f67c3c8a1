"""compressed-tensors: what its quantization_config says, and what `pack-quantized` tensors hold.

A quantized matrix [N, K] of b bits is stored as `weight_packed` I32 [N, K·b/32], plain words;
`weight_scale` [N, K/group_size] (channelwise: [N, 1]); `weight_zero_point` I32 [N/8, G] if it is
asymmetric; and `weight_shape` [2] = (N, K), I32 at Moonshot, I64 elsewhere. Codes and zero points
are stored as q + 2^(b−1). Field names and values as in compressed-tensors' QuantizationConfig,
QuantizationScheme and QuantizationArgs.
"""

from typing import Any

from numpy.typing import NDArray

from kconvert.layouts.checkpoint import SourceTensor
from kconvert.layouts.errors import CheckpointError, UnsupportedError
from kconvert.layouts.experts import Projection
from kconvert.layouts.fields import ANY, CONFIG_NAME, check_fields
from kconvert.layouts.formats.format import (
    GROUP_SIZES,
    SCALE_DTYPES,
    Format,
    Kind,
    Take,
    groups,
)
from kconvert.layouts.formats.mxfp4 import GROUP_SIZE, PackedMxfp4, refuse_nvfp4
from kconvert.layouts.header import DTYPE_BYTES
from kconvert.layouts.quantization import ZERO_POINTS_A_WORD, Quantization, Role

SHAPE_DTYPES = ("I32", "I64")

_EMPTY: tuple[Any, ...] = (None, {}, [])
# A SparsityCompressionConfig of format "dense" stores weights as they are, whatever else it says.
_SPARSITY_FIELDS = {
    "format", "targets", "ignore", "global_sparsity", "sparsity_structure",
    "registry_requires_subclass",
}  # fmt: skip
# field → the values that change nothing here. A field that is not listed is refused by name.
_CONFIG_FIELDS: dict[str, Any] = {
    "config_groups": ANY, "format": ANY, "ignore": ANY, "quant_method": ANY, "version": ANY,
    "quantization_status": ("compressed", "frozen", None), "global_compression_ratio": ANY,
    "kv_cache_scheme": _EMPTY, "sparsity_config": _EMPTY,
    "transform_config": (*_EMPTY, {"config_groups": {}}),
    "run_compressed": ANY,
}  # fmt: skip
_GROUP_FIELDS: dict[str, Any] = {
    "targets": ANY, "weights": ANY, "format": ("pack-quantized", None),
    "input_activations": (None,), "output_activations": (None,),
}  # fmt: skip
# An engine may round activations while it runs; the stored weights are the same.
_MXFP4_GROUP_FIELDS = _GROUP_FIELDS | {
    "format": (PackedMxfp4.name, None), "input_activations": ANY,
}  # fmt: skip
_WEIGHT_FIELDS: dict[str, Any] = {
    "num_bits": (4, 8), "type": ("int",), "symmetric": (True, False),
    "strategy": ("group", "channel"), "group_size": ANY,
    "actorder": (None, False, "weight", "static"), "dynamic": (False,),
    "observer": ANY, "observer_kwargs": ANY, "block_structure": (None,),
    "scale_dtype": ANY, "zp_dtype": ANY,
}  # fmt: skip
_MXFP4_WEIGHT_FIELDS = _WEIGHT_FIELDS | {
    "num_bits": (4,), "type": ("float",), "symmetric": (True,), "strategy": ("group",),
    "group_size": (GROUP_SIZE,),
}  # fmt: skip


class PackQuantized(Format):
    """INT4 and INT8, with zero points or without."""

    name = "pack-quantized"
    restores = True

    def __init__(self, quantization: Quantization) -> None:
        self.quantization = quantization
        self.roles: dict[str, Role | None] = {"weight_packed": "code", "weight_scale": "scale"}
        if quantization.zero_point:
            self.roles["weight_zero_point"] = "zero_point"
        self.roles["weight_shape"] = None

    def kinds(self, n: int, k: int) -> dict[str, Kind]:
        scales = groups(self.quantization, k)
        kinds = {
            "weight_packed": Kind(("I32",), (n, k * self.quantization.bits // 32)),
            "weight_scale": Kind(SCALE_DTYPES, (n, scales)),
            "weight_shape": Kind(SHAPE_DTYPES, (2,)),
        }
        if self.quantization.zero_point:
            kinds["weight_zero_point"] = Kind(("I32",), (-(-n // ZERO_POINTS_A_WORD), scales))
        return kinds

    def plain(
        self,
        projection: Projection,
        role: Role,
        tensor: SourceTensor,
        stored: NDArray[Any],
        take: Take,
    ) -> NDArray[Any]:
        return stored

    def check_dropped(self, tensor: SourceTensor, stored: NDArray[Any], n: int, k: int) -> None:
        """weight_shape says what the packed weights are."""
        found = stored.tolist()
        if found != [n, k]:
            raise CheckpointError(
                f"{tensor.shard}, tensor {tensor.name}: weight_shape is {found}, expected {[n, k]}"
                " from the packed weights."
            )

    def dropped_data(self, companion: str, dtype: str, n: int, k: int) -> bytes:
        width = DTYPE_BYTES[dtype]
        return n.to_bytes(width, "little") + k.to_bytes(width, "little")

    def _misshapen(
        self, tensor: SourceTensor, role: Role | None, kind: Kind, k: int
    ) -> CheckpointError:
        if role == "zero_point" and tensor.shape[0] >= kind.shape[0] * ZERO_POINTS_A_WORD:
            return CheckpointError(
                f"{tensor.shard}, tensor {tensor.name}: {tensor.dtype} {list(tensor.shape)} found,"
                f" I32 {list(kind.shape)} expected: zero points that are not packed, as old"
                " versions of compressed-tensors wrote them: save the checkpoint with a later one."
            )
        return super()._misshapen(tensor, role, kind, k)


def read_compressed_tensors(table: dict[str, Any]) -> Format:
    """The format of a quantization_config with quant_method compressed-tensors.

    Raises CheckpointError if it is malformed, UnsupportedError naming the field if it cannot be
    converted.
    """
    if _is_dense(table.get("sparsity_config")):
        table = {**table, "sparsity_config": None}
    check_fields("quantization_config", table, _CONFIG_FIELDS)
    kind = table.get("format")
    if "nvfp4" in str(kind):
        raise refuse_nvfp4(f"format is {kind!r:.60}")
    if kind not in (PackQuantized.name, PackedMxfp4.name):
        raise UnsupportedError(
            f"{CONFIG_NAME}: format is {kind!r}, only pack-quantized (INT4, INT8) and"
            f" {PackedMxfp4.name} can be converted."
        )
    config_groups = table.get("config_groups")
    if not isinstance(config_groups, dict) or len(config_groups) != 1:
        found = len(config_groups) if isinstance(config_groups, dict) else repr(config_groups)
        raise UnsupportedError(
            f"{CONFIG_NAME}: expected one entry in config_groups, found {found};"
            " mixed quantization cannot be converted; one scheme for all experts can."
        )
    ((name, group),) = config_groups.items()
    mxfp4 = kind == PackedMxfp4.name
    check_fields(f"config_groups.{name}", group, _MXFP4_GROUP_FIELDS if mxfp4 else _GROUP_FIELDS)
    where = f"config_groups.{name}.weights"
    weights = group.get("weights")
    check_fields(where, weights, _MXFP4_WEIGHT_FIELDS if mxfp4 else _WEIGHT_FIELDS)
    for key in ("num_bits", "type", "symmetric", "strategy"):
        if key not in weights:
            raise CheckpointError(f"{CONFIG_NAME}: {where} has no {key}.")
    if mxfp4:
        return PackedMxfp4()
    bits, asymmetric = weights["num_bits"], not weights["symmetric"]
    if bits == 8 and asymmetric:
        raise UnsupportedError(
            f"{CONFIG_NAME}: {where}: 8 bit with zero points (symmetric is false) cannot be"
            " converted, no Marlin kernel reads it; symmetric 8 bit and asymmetric 4 bit can."
        )
    return PackQuantized(Quantization(_group_size(where, weights), bits, asymmetric))


def _group_size(where: str, weights: dict[str, Any]) -> int | None:
    size = weights.get("group_size")
    if weights["strategy"] == "channel":
        if size not in (None, -1):
            raise CheckpointError(
                f"{CONFIG_NAME}: {where} has strategy channel and group_size {size!r};"
                " channelwise scales have none."
            )
        return None
    if type(size) is not int or size not in GROUP_SIZES:
        raise UnsupportedError(
            f"{CONFIG_NAME}: {where}.group_size is {size!r}, only 32, 64, 128 and channelwise"
            " scales can be converted."
        )
    return size


def _is_dense(sparsity: Any) -> bool:
    """Whether a sparsity_config says that there is no sparsity."""
    return sparsity == "dense" or (
        isinstance(sparsity, dict)
        and sparsity.get("format") == "dense"
        and sparsity.keys() <= _SPARSITY_FIELDS
    )
