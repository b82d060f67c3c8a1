"""GPTQ checkpoints (GPTQModel, AutoGPTQ): 4 and 8 bit, stored transposed.

A matrix [N, K] of b bits has `qweight` I32 [K·b/32, N] (plain codes, transposed), `scales` [G, N],
`qzeros` I32 [G, N·b/32] (zero points packed along N) and mostly `g_idx` I32 [K], the group of each
column. Symmetric weights have the zero point 2^(b−1), whatever qzeros says: kernels do not read it,
and files that say `gptq` with the words of `gptq_v2` exist (vllm#38966). Format `gptq` (v1)
stores zero points less one, `gptq_v2` as they are; between them lies one 32-bit addition a word,
carries included, as GPTQModel writes and reads both (utils/model.py, 7.7.0).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.checkpoint import SourceTensor
from kconvert.layouts.errors import CheckpointError, UnsupportedError
from kconvert.layouts.experts import Projection
from kconvert.layouts.fields import ANY, CONFIG_NAME, check_fields, flag
from kconvert.layouts.formats.format import (
    GROUP_SIZES,
    SCALE_DTYPES,
    Format,
    Kind,
    Take,
    groups,
)
from kconvert.layouts.quantization import Quantization, Role

_NOTHING: tuple[Any, ...] = (None, False, {}, [], "")
# Fields that change nothing of what is stored: how it was quantized, how it is to be run.
_HOW = (
    "act_group_aware", "adapter", "backend", "batch_size", "block_name_to_quantize",
    "cache_block_outputs", "cache_examples_on_gpu", "damp_auto_increment", "damp_percent",
    "dataset", "disable_exllama", "exllama_config", "gptaq", "lm_head", "max_input_length", "meta",
    "model_file_base_name", "model_name_or_path", "model_seqlen", "modules_in_block_to_quantize",
    "modules_to_not_convert", "module_name_preceding_first_block", "mse", "pad_token_id",
    "static_groups", "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama", "version",
)  # fmt: skip
_FIELDS: dict[str, Any] = dict.fromkeys(_HOW, ANY) | {
    "bits": ANY, "group_size": ANY, "sym": (True, False), "desc_act": (True, False, None),
    "dynamic": ANY, "quant_method": ("gptq",), "method": ("gptq", None),
    "checkpoint_format": ANY, "format": ANY, "pack_dtype": ("int32", None),
    "is_marlin_format": _NOTHING, "rotation": _NOTHING, "hyb_act": _NOTHING,
}  # fmt: skip
_FORMATS = ("gptq", "gptq_v2")


class Gptq(Format):
    """GPTQ's tensors; `by_word`: a v1 zero point may be 0, which borrows from its neighbor."""

    optional = frozenset({"g_idx"})
    groups_axis, copies = 0, 2

    def __init__(self, quantization: Quantization, checkpoint_format: str, by_word: bool) -> None:
        self.quantization = quantization
        self.name = (
            f"{checkpoint_format} {'asymmetric' if quantization.zero_point else 'symmetric'}"
        )
        self._add_one = checkpoint_format == "gptq"
        self._by_word = by_word
        self.roles = {
            "qweight": "code", "scales": "scale",
            "qzeros": "zero_point" if quantization.zero_point else None, "g_idx": None,
        }  # fmt: skip

    def kinds(self, n: int, k: int) -> dict[str, Kind]:
        bits, rows = self.quantization.bits, groups(self.quantization, k)
        return {
            "qweight": Kind(("I32",), (k * bits // 32, n)),
            "scales": Kind(SCALE_DTYPES, (rows, n)),
            "qzeros": Kind(("I32",), (rows, n * bits // 32)),
            "g_idx": Kind(("I32",), (k,)),
        }

    def plain(
        self,
        projection: Projection,
        role: Role,
        tensor: SourceTensor,
        stored: NDArray[Any],
        take: Take,
    ) -> NDArray[Any]:
        from kconvert.layouts.formats.transpose import transpose_into

        out = take(f"plain {projection} {role}", stored.shape[::-1], stored.dtype)
        transpose_into(stored, out)
        if role == "zero_point" and self._add_one:
            self._check_borrows(tensor, out)
            out += np.int32(0x11111111)  # modulo 2^32
        return out

    def _check_borrows(self, tensor: SourceTensor, words: NDArray[np.int32]) -> None:
        """A stored 15 is the zero point 0 less one. GPTQModel subtracts from the whole word, which
        can be undone; other writers spoiled such words."""
        fifteen = words & (words >> 1)
        if not self._by_word and (fifteen & (fifteen >> 2) & 0x11111111).any():
            raise CheckpointError(
                f"{tensor.shard}, tensor {tensor.name}: a zero point is stored as 15, which in"
                " format gptq only GPTQModel (meta.quantizer) wrote so that it can be recovered:"
                " save the checkpoint as gptq_v2, or symmetric."
            )

    def check_dropped(self, tensor: SourceTensor, stored: NDArray[Any], n: int, k: int) -> None:
        where, quantization = f"{tensor.shard}, tensor {tensor.name}", self.quantization
        if tensor.name.endswith("g_idx"):
            if not np.array_equal(stored, np.arange(k) // (quantization.group_size or k)):
                raise UnsupportedError(
                    f"{where}: act-order with g_idx cannot be converted: its columns are in another"
                    " order than their groups; quantize with desc_act false (GPTQModel's"
                    " act_group_aware makes it as accurate)."
                )
            return
        middle = 1 << (quantization.bits - 1)
        whole = 0xFFFFFFFF // ((1 << quantization.bits) - 1)  # 1 in every field
        words = stored.view(np.uint32)
        if not any((words == value * whole).all() for value in (middle - 1, middle)):
            raise CheckpointError(
                f"{where}: {CONFIG_NAME} says sym, and a zero point is not {middle} (nor"
                f" {middle - 1}, as format gptq stores it): one of the two is wrong."
            )


def read_gptq(table: dict[str, Any]) -> Gptq:
    """The format of a quantization_config with quant_method gptq.

    Raises CheckpointError if it is malformed, UnsupportedError naming the field if it cannot be
    converted.
    """
    where = "quantization_config"
    check_fields(where, table, _FIELDS)
    kind = table.get("checkpoint_format") or table.get("format") or "gptq"
    if kind not in _FORMATS:
        raise UnsupportedError(
            f"{CONFIG_NAME}: {where}.checkpoint_format is {kind!r:.60}, only"
            f" {' and '.join(_FORMATS)} can be converted."
        )
    bits, size, symmetric = table.get("bits"), table.get("group_size"), flag(table, "sym", True)
    if type(bits) is not int or bits not in (4, 8):
        raise UnsupportedError(
            f"{CONFIG_NAME}: {where}.bits is {bits!r:.60}, only 4 and 8 are known."
        )
    if type(size) is not int or size not in (-1, *GROUP_SIZES):
        raise UnsupportedError(
            f"{CONFIG_NAME}: {where}.group_size is {size!r:.60}, only 32, 64, 128 and -1"
            " (channelwise) can be converted."
        )
    if flag(table, "desc_act", False) and size != -1:
        raise UnsupportedError(
            f"{CONFIG_NAME}: {where}.desc_act is true: act-order with groups cannot be converted,"
            " engines have removed it; quantize with desc_act false."
        )
    if not symmetric and bits == 8:
        raise UnsupportedError(
            f"{CONFIG_NAME}: {where}: 8 bit with zero points (sym false) cannot be converted, no"
            " Marlin kernel reads it; symmetric 8 bit and asymmetric 4 bit can."
        )
    _refuse_mixed(table.get("dynamic"))
    quantization = Quantization(None if size == -1 else size, bits, not symmetric)
    return Gptq(quantization, kind, "gptqmodel" in _quantizer(table.get("meta")))


def _refuse_mixed(dynamic: Any) -> None:
    """`-:pattern` leaves modules unquantized; any other pattern gives them another width."""
    if dynamic is None:
        return
    if not isinstance(dynamic, dict):
        raise CheckpointError(f"{CONFIG_NAME}: quantization_config.dynamic is not an object.")
    for pattern, override in dynamic.items():
        if not pattern.startswith("-:") and override:
            raise UnsupportedError(
                f"{CONFIG_NAME}: quantization_config.dynamic has {pattern!r:.60} with settings of"
                " its own: mixed widths cannot be converted; one width for all experts can."
            )


def _quantizer(meta: Any) -> str:
    return str(meta.get("quantizer")).lower() if isinstance(meta, dict) else ""
