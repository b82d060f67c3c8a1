"""A whole validation: structure first, then the data of every blob, layer by layer."""

import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from random import Random

import numpy as np

from kconvert.convert.source.local import refuse_damaged
from kconvert.layouts.blob import COMMON_FOLDER
from kconvert.layouts.checkpoint import Checkpoint, read_checkpoint, read_json
from kconvert.layouts.errors import CheckpointError, OptionError
from kconvert.layouts.families.family import Family
from kconvert.layouts.families.known import read_family
from kconvert.layouts.fields import CONFIG_NAME
from kconvert.layouts.manifest import Manifest, read_manifest
from kconvert.layouts.model import VISION, Group, Model, layer_numbers, read_model
from kconvert.layouts.quantization import integers
from kconvert.layouts.reader import Reader, Scratch
from kconvert.layouts.registry import layout_named
from kconvert.layouts.sharding import Parallelism, RankSlice, rank_slice
from kconvert.validate import structure
from kconvert.validate.content import Done, ExpertCheck, check_whole
from kconvert.validate.findings import OF_SOURCE, Check, Finding, Pace, Validation
from kconvert.validate.ledger import UNEXPLAINED, ledger
from kconvert.validate.library import DECODED, library_codes
from kconvert.validate.product import read_in_order
from kconvert.validate.statistics import LayerStatistics
from kconvert.validate.structure import Blob

DataCheck = Callable[[Done], None]
_MANY = 16  # threads
_NOT_REACHED = Check("files").skipped


def run(
    output: Path,
    source: Path | None,
    sample: int | None,
    seed: int | None,
    verify: bool,
    workers: int | None,
    progress: Callable[[int], None],
) -> Validation:
    """See `kconvert.validate.validate`."""
    if verify and source is None:
        raise OptionError("--verify is for a source's files: give --source.")
    begin = time.perf_counter()
    manifest = read_manifest(output)
    checkpoint = None if source is None else read_checkpoint(source)
    model = None if checkpoint is None else read_model(checkpoint)
    if verify and source is not None and checkpoint is not None:
        refuse_damaged(source, checkpoint)
    if sample is not None and seed is None:
        seed = secrets.randbits(32)  # nobody can know beforehand what will be looked at
    seed = None if sample is None else seed
    result = Validation(
        manifest.complete, source is not None, sample, seed, verify, len(manifest.files)
    )
    if source is None:
        for name in OF_SOURCE:
            result.check(name).skipped = "no source was given"
    _look(output, source, manifest, checkpoint, model, workers, progress, result)
    result.seconds = time.perf_counter() - begin
    return result


def _look(
    output: Path,
    source: Path | None,
    manifest: Manifest,
    checkpoint: Checkpoint | None,
    model: Model | None,
    workers: int | None,
    progress: Callable[[int], None],
    result: Validation,
) -> None:
    """Make the checks, as far as what was found lets them be made."""
    blobs, unreadable = structure.read_blobs(output, manifest)
    result.record("headers", unreadable, 0, "blobs")
    result.record("files", structure.check_files(output, manifest), len(manifest.files), "files")
    if any(finding.file == CONFIG_NAME for finding in result.findings):
        return  # the shapes that the headers should have are not known
    family = read_family(read_json(output / CONFIG_NAME))
    dims = family.dims
    if manifest.complete:
        missing = structure.check_complete(manifest, dims)
        result.record("coverage", missing, len(blobs), "blobs")
    else:
        result.check("coverage").skipped = "the output does not claim to be complete"
    result.record("headers", structure.check_headers(manifest, blobs, dims), len(blobs), "blobs")
    result.record("alignment", structure.check_alignment(blobs), len(blobs), "blobs")
    wrong_origin = structure.check_provenance(manifest, blobs)
    result.record("provenance", wrong_origin, len(blobs), "blobs")
    common = sum(len(b.header.tensors) for b in blobs if b.info.sharding is None)
    result.record("tensors", structure.check_common(blobs, family), common, "tensors")
    if source is not None and checkpoint is not None and model is not None:
        wrong = chain(
            _check_small_files(output, source, manifest, checkpoint),
            _check_groups(manifest, blobs, model.groups),
        )
        result.record("source-files", wrong, len(checkpoint.small_files), "files")
        _account(result, checkpoint, model, {blob.group for blob in blobs})
    if not read_in_order(layout_named(manifest.layout)(dims.quantization)):
        result.check("product").skipped = f"layout {manifest.layout} is read in the plain order"
    # Their data would be read by headers that are not to be trusted.
    of_blobs = {name for name, entry in manifest.files.items() if entry.fingerprint is not None}
    damaged = {finding.file for finding in result.findings if finding.severity == "error"}
    result.unread = sorted(damaged & of_blobs)
    blobs = [blob for blob in blobs if blob.path not in result.unread]
    data = _Data(output, source, manifest, family, result, progress)
    groups = None if model is None else model.groups
    try:
        with ThreadPoolExecutor(workers or _threads()) as pool:
            for name in sorted({blob.group for blob in blobs}):
                here = [blob for blob in blobs if blob.group == name]
                before, start = data.bytes_read, time.perf_counter()
                group = None if groups is None else _group(groups, name)
                for done in pool.map(_make, data.checks(here, group)):
                    result.found(done.findings)
                    result.took(done.tally, "tensors")
                    data.see(name, done)
                took = time.perf_counter() - start
                result.pace.append(Pace(name, data.bytes_read - before, took))
    finally:
        data.close()
    for check in result.checks:
        if check.skipped == _NOT_REACHED and not result.unread:
            check.skipped = "there is nothing of the kind"
    result.bytes_read = data.bytes_read


def _threads() -> int:
    """Two a core, as one waits for the disk while the other computes; each takes 0.15 GiB, so that
    many cores have one."""
    cores = len(os.sched_getaffinity(0))
    return max(cores, min(2 * cores, _MANY))


def _make(check: DataCheck) -> Done:
    done = Done()
    check(done)
    return done


def _found(finding: Finding, done: Done) -> None:
    done.find(finding)


def _account(result: Validation, checkpoint: Checkpoint, model: Model, converted: set[str]) -> None:
    """The ledger, and a finding where bytes are left over. Of a part of a source there is none."""
    if checkpoint.absent:
        result.check("ledger").skipped = "the source lacks shards that its index names"
        return
    result.ledger = ledger(checkpoint, model, converted)
    wrong = [
        Finding(CONFIG_NAME, f"{entry.bytes:,} bytes of the source's shards went nowhere")
        for entry in result.ledger
        if entry.label == UNEXPLAINED
    ]
    result.record("ledger", wrong, sum(entry.bytes for entry in result.ledger), "bytes")


def _check_small_files(
    output: Path, source: Path, manifest: Manifest, checkpoint: Checkpoint
) -> Iterable[Finding]:
    for name, entry in manifest.files.items():
        if entry.fingerprint is None and name not in checkpoint.small_files:
            yield Finding(name, "is not in the source")
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

    def checks(self, blobs: list[Blob], group: Group | None) -> Iterator[DataCheck]:
        """The checks of a group's blobs, to be run at once; `group` is the source's."""
        sources = {} if group is None else {tensor.name: tensor for tensor in group.whole}
        for blob in (blob for blob in blobs if blob.info.sharding is None):
            if group is not None and sources.keys() != blob.header.tensors.keys():
                text = "its tensors are not the source's"
                wrong = Finding(blob.path, text, check="source-files")
                yield partial(_found, wrong)
                continue
            for name in blob.header.tensors:
                self._result.tensors += 1
                yield partial(
                    check_whole, blob, name, self._blobs, self._shards, self._scratch,
                    sources.get(name),
                )  # fmt: skip
        ranks = [
            (blob, rank_slice(self._dims, self._parallelism, blob.info.sharding.rank))
            for blob in blobs
            if blob.info.sharding is not None
        ]
        self._result.tensors += sum(len(blob.header.tensors) for blob, _ in ranks)
        chosen = self._chosen(blobs[0].group)
        for index in chosen:
            owners = [(blob, part) for blob, part in ranks if index in part.experts]
            if owners:
                self._result.experts += len(owners)
                yield partial(self._expert, owners, group, index, index == chosen[0])

    def see(self, group: str, done: Done) -> None:
        """Take what a task saw of a layer's experts up."""
        for layer in layer_numbers([group]) if done.codes else ():
            statistics = self._result.statistics.setdefault(
                layer, LayerStatistics(self._dims.experts, self._dims.quantization)
            )
            statistics.bytes += done.stored
            for expert, counts in done.codes:
                statistics.add_codes(expert, counts)
            for expert, sums in done.scales:
                statistics.add_scales(expert, sums)

    def _chosen(self, group: str) -> list[int]:
        experts, sample = self._dims.experts, self._result.sample
        if sample is None or sample >= experts:
            return [*range(experts)]
        return sorted(Random(f"{self._result.seed} {group}").sample(range(experts), sample))

    def _expert(
        self,
        owners: list[tuple[Blob, RankSlice]],
        group: Group | None,
        index: int,
        witnessed: bool,
        done: Done,
    ) -> None:
        expert = None if group is None else group.experts[index]
        check = ExpertCheck(
            expert, self._layout, self._format, self._dims, self._blobs, self._shards,
            self._scratch,
        )  # fmt: skip
        for blob, part in owners:
            check.check(blob, part, index, self._dims.hidden, done, witnessed)
        if not witnessed or self._format.name not in DECODED:
            return  # both witnesses are slow: one expert a layer
        plain = self._dims.quantization._replace(zero_point=False)
        for words in check.codes:
            with done.looking("library", words.nbytes):
                same = np.array_equal(integers(plain, words), library_codes(plain, words))
            if not same:
                text = "compressed-tensors reads other codes"
                done.find(Finding(owners[0][0].path, text, None, index, "library"))
