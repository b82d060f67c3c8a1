"""A converted model that is opened again: its manifest, its files, each blob's header."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from kconvert.layouts.blob import COMMON_FOLDER, BlobInfo, digest, rank_folder, read_blob
from kconvert.layouts.checkpoint import read_json
from kconvert.layouts.errors import (
    ChangedFileError,
    CheckpointError,
    KconvertError,
    MissingFileError,
    OutputError,
    UnfinishedOutputError,
)
from kconvert.layouts.experts import StackedTensor, stacked_tensors
from kconvert.layouts.families.family import Family
from kconvert.layouts.families.known import read_family
from kconvert.layouts.fields import CONFIG_NAME
from kconvert.layouts.header import Header, TensorEntry
from kconvert.layouts.manifest import MANIFEST_NAME, Manifest, read_manifest
from kconvert.layouts.model import VISION, layer_name, layer_number, layer_numbers
from kconvert.layouts.sharding import ModelDims, Parallelism


class Blob(NamedTuple):
    """A blob whose header is the one in the manifest."""

    path: Path
    header: Header
    info: BlobInfo

    def stacked(self, tensor: StackedTensor) -> TensorEntry:
        """The entry of a stacked tensor; CheckpointError if the blob has none."""
        entries = [e for name, e in self.header.tensors.items() if name.endswith(f".{tensor.name}")]
        if len(entries) != 1:
            raise CheckpointError(f"{self.path} has no tensor …{tensor.name}: convert it again.")
        return entries[0]


def is_output(folder: Path) -> bool:
    """Whether `folder` has a manifest, as every output of `kconvert convert` does."""
    return (folder / MANIFEST_NAME).is_file()


class Output:
    """A finished output. No tensor's data is read here."""

    def __init__(self, folder: Path) -> None:
        """Raises UnfinishedOutputError if `folder` is not an output or only a part of one,
        ChangedFileError if its config.json was changed."""
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        if not self.manifest.complete:
            raise UnfinishedOutputError(
                f"{folder} holds a part of the model: run `kconvert convert` without --layers and"
                " --ranks to complete it."
            )
        self.stored = Parallelism(self.manifest.tp, self.manifest.ep)
        config = self.sized(CONFIG_NAME)
        if digest(config.read_bytes()) != self.manifest.files[CONFIG_NAME].digest:
            raise ChangedFileError(
                f"{config} is not the one that was converted: restore it, or convert again; engines"
                " take other settings as options (vLLM: --hf-overrides, SGLang:"
                " --json-model-override-args)."
            )
        self.family: Family = read_family(read_json(config))
        self.dims: ModelDims = self.family.dims

    @property
    def layout(self) -> str:
        """The layout of the experts' blobs."""
        return self.manifest.layout

    def moe_layers(self) -> set[int]:
        """The layers that have routed experts."""
        folder = rank_folder(0, self.manifest.tp)
        names = [name for name in self.manifest.files if name.startswith(f"{folder}/")]
        return set(layer_numbers(Path(name).stem for name in names))

    def name_of(self, blob: Blob) -> str:
        """What the manifest calls a blob: its path in the folder."""
        return blob.path.relative_to(self.folder).as_posix()

    def common(self, layers: Collection[int] | None = None, vision: bool = True) -> Iterator[Blob]:
        """The blobs of tensors that are not cut: those of `layers` (None: of all), the outer ones,
        and those of the vision tower if it is asked for."""
        for name in self.manifest.files:
            group = Path(name).stem
            if not name.startswith(f"{COMMON_FOLDER}/"):
                continue
            number = layer_number(group)
            if number is None:
                wanted = vision or group != VISION
            else:
                wanted = layers is None or number in layers
            if wanted:
                yield self._open(name)

    def experts(self, layer: int, rank: int) -> Blob:
        """One rank's blob of a layer's experts."""
        blob = self._open(f"{rank_folder(rank, self.manifest.tp)}/{layer_name(layer)}.safetensors")
        sharding = blob.info.sharding
        expected = (self.layout, rank, self.manifest.tp, self.manifest.ep)
        if sharding is None or expected != (
            sharding.layout, sharding.rank, sharding.tp, sharding.ep
        ):  # fmt: skip
            raise CheckpointError(
                f"{blob.path} is not of layout {expected[0]}, rank {rank}, tp {expected[2]}, ep"
                f" {expected[3]}, as {MANIFEST_NAME} says: convert again."
            )
        if sharding.read_quantization(blob.path) != self.dims.quantization:
            raise CheckpointError(
                f"{blob.path} is quantized with {sharding.quantization}, {CONFIG_NAME} says"
                f" {self.dims.quantization}: convert again."
            )
        for tensor in stacked_tensors(self.dims.quantization):
            blob.stacked(tensor)
        return blob

    def _open(self, name: str) -> Blob:
        path = self.sized(name)
        try:
            header, info = read_blob(path)
        except KconvertError:  # its advice is for a source
            raise CheckpointError(
                f"{path} has a damaged header: copy it again, or convert it again."
            ) from None
        if digest(header.raw) != self.manifest.files[name].digest:
            raise ChangedFileError(
                f"{path} belongs to another conversion: its header is not the one in"
                f" {MANIFEST_NAME};"
                " copy it again, or convert it again."
            )
        return Blob(path, header, info)

    def sized(self, name: str) -> Path:
        """The path of a file that is there and has the manifest's size."""
        path, entry = self.folder / name, self.manifest.files.get(name)
        if entry is None:
            raise OutputError(f"{path} is not in {MANIFEST_NAME}: convert again.")
        size = path.stat().st_size if path.is_file() else None
        if size != entry.bytes:
            found = "is missing" if size is None else f"has {size:,} bytes"
            raise (MissingFileError if size is None else ChangedFileError)(
                f"{path} {found}, {entry.bytes:,} bytes were written: copy it again, or convert it"
                " again."
            )
        return path
