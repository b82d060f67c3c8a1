"""A whole validation: structure first, then the data of every blob, layer by layer."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from kconvert.convert.source.local import refuse_damaged
from kconvert.layouts.blob import COMMON_FOLDER
from kconvert.layouts.checkpoint import Checkpoint, read_checkpoint, read_json
from kconvert.layouts.errors import CheckpointError, UnsupportedError
from kconvert.layouts.families.family import Family
from kconvert.layouts.families.known import read_family
from kconvert.layouts.fields import CONFIG_NAME
from kconvert.layouts.manifest import Manifest, read_manifest
from kconvert.layouts.model import VISION, Group, read_model
from kconvert.layouts.quantization import integers
from kconvert.layouts.reader import Reader, Scratch
from kconvert.layouts.registry import layout_named
from kconvert.layouts.sharding import Parallelism, RankSlice, rank_slice
from kconvert.validate import structure
from kconvert.validate.content import ExpertCheck, check_whole
from kconvert.validate.findings import Finding, Validation
from kconvert.validate.library import DECODED, library_codes
from kconvert.validate.structure import Blob

Check = Callable[[], Iterable[Finding]]


def run(
    output: Path,
    source: Path | None,
    sample: int | None,
    verify: bool,
    workers: int | None,
    progress: Callable[[int], None],
) -> Validation:
    """See `kconvert.validate.validate`."""
    if verify and source is None:
        raise UnsupportedError("--verify is for a source's files: give --source.")
    manifest = read_manifest(output)
    checkpoint = None if source is None else read_checkpoint(source)
    groups = None if checkpoint is None else read_model(checkpoint).groups
    if verify and source is not None and checkpoint is not None:
        refuse_damaged(source, checkpoint)
    result = Validation(manifest.complete, source is not None, sample, len(manifest.files))
    blobs, result.findings = structure.read_blobs(output, manifest)
    result.findings += structure.check_files(output, manifest)
    if any(finding.file == CONFIG_NAME for finding in result.findings):
        return result  # the shapes that the headers should have are not known
    family = read_family(read_json(output / CONFIG_NAME))
    dims = family.dims
    result.findings += structure.check_complete(manifest, dims)
    result.findings += structure.check_headers(manifest, blobs, dims)
    result.findings += structure.check_common(blobs, family)
    if source is not None and checkpoint is not None and groups is not None:
        result.findings += _check_small_files(output, source, checkpoint)
        result.findings += _check_groups(manifest, blobs, groups)
    if result.findings:
        return result  # the data would be read by headers that are not to be trusted
    data = _Data(output, source, manifest, family, result, progress)
    try:
        with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
            for name in sorted({blob.group for blob in blobs}):
                here = [blob for blob in blobs if blob.group == name]
                group = None if groups is None else _group(groups, name)
                for findings in pool.map(lambda check: list(check()), data.checks(here, group)):
                    result.findings += findings
    finally:
        data.close()
    result.bytes_read = data.bytes_read
    return result


def _check_small_files(output: Path, source: Path, checkpoint: Checkpoint) -> Iterable[Finding]:
    for name in checkpoint.small_files:
        path = output / name
        if not path.is_file():
            yield Finding(name, "is missing: the source has it")
        elif path.read_bytes() != (source / name).read_bytes():
            yield Finding(name, "is not the source's")


def _check_groups(
    manifest: Manifest, blobs: list[Blob], groups: dict[str, Group]
) -> Iterable[Finding]:
    """A complete output has every group of the source (the MTP layers, vision, that its config
    does not tell of), but for vision where that was left out."""
    there = {blob.group for blob in blobs}
    for name in groups.keys() - there if manifest.complete else ():
        if not (name == VISION and manifest.text_only):
            yield Finding(f"{COMMON_FOLDER}/{name}.safetensors", "is missing: the source has it")


def _group(groups: dict[str, Group], name: str) -> Group:
    group = groups.get(name)
    if group is None or group.absent:
        lacking = f" ({', '.join(group.absent)})" if group else ""
        raise CheckpointError(
            f"the source has no {name}{lacking}, the output does: give the source it was made from."
        )
    return group


class _Data:
    """The checks of one group after another; counts what is compared."""

    def __init__(
        self,
        output: Path,
        source: Path | None,
        manifest: Manifest,
        family: Family,
        result: Validation,
        progress: Callable[[int], None],
    ) -> None:
        self._dims, self._format = family.dims, family.format
        self._layout = layout_named(manifest.layout)(family.dims.quantization)
        self._parallelism = Parallelism(manifest.tp, manifest.ep)
        self._result = result
        self._scratch = Scratch()
        self._blobs = Reader(lambda name: output / name, progress)
        self._shards = Reader(lambda name: (source or output) / name, progress)

    @property
    def bytes_read(self) -> int:
        """From blobs and shards."""
        return self._blobs.bytes_read + self._shards.bytes_read

    def close(self) -> None:
        """Close all files."""
        self._blobs.close()
        self._shards.close()

    def checks(self, blobs: list[Blob], group: Group | None) -> Iterator[Check]:
        """The checks of a group's blobs, to be run at once; `group` is the source's."""
        sources = {} if group is None else {tensor.name: tensor for tensor in group.whole}
        for blob in (blob for blob in blobs if blob.info.sharding is None):
            if group is not None and sources.keys() != blob.header.tensors.keys():
                yield lambda blob=blob: [Finding(blob.path, "its tensors are not the source's")]
                continue
            for name in blob.header.tensors:
                self._result.tensors += 1
                yield partial(
                    check_whole,
                    blob,
                    name,
                    self._blobs,
                    self._shards,
                    self._scratch,
                    sources.get(name),
                )
        ranks = [
            (blob, rank_slice(self._dims, self._parallelism, blob.info.sharding.rank))
            for blob in blobs
            if blob.info.sharding is not None
        ]
        self._result.tensors += sum(len(blob.header.tensors) for blob, _ in ranks)
        for index in self._chosen():
            owners = [(blob, part) for blob, part in ranks if index in part.experts]
            if owners:
                self._result.experts += len(owners)
                yield partial(self._expert, owners, group, index)

    def _chosen(self) -> list[int]:
        experts = self._dims.experts
        sample = self._result.sample
        count = experts if sample is None else min(sample, experts)
        return [experts * i // count for i in range(count)]

    def _expert(
        self, owners: list[tuple[Blob, RankSlice]], group: Group | None, index: int
    ) -> Iterator[Finding]:
        expert = None if group is None else group.experts[index]
        check = ExpertCheck(
            expert, self._layout, self._format, self._blobs, self._shards, self._scratch
        )
        for blob, part in owners:
            yield from check.check(blob, part, index, self._dims.hidden)
        if index == 0:  # decoding by the library is slow: one expert a layer
            plain = self._dims.quantization._replace(zero_point=False)
            for words in check.codes if self._format.name in DECODED else ():
                if not np.array_equal(integers(plain, words), library_codes(plain, words)):
                    text = "compressed-tensors reads other codes"
                    yield Finding(owners[0][0].path, text, None, 0)
