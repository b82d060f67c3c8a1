"""The data of every blob, and of the source: each byte is read once, group after group."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np

from kconvert.convert.source.comparison import Comparison
from kconvert.convert.source.protocol import Deliveries
from kconvert.layouts.errors import CheckpointError
from kconvert.layouts.families.family import Family
from kconvert.layouts.manifest import Manifest
from kconvert.layouts.model import Group, Model, layer_numbers
from kconvert.layouts.quantization import integers
from kconvert.layouts.reader import Reader, Scratch
from kconvert.layouts.registry import layout_named
from kconvert.layouts.sharding import Parallelism, RankSlice, rank_slice
from kconvert.validate.asked import Asked
from kconvert.validate.content import Done, ExpertCheck, check_whole, in_blob
from kconvert.validate.findings import Check, Finding, Pace, Validation
from kconvert.validate.library import DECODED, library_codes
from kconvert.validate.statistics import LayerStatistics
from kconvert.validate.structure import Blob

DataCheck = Callable[[Done], None]
_AHEAD = 10  # experts that the disk is asked for before their turn, of 50 MB in K2.6
_NOT_REACHED = Check("files").skipped


def look_at_data(
    output: Path,
    manifest: Manifest,
    family: Family,
    blobs: list[Blob],
    compared: Comparison | None,
    model: Model | None,
    asked: Asked,
    result: Validation,
) -> None:
    """Make the checks of the data of `blobs`, whose headers are sound, against the source that is
    `compared`, as `model` reads it. Raises CheckpointError if it lacks what they hold."""
    names = sorted({blob.group for blob in blobs})
    groups = {} if model is None else {name: _group(model.groups, name) for name in names}
    order = [{tensor.shard for tensor in group.tensors} for group in groups.values()]
    with ExitStack() as stack:
        shards = None
        if compared is not None:
            shards = stack.enter_context(compared.deliveries(order, asked.downloaded))
        data = _Data(output, shards, manifest, family, result, asked.progress)
        stack.callback(data.close)
        threads = asked.workers or len(os.sched_getaffinity(0))
        pool = stack.enter_context(ThreadPoolExecutor(threads))
        for i, name in enumerate(names):
            here = [blob for blob in blobs if blob.group == name]
            if shards is not None:
                shards.take(i)
            before, start = data.bytes_read, time.perf_counter()
            for done in pool.map(_make, data.checks(here, groups.get(name))):
                result.found(done.findings)
                result.took(done.tally, "tensors")
                data.see(name, done)
            took = time.perf_counter() - start
            result.pace.append(Pace(name, data.bytes_read - before, took))
            if shards is not None:
                shards.check(i)
                shards.release(i, data.forget)
    for check in result.checks:
        if check.skipped == _NOT_REACHED and not result.unread:
            check.skipped = "there is nothing of the kind"
    result.bytes_read = data.bytes_read


def _make(check: DataCheck) -> Done:
    done = Done()
    check(done)
    return done


def _group(groups: dict[str, Group], name: str) -> Group:
    group = groups.get(name)
    if group is None or group.absent:
        lacking = f" ({', '.join(group.absent)})" if group else ""
        raise CheckpointError(
            f"the source has no {name}{lacking}, the output does: give the source it was made from."
        )
    return group


class _Held(NamedTuple):
    """An expert, and the blobs that hold parts of it."""

    expert: int
    owners: list[tuple[Blob, RankSlice]]


class _Data:
    """The checks of one group after another; counts what is compared."""

    def __init__(
        self,
        output: Path,
        shards: Deliveries | None,
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
        self._shards = Reader(lambda name: shards.path(name) if shards else output / name, progress)

    @property
    def bytes_read(self) -> int:
        """From blobs and shards."""
        return self._blobs.bytes_read + self._shards.bytes_read

    def close(self) -> None:
        """Close all files."""
        self._blobs.close()
        self._shards.close()

    def forget(self, shard: str) -> None:
        """Close a shard that may go."""
        self._shards.forget(shard)

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
        held = [
            _Held(index, owners)
            for index in chosen
            if (owners := [(blob, part) for blob, part in ranks if index in part.experts])
        ]
        for at, expert in enumerate(held):
            self._result.experts += len(expert.owners)
            soon = held[at + _AHEAD : at + _AHEAD + 1]
            yield partial(self._expert, expert, group, at == 0, soon)

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

    def _expect(self, held: _Held, group: Group | None) -> None:
        """Ask for the bytes that the check of this expert will read."""
        for tensor in () if group is None else group.experts[held.expert].kept:
            self._shards.expect(tensor)
        for blob, part in held.owners:
            local = part.experts.index(held.expert)
            for entry in blob.header.tensors.values():
                self._blobs.expect(in_blob(blob.path, entry).part(local))

    def _expert(
        self,
        held: _Held,
        group: Group | None,
        witnessed: bool,
        soon: list[_Held],
        done: Done,
    ) -> None:
        for later in soon:
            self._expect(later, group)
        index, owners = held
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


def _found(finding: Finding, done: Done) -> None:
    done.find(finding)
