"""Drafters for tests: the golden one written as other software would, changed on request."""

import json
from pathlib import Path
from typing import Any

from kit import DATA
from safetensors.torch import load_file, save_file
from torch import Tensor

from kconvert.layouts.checkpoint import INDEX_NAME
from kconvert.runtime.drafting.dflash_config import TargetDims

CASES = json.loads((DATA / "dflash_cases.json").read_text())["cases"]
GOLDEN = {case: load_file(DATA / f"dflash_case_{case}.safetensors") for case in CASES}
TARGET = TargetDims(hidden=64, vocabulary=400, layers=6)


def weights_of(case: str) -> dict[str, Tensor]:
    """The drafter's own tensors among the golden ones."""
    own = ("fc.", "hidden_norm.", "norm.", "layers.")
    return {name: tensor for name, tensor in GOLDEN[case].items() if name.startswith(own)}


def write_drafter(
    folder: Path,
    case: str = "plain",
    weights: dict[str, Tensor] | None = None,
    **changes: Any,
) -> Path:
    """A drafter's folder; `changes` to its config, where None removes a key."""
    config = {**CASES[case]["config"], **changes}
    config = {key: value for key, value in config.items() if value is not None}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights_of(case) if weights is None else weights, folder / "model.safetensors")
    return folder


def shard(folder: Path) -> Path:
    """Split the folder's only file in two, with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for part, chosen in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{part:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in chosen}, folder / file)
        weight_map |= dict.fromkeys(chosen, file)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
