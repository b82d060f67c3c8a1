"""What something is and holds, from headers alone: a checkpoint here or on the Hub, an output of
`convert`, a part or a file of either."""

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kconvert.convert.output.outline import (
    EXPORT_RECORD,
    OUTLINE_NAME,
    Outline,
    read_outline,
)
from kconvert.convert.source import hub_name, open_hub
from kconvert.layouts.blob import COMMON_FOLDER, BlobInfo, blob_info
from kconvert.layouts.checkpoint import (
    INDEX_NAME,
    Checkpoint,
    SourceTensor,
    read_checkpoint,
    read_json,
    tensor_in,
)
from kconvert.layouts.errors import CheckpointError, KconvertError, OutputError, UnsupportedError
from kconvert.layouts.families.config_keys import mention_of, warnings_of
from kconvert.layouts.families.known import read_family, unknown_config_keys
from kconvert.layouts.fields import CONFIG_NAME, text_config
from kconvert.layouts.header import Header, TensorEntry, read_header
from kconvert.layouts.manifest import MANIFEST_NAME, WORK_FOLDER, read_manifest
from kconvert.layouts.model import OUTER, VISION, Model, groups_text, layer_name, read_model
from kconvert.layouts.registry import NAMES, layout_named
from kconvert.layouts.sharding import POWERS, ModelDims, parallelisms

DRAFTER = "DFlashDraftModel"  # the architecture, as in kconvert.runtime.drafting
_RANK_FOLDER = re.compile(r"rank-\d{5}-of-\d{5}")
_SUFFIX = ".safetensors"


def inspect(source: str | Path, tensors: str | None = None) -> dict[str, Any]:
    """Facts about a folder, a file or a repository of the Hub, by name, ready for JSON.

    `tensors`: a pattern (* and ?) of names; tensors that match are listed too. The result's `kind`
    says what it is; if that is a checkpoint which cannot be converted, `refused` says why. Raises
    CheckpointError if it is damaged or nothing known, OutputError for a damaged output,
    UnavailableError if the Hub cannot be asked.
    """
    name = hub_name(str(source))
    if name is not None:
        opened = open_hub(name.repo, name.revision)
        found = {"kind": "checkpoint on the Hub", "repo": opened.name, "commit": opened.commit}
        return found | _checkpoint(opened.checkpoint) | _listed(opened.checkpoint.tensors, tensors)
    path = Path(source)
    if path.is_dir():
        facts = _folder(path)
        return facts | _listed(_tensors_in(path) if tensors else {}, tensors)
    if not path.exists():
        raise CheckpointError(
            f"{path} is neither a file or folder here nor the name of a repository on the Hub, like"
            " moonshotai/Kimi-K2.6: check it."
        )
    return _file(path) | _listed(_tensors_of([path], path.parent) if tensors else {}, tensors)


def _listed(found: dict[str, SourceTensor], pattern: str | None) -> dict[str, Any]:
    """The tensors whose names fit a pattern, by name."""
    if pattern is None:
        return {}
    return {
        "tensors_found": {
            name: {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "bytes": tensor.nbytes,
                "file": tensor.shard,
            }
            for name, tensor in found.items()
            if fnmatch.fnmatchcase(tensor.name, pattern)
        }
    }


def _tensors_in(folder: Path) -> dict[str, SourceTensor]:
    """The tensors that a checkpoint's index names; in any other folder, those of every safetensors
    file."""
    if (folder / CONFIG_NAME).exists() and not (folder / MANIFEST_NAME).exists():
        with suppress(KconvertError):  # a drafter has no index
            return read_checkpoint(folder).tensors
    return _tensors_of(sorted(folder.rglob(f"*{_SUFFIX}")), folder)


def _tensors_of(files: list[Path], folder: Path) -> dict[str, SourceTensor]:
    """By name, and if several ranks have one of that name, with its file before it."""
    found = [
        tensor_in(file.relative_to(folder).as_posix(), entry)
        for file in files
        for entry in read_header(file).tensors.values()
    ]
    times = Counter(t.name for t in found)
    return {f"{t.shard}: {t.name}" if times[t.name] > 1 else t.name: t for t in found}


def _folder(path: Path) -> dict[str, Any]:
    if (path / MANIFEST_NAME).exists():
        return _output(path)
    if (path / WORK_FOLDER).is_dir() and not (path / INDEX_NAME).exists():
        return _unfinished(path)
    if _RANK_FOLDER.fullmatch(path.resolve().name) or path.resolve().name == COMMON_FOLDER:
        with suppress(KconvertError):  # else it only has the name
            return _blobs(path)
    if (path / CONFIG_NAME).exists():
        config = read_json(path / CONFIG_NAME)
        if DRAFTER in str(config.get("architectures")):
            return _drafter(path, config)
        return {"kind": "checkpoint"} | _checkpoint(read_checkpoint(path))
    raise CheckpointError(_unknown(path))


def _unknown(path: Path) -> str:
    """Why a folder is nothing known, and what could be meant."""
    inside = sorted(path.iterdir())
    if not inside:
        return f"{path} is an empty folder."
    below = [*inside, *(path / "snapshots").glob("*")]  # huggingface_hub's cache
    meant = [
        child.relative_to(path).as_posix()
        for child in below
        if child.is_dir() and any((child / name).exists() for name in (CONFIG_NAME, MANIFEST_NAME))
    ]
    if meant:
        more = f" or {len(meant) - 1} more" if meant[1:] else ""
        hint = f"give a folder in it: {meant[0]}{more}"
    elif (path / INDEX_NAME).exists() or any(child.suffix == _SUFFIX for child in inside):
        hint = f"it holds weights, and to be a checkpoint lacks its {CONFIG_NAME}"
    else:
        hint = "give one that is either"
    return (
        f"{path} is no checkpoint (it has no {CONFIG_NAME}) and no output of `kconvert convert`"
        f" (no {MANIFEST_NAME}): {hint}."
    )


def _output(path: Path) -> dict[str, Any]:
    manifest = read_manifest(path)
    sizes = {name: entry.bytes for name, entry in manifest.files.items()}
    dims = _dims(path)
    return {
        "kind": "output of kconvert" if manifest.complete else "part of an output of kconvert",
        "layout": manifest.layout,
        "tp": manifest.tp,
        "ep": manifest.ep,
        "complete": manifest.complete,
        "text_only": manifest.text_only,
        "source": _origin(manifest.repo, manifest.commit),
        **_files(sizes),
        "damaged_files": _damaged(path, sizes),
        **({"quantization": dims.quantization.text} if dims else {}),
        **({"can_be_resharded": _convertible(dims)} if manifest.complete and dims else {}),
    }


def _damaged(path: Path, sizes: dict[str, int]) -> list[str]:
    """A sentence for each file of an output that is missing or has another size than it should."""
    found = {name: (path / name).stat().st_size for name in sizes if (path / name).is_file()}
    return [
        f"{name} has {found[name]:,} bytes, {size:,} expected" if name in found
        else f"{name} is missing"
        for name, size in sizes.items()
        if found.get(name) != size
    ]  # fmt: skip


def _dims(path: Path) -> ModelDims | None:
    """The sizes in an output's config.json, which may be missing."""
    with suppress(KconvertError):
        return read_family(read_json(path / CONFIG_NAME)).dims
    return None


def _unfinished(path: Path) -> dict[str, Any]:
    """A run is at work there, or was interrupted."""
    there = {
        file.relative_to(path).as_posix(): file.stat().st_size
        for file in (*path.glob(f"*{_SUFFIX}"), *path.glob(f"*/*{_SUFFIX}"))
        if file.parent.name != WORK_FOLDER
    }
    if (path / WORK_FOLDER / EXPORT_RECORD).exists():
        again = {"to_finish": "run the same `kconvert export` again"}
        return {"kind": "unfinished export of an output of kconvert"} | _files(there) | again
    facts: dict[str, Any] = {"kind": "unfinished output of kconvert"}
    if (path / WORK_FOLDER / OUTLINE_NAME).exists():
        outline = read_outline(path)
        facts |= _plan(outline) | {"blobs": f"{len(there)} of {len(outline.blobs)} are here"}
    return facts | _files(there) | {"to_finish": "run the same `kconvert convert` again"}


def _plan(outline: Outline) -> dict[str, Any]:
    return {
        "layout": outline.layout,
        "tp": outline.tp,
        "ep": outline.ep,
        "source": _origin(outline.repo, outline.commit),
    }


def _blobs(path: Path) -> dict[str, Any]:
    """A folder of blobs: one rank's, or what all have in common."""
    files = sorted(path.glob(f"*{_SUFFIX}"))
    headers = {file: read_header(file) for file in files}
    infos = [blob_info(header, str(file)) for file, header in headers.items()]
    if not infos:
        raise OutputError(f"{path} holds no blob.")
    return {
        "kind": "one rank's folder of an output of kconvert"
        if infos[0].sharding
        else "common folder of an output of kconvert",
        **_blob(infos[0]),
        "groups": groups_text(file.stem for file in files),
        "output": str(path.resolve().parent),
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
        **_contents(headers.values()),
    }


def _blob(info: BlobInfo) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if info.sharding is not None:
        cut = info.sharding
        facts = {"layout": cut.layout, "rank": cut.rank, "tp": cut.tp, "ep": cut.ep}
    return facts | {"source": _origin(info.repo, info.commit)}


def _file(path: Path) -> dict[str, Any]:
    if path.name in (MANIFEST_NAME, CONFIG_NAME, INDEX_NAME):
        raise CheckpointError(f"{path} is one file of a folder: give {path.parent}.")
    try:
        header = read_header(path)
    except CheckpointError:
        if path.suffix == _SUFFIX:
            raise
        raise CheckpointError(
            f"{path} is no safetensors file: of files, only those can be inspected."
        ) from None
    return {
        **_container(header, path),
        "bytes": path.stat().st_size,
        **_contents([header]),
    }


def _container(header: Header, path: Path) -> dict[str, Any]:
    if "kconvert" in header.metadata:
        return {"kind": "blob of kconvert", **_blob(blob_info(header, str(path)))}
    return {"kind": "safetensors file", "metadata": header.metadata}


def _drafter(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    headers = [read_header(file) for file in sorted(path.glob(f"*{_SUFFIX}"))]
    inner = config.get("dflash_config")
    settings = config | (inner if isinstance(inner, dict) else {})
    names = ("hidden_size", "num_hidden_layers", "block_size", "num_target_layers")
    return {
        "kind": "DFlash drafter, for `kconvert smoke-generate --drafter`",
        **{name: settings[name] for name in names if name in settings},
        **_contents(headers),
    }


def _checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    absent = sorted(set(checkpoint.absent.values()))
    unknown = unknown_config_keys(checkpoint.config)
    warnings: list[str] = []
    facts: dict[str, Any] = {"model_type": text_config(checkpoint.config).get("model_type")}
    try:
        model = read_model(checkpoint)
    except KconvertError as error:
        facts["refused"] = str(error)
    else:
        warnings = model.family.warnings
        facts |= {
            "layers": model.dims.layers,
            "dense_layers": sum(
                not model.groups[layer_name(layer)].experts
                if (is_moe := model.dims.is_moe(layer)) is None
                else not is_moe
                for layer in range(model.dims.layers)
            ),
            "routed_experts": model.dims.experts,
            "hidden_size": model.dims.hidden,
            "moe_intermediate_size": model.dims.intermediate,
            "quantization": model.dims.quantization.text,
            "format": model.family.format.name,
            "groups_here": groups_text(n for n, group in model.groups.items() if not group.absent),
            "sizes": _sizes(model),
            "can_be_converted": _convertible(model.dims),
        }
    dtypes = _dtypes(checkpoint.tensors.values())
    return facts | {
        "tensors": len(checkpoint.tensors) + len(checkpoint.absent),
        "bytes": sum(shard.size for shard in checkpoint.shards.values()),
        "shards": f"{len(checkpoint.shards)} of {len(checkpoint.shards) + len(absent)} are here",
        "dtypes": dtypes,
        "missing_shards": absent,
        "small_files": ", ".join(checkpoint.small_files),
        "ignored": [*checkpoint.ignored, *mention_of(unknown)],
        "warnings": [*warnings, *warnings_of(unknown)],
    }


def _sizes(model: Model) -> dict[str, int]:
    """Bytes by what they are, for the groups that are here."""
    sizes: dict[str, int] = {}

    def add(kind: str, tensor: SourceTensor) -> None:
        sizes[f"{kind}_bytes"] = sizes.get(f"{kind}_bytes", 0) + tensor.nbytes

    for group in model.groups.values():
        for expert in group.experts:
            for matrix in expert.stored:
                for role, tensor in matrix.by_role.items():
                    add(f"expert_{role}", tensor)
                for tensor in matrix.dropped:
                    add("expert_companion", tensor)
        for tensor in group.whole:
            add(group.name if group.name in (OUTER, VISION) else "layer", tensor)
    return sizes


def _convertible(dims: ModelDims) -> str:
    """For which tp and ep, by layout; or why not, if a layout has no order for it."""
    said = []
    for name in NAMES:
        try:
            layout = layout_named(name)(dims.quantization)
        except UnsupportedError as error:
            said.append(f"not as {name}: {error}".rstrip("."))
            continue
        fits = parallelisms(dims, layout.constraint)
        by_tp = {p.tp: [q.ep for q in fits if q.tp == p.tp] for p in fits}
        texts = [f"{tp}{_eps(tp, eps)}" for tp, eps in by_tp.items()]
        said.append(f"as {name} with --tp {', '.join(texts)}" if fits else f"not as {name}")
    return "; ".join(said)


def _eps(tp: int, eps: list[int]) -> str:
    """Nothing if every power of two up to tp works as ep."""
    every = [ep for ep in POWERS if ep <= tp]
    return "" if eps == every else f" (--ep {', '.join(map(str, eps))})"


def _dtypes(tensors: Iterable[SourceTensor | TensorEntry]) -> dict[str, dict[str, int]]:
    """How many tensors there are of each dtype, with how many bytes."""
    dtypes: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        entry = dtypes.setdefault(tensor.dtype, {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += tensor.nbytes
    return dtypes


def _contents(headers: Iterable[Header]) -> dict[str, Any]:
    tensors = [tensor for header in headers for tensor in header.tensors.values()]
    return {"tensors": len(tensors), "dtypes": _dtypes(tensors)}


def _files(sizes: dict[str, int]) -> dict[str, Any]:
    """How many files there are with how many bytes, in all and by folder."""
    folders: dict[str, dict[str, int]] = {}
    for name, size in sizes.items():
        folder = folders.setdefault(name.rpartition("/")[0] or "small files", Counter())
        folder["files"] += 1
        folder["bytes"] += size
    return {
        "files": len(sizes),
        "bytes": sum(sizes.values()),
        "folders": {name: dict(folder) for name, folder in sorted(folders.items())},
    }


def _origin(repo: str | None, commit: str | None) -> str:
    return f"{repo}@{commit}" if repo else "a local folder"
