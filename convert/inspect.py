"""What a folder holds, from headers alone: a checkpoint, or an output of `convert`."""

from collections import Counter
from pathlib import Path
from typing import Any

from kconvert.layouts.checkpoint import read_checkpoint
from kconvert.layouts.families.config_keys import mention_of, warnings_of
from kconvert.layouts.families.deepseek_v3 import unknown_config_keys
from kconvert.layouts.fields import text_config
from kconvert.layouts.manifest import MANIFEST_NAME, WORK_FOLDER, read_manifest
from kconvert.layouts.model import groups_text, read_model


def inspect(path: Path) -> dict[str, Any]:
    """Facts about the folder `path`, by name, ready for JSON.

    Raises CheckpointError where it is neither, OutputError for an unfinished output.
    """
    if (path / MANIFEST_NAME).exists() or (path / WORK_FOLDER).exists():
        return _output(path)
    return _checkpoint(path)


def _output(path: Path) -> dict[str, Any]:
    manifest = read_manifest(path)
    folders: dict[str, dict[str, int]] = {}
    for name, entry in manifest.files.items():
        folder = folders.setdefault(name.rpartition("/")[0] or "small files", Counter())
        folder["files"] += 1
        folder["bytes"] += entry.bytes
    return {
        "kind": "output of kconvert",
        "layout": manifest.layout,
        "tp": manifest.tp,
        "ep": manifest.ep,
        "complete": manifest.complete,
        "text_only": manifest.text_only,
        "source": f"{manifest.repo}@{manifest.commit}" if manifest.repo else "a local folder",
        "files": len(manifest.files),
        "bytes": sum(entry.bytes for entry in manifest.files.values()),
        "folders": {name: dict(folder) for name, folder in sorted(folders.items())},
    }


def _checkpoint(path: Path) -> dict[str, Any]:
    checkpoint = read_checkpoint(path)
    model = read_model(checkpoint)
    dims, tensors = model.dims, checkpoint.tensors.values()
    unknown = unknown_config_keys(checkpoint.config)
    absent = sorted(set(checkpoint.absent.values()))
    dtypes: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        entry = dtypes.setdefault(tensor.dtype, {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += tensor.nbytes
    return {
        "kind": "checkpoint",
        "model_type": text_config(checkpoint.config).get("model_type"),
        "layers": dims.layers,
        "dense_layers": min(dims.first_moe, dims.layers),
        "routed_experts": dims.experts,
        "hidden_size": dims.hidden,
        "moe_intermediate_size": dims.intermediate,
        "quantization": f"INT4, symmetric, {dims.quantization}",
        "tensors": len(checkpoint.tensors) + len(checkpoint.absent),
        "bytes": sum(shard.size for shard in checkpoint.shards.values()),
        "shards": f"{len(checkpoint.shards)} of {len(checkpoint.shards) + len(absent)} are here",
        "groups_here": groups_text(n for n, group in model.groups.items() if not group.absent),
        "dtypes": dtypes,
        "missing_shards": absent,
        "small_files": ", ".join(checkpoint.small_files),
        "ignored": [*checkpoint.ignored, *mention_of(unknown)],
        "warnings": warnings_of(unknown),
    }
