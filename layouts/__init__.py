"""What the bytes on disk mean: the checkpoint's and the blobs'. Imports none of the others."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kconvert.layouts.errors import (
    AccessError,
    ChangedFileError,
    CheckpointError,
    DeviceMemoryError,
    HubError,
    KconvertError,
    LockedOutputError,
    LostProcessError,
    MissingFileError,
    NewerFormatError,
    NoSpaceError,
    OccupiedOutputError,
    OptionError,
    OutputError,
    TruncatedFileError,
    UnavailableError,
    UnfinishedOutputError,
    UnsupportedError,
)

__all__ = [
    "AccessError",
    "BlobInfo",
    "ChangedFileError",
    "Checkpoint",
    "CheckpointError",
    "DeviceMemoryError",
    "Header",
    "HubError",
    "KconvertError",
    "Layout",
    "LockedOutputError",
    "LostProcessError",
    "Manifest",
    "MissingFileError",
    "Model",
    "NewerFormatError",
    "NoSpaceError",
    "OccupiedOutputError",
    "OptionError",
    "Output",
    "OutputError",
    "Quantization",
    "TruncatedFileError",
    "UnavailableError",
    "UnfinishedOutputError",
    "UnsupportedError",
    "layout_named",
    "marlin",
    "read_blob",
    "read_checkpoint",
    "read_header",
    "read_manifest",
    "read_model",
]


def lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of one of our packages: a name in `homes` (name → module) is imported when
    it is used, as numba takes a second to load and torch three. A module's own name gives the
    module."""

    def attribute(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f"{package}.{homes[name]}")
        return module if name == homes[name] else getattr(module, name)

    return attribute


if TYPE_CHECKING:
    from kconvert.layouts import marlin
    from kconvert.layouts.blob import BlobInfo, read_blob
    from kconvert.layouts.checkpoint import Checkpoint, read_checkpoint
    from kconvert.layouts.header import Header, read_header
    from kconvert.layouts.layout import Layout
    from kconvert.layouts.manifest import Manifest, read_manifest
    from kconvert.layouts.model import Model, read_model
    from kconvert.layouts.quantization import Quantization
    from kconvert.layouts.registry import layout_named
    from kconvert.layouts.stored.output import Output
else:
    __getattr__ = lazily(
        __name__,
        {
            "BlobInfo": "blob",
            "Checkpoint": "checkpoint",
            "Header": "header",
            "Layout": "layout",
            "Manifest": "manifest",
            "Model": "model",
            "Output": "stored.output",
            "Quantization": "quantization",
            "layout_named": "registry",
            "marlin": "marlin",
            "read_blob": "blob",
            "read_checkpoint": "checkpoint",
            "read_header": "header",
            "read_manifest": "manifest",
            "read_model": "model",
        },
    )
