"""`kconvert synth`: write a checkpoint of a real model's names, shapes and format, with random
weights.

INT4 codes keep Moonshot's grid: nibbles 1 to 15 (−7 to 7), and a ±7 in every group. A tensor's
bytes depend on the seed and its name alone, so any part of a model equals that part of the whole.
"""

import json
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kconvert.convert.output.publish import check_space
from kconvert.convert.synth.families import SynthTensor
from kconvert.convert.synth.presets import PRESETS, experts_of, shards, with_experts
from kconvert.layouts.checkpoint import INDEX_NAME
from kconvert.layouts.errors import OccupiedOutputError, OptionError
from kconvert.layouts.fields import CONFIG_NAME, text_config
from kconvert.layouts.header import DTYPE_BYTES, file_order, shard_header

_CHUNK_WORDS = 1 << 20  # 8 MB of random words at a time


def synth(
    output: Path,
    preset: str,
    *,
    layers: Collection[int] | None = None,
    experts: int | None = None,
    seed: int = 0,
    sparse: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Path]:
    """Write the model `preset` into `output`; returns the shards written.

    `layers`: only the shards of these layers, while the index names all; `experts`: that many in
    each layer (and in the config); `sparse`: only headers, in files of full size that take no
    space. Raises OptionError for an unknown preset or layer, OccupiedOutputError if `output` holds
    anything, NoSpaceError if it does not fit.
    """
    if preset not in PRESETS:
        raise OptionError(f"preset {preset!r} is unknown; known are {', '.join(PRESETS)}.")
    model = PRESETS[preset]
    if experts is not None:
        most = experts_of(model)
        if not 1 <= experts <= most:
            raise OptionError(f"--experts {experts}: {preset} has 1 to {most}.")
        model = with_experts(model, experts)
    text = text_config(model.config)
    depth = text["num_hidden_layers"] + text.get("num_nextn_predict_layers", 0)
    if layers is not None and not set(layers) <= set(range(depth)):
        raise OptionError(f"--layers: {preset} has layers 0 to {depth - 1}.")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise OccupiedOutputError(f"{output} is not an empty folder: choose another.")
    parts = [file_order(tensors) for tensors in shards(model)]
    names = [f"model-{i + 1:05}-of-{len(parts):06}.safetensors" for i in range(len(parts))]
    wanted = range(len(parts)) if layers is None else sorted(layers)
    if not sparse:
        check_space(output, {names[i]: shard_bytes(parts[i]) for i in wanted})
    output.mkdir(parents=True, exist_ok=True)
    for i in wanted:
        _write_shard(output / names[i], parts[i], seed, sparse, progress)
    index = {
        "metadata": {"total_size": sum(_nbytes(t) for part in parts for t in part)},
        "weight_map": {t.name: n for n, part in zip(names, parts, strict=True) for t in part},
    }
    generation = {
        "max_length": text["max_position_embeddings"],
        "eos_token_id": text["eos_token_id"],
    }
    (output / INDEX_NAME).write_text(json.dumps(index, indent=2))
    (output / "generation_config.json").write_text(json.dumps(generation))
    (output / CONFIG_NAME).write_text(json.dumps(model.config, indent=2))
    return [output / names[i] for i in wanted]


def shard_bytes(tensors: Iterable[SynthTensor]) -> int:
    """The size of a shard's file."""
    tensors = list(tensors)
    return len(shard_header(tensors)) + sum(map(_nbytes, tensors))


def _nbytes(tensor: SynthTensor) -> int:
    return DTYPE_BYTES[tensor.dtype] * int(np.prod(tensor.shape, dtype=np.int64))


def _write_shard(
    path: Path,
    tensors: list[SynthTensor],
    seed: int,
    sparse: bool,
    progress: Callable[[int], None],
) -> None:
    """Write under a hidden name first, so that a shard with its own name is whole."""
    staged = path.with_name(f".{path.name}.partial")
    header = shard_header(tensors)
    fd = os.open(staged, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o666)
    try:
        os.pwrite(fd, header, 0)
        os.ftruncate(fd, shard_bytes(tensors))
        if not sparse:
            starts, at = [], len(header)
            for tensor in tensors:
                starts.append(at)
                at += _nbytes(tensor)

            def write(item: tuple[SynthTensor, int]) -> None:
                tensor, position = item
                for piece in _content(tensor, seed):
                    position += os.pwrite(fd, piece, position)
                    progress(len(piece))

            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                for _ in pool.map(write, zip(tensors, starts, strict=True)):
                    pass
    except BaseException:
        staged.unlink()
        raise
    finally:
        os.close(fd)
    staged.rename(path)


def _content(tensor: SynthTensor, seed: int) -> Iterator[memoryview]:
    """A tensor's bytes in pieces of at most 8 MB."""
    if tensor.value:
        yield np.array(tensor.value, np.int32).data.cast("B")
        return
    rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(tensor.name.encode())]))
    total = _nbytes(tensor)
    for start in range(0, total, 8 * _CHUNK_WORDS):
        size = min(8 * _CHUNK_WORDS, total - start)
        words = rng.integers(0, 1 << 64, -(-size // 8), np.uint64)
        yield _shaped(tensor, words).data.cast("B")[:size]


def _shaped(tensor: SynthTensor, random: NDArray[np.uint64]) -> NDArray[np.generic]:
    """Random words made into plausible values of the tensor's kind."""
    if tensor.dtype == "U8":
        codes = random.view(np.uint8)
        # MXFP4's scale bytes: 2^−9 to 2^−2.
        return (
            codes if not tensor.name.endswith(("scale", "scales")) else (codes & 7) + np.uint8(118)
        )
    if tensor.dtype == "I32":
        low = random | random >> np.uint64(1)
        some = (low | low >> np.uint64(2)) & np.uint64(0x1111111111111111)
        random |= some ^ np.uint64(0x1111111111111111)  # a nibble 0 becomes 1
        random[::2] |= np.uint64(15)  # +7 at the head of every 4 words, a group of 32
        return random
    if tensor.dtype == "F32":
        return (random.view(np.uint32) >> np.uint32(9) | np.uint32(0x3C000000)).view(np.float32)
    bits = random.view(np.uint16)
    if tensor.dtype == "F16":
        return (bits & np.uint16(0x1FF)) + np.uint16(0x1C00)  # scales, 0.0039 to 0.006
    if tensor.name.endswith("weight_scale"):
        return (bits & np.uint16(0x1FF)) + np.uint16(0x3B80)  # 0.0039 to 0.06
    if len(tensor.shape) == 1:
        return (bits & np.uint16(0xF)) + np.uint16(0x3F80)  # norms, about 1
    return (bits & np.uint16(0x81FF)) + np.uint16(0x3C00)  # ± 0.008 to 0.03
