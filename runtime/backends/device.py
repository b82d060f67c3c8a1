"""Which device runs a model: what was asked for, what is here, what the kernels take."""

import sys
from pathlib import Path

from kconvert.layouts.errors import DeviceMemoryError, OptionError, UnavailableError
from kconvert.runtime.backends.protocol import DTYPES
from kconvert.runtime.config import ModelConfig
from kconvert.runtime.distributed import Ranks
from kconvert.runtime.kernels.attention.launch import AttentionShape
from kconvert.runtime.weights import Blobs

DEVICES = ("auto", "cpu", "cuda")
_ROOM = 2 << 30  # bytes beside weights and cache: work, graphs, the context of CUDA


def choose(
    device: str,
    dtype: str | None,
    folder: Path,
    config: ModelConfig,
    blobs: Blobs,
    ranks: Ranks,
    drafter_bytes: int = 0,
) -> tuple[str, str]:
    """("cpu" or "cuda", dtype). "auto" is the GPU if there is one that can run the model; if there
    is one that cannot, stderr says why. A dtype that is not given follows the device.

    Raises OptionError if the device that was asked for cannot run the model, UnavailableError if
    there is no GPU, DeviceMemoryError if its memory is too small, also for "auto".
    """
    if device not in DEVICES:
        raise OptionError(f"device {device!r} is none of {', '.join(DEVICES)}.")
    if dtype is not None and dtype not in DTYPES:
        raise OptionError(f"dtype {dtype!r} is none of {', '.join(DTYPES)}.")
    if device == "cpu":
        return "cpu", dtype or "float32"
    why = _no_gpu()
    if why is not None:
        if device == "cuda":
            raise UnavailableError(f"{why}: run it with --device cpu.")
        return "cpu", dtype or "float32"
    why = _refusal(dtype, config, blobs, ranks)
    if why is not None:
        if device == "cuda":
            raise OptionError(f"{folder}: {why}; run it with --device cpu.")
        print(f"kconvert: on the CPU, as {why}.", file=sys.stderr)
        return "cpu", dtype or "float32"
    _check_memory(folder, config, blobs, ranks, drafter_bytes)
    return "cuda", "bfloat16"


def _no_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "there is no NVIDIA GPU that torch can use"


def _refusal(dtype: str | None, config: ModelConfig, blobs: Blobs, ranks: Ranks) -> str | None:
    """Why the kernels cannot run this model, in a few words."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    if major < 9:
        return f"the GPU has compute capability {major}.{minor}, the kernels want 9.0 or later"
    try:
        import cuda.core  # noqa: F401
    except ImportError:
        return "cuda-core is not installed (pip install 'kconvert[cuda]')"
    if dtype == "float32":
        return "the kernels compute in bfloat16 alone, float32 was asked for"
    if blobs.manifest.layout != "marlin":
        return f"the blobs are {blobs.manifest.layout}, the kernels read marlin"
    if not config.norm_topk:
        return "norm_topk_prob is false, which the router's kernel does not do"
    layout = blobs.layout
    if layout is not None and layout.quantization.scheme != "int":
        return f"the experts are {layout.quantization.text}, the kernels take INT4"
    group = layout.quantization.group_size if layout is not None else 32
    if group is None:
        return "scales are channelwise, the kernels take groups of 32, 64 or 128"
    odd = blobs.dtypes("_weight_scale") - {"BF16"}
    if odd:
        return f"scales are {' and '.join(sorted(odd))}, the kernels take BF16"
    try:
        AttentionShape(
            config.heads // ranks.size, config.q_lora, config.kv_lora, config.nope_dim,
            config.rope_dim, config.value_dim,
        )  # fmt: skip
    except ValueError as error:
        return str(error)
    return None


def _check_memory(
    folder: Path, config: ModelConfig, blobs: Blobs, ranks: Ranks, drafter_bytes: int
) -> None:
    import torch

    head = 2 * config.vocabulary * config.hidden // ranks.size if config.tied_head else 0
    needed = _ROOM + blobs.kept_bytes() + head + drafter_bytes
    free, _ = torch.cuda.mem_get_info()
    if needed > free:
        raise DeviceMemoryError(
            f"{folder} needs {needed / 1e9:.1f} GB of the GPU's memory on this rank,"
            f" {free / 1e9:.1f} GB are free: convert it for more ranks, or use --device cpu."
        )
