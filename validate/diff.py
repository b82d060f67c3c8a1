"""Two models compared by what they mean: outputs or checkpoints, whatever their layout, parallelism
and shards. Both are read once, expert by expert and tensor by tensor."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kconvert.layouts.blob import new_digest
from kconvert.layouts.checkpoint import Checkpoint, SourceTensor, read_checkpoint
from kconvert.layouts.experts import PROJECTIONS, Projection
from kconvert.layouts.header import DTYPE_BYTES
from kconvert.layouts.manifest import MANIFEST_NAME
from kconvert.layouts.model import Group, Model, read_model
from kconvert.layouts.quantization import Role
from kconvert.layouts.reader import CHUNK_BYTES, NUMPY_BITS, Reader, Scratch
from kconvert.layouts.scan import widened
from kconvert.layouts.stored.checkpoint import StoredGroup, read_stored
from kconvert.layouts.stored.expert import StoredExpert, refuse_changed

_Plain = dict[tuple[Projection, Role], NDArray[Any]]


class Difference(NamedTuple):
    """One thing that differs: `changed` of `total` elements (codes, scales, values of a tensor), or
    0 of 0 if that cannot be counted, and `text` says what differs."""

    group: str
    what: str  # "codes", "scales", "zero points", "biases", a tensor's name, a file's
    expert: int | None = None
    changed: int = 0
    total: int = 0
    text: str = ""


@dataclass
class Diff:
    """The outcome: what was compared, and every difference. `equal` means that there is none."""

    a: str
    b: str
    a_is: str = ""  # what each is, in words
    b_is: str = ""
    groups: int = 0
    tensors: int = 0  # whole ones
    experts: int = 0
    compared: dict[str, int] = field(default_factory=dict)  # group → experts of it
    bytes_read: int = 0
    seconds: float = 0.0
    differences: list[Difference] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def sums(self) -> dict[str, "Sums"]:
        """The differences of experts, group by group."""
        found: dict[str, Sums] = {}
        for group, what, expert, changed, total, _ in self.differences:
            if expert is not None:
                here = found.setdefault(group, Sums(set(), {}))
                here.experts.add(expert)
                before = here.counts.get(what, (0, 0))
                here.counts[what] = before[0] + changed, before[1] + total
        return found


class Sums(NamedTuple):
    """Which experts of a group differ, and how much."""

    experts: set[int]
    counts: dict[str, tuple[int, int]]  # codes, scales …: how many changed, and of how many


class _Side:
    """One of the two models, opened. Each thread holds what it read last."""

    def __init__(self, folder: Path, progress: Callable[[int], None]) -> None:
        self.folder = folder
        self.checkpoint: Checkpoint
        self.model: Model
        if (folder / MANIFEST_NAME).exists():
            output, self.checkpoint, self.model, *_ = read_stored(folder)
            m = output.manifest
            origin = f" of {m.repo} at {m.commit}" if m.repo else ""
            self.kind = f"converted: {m.layout}, tp {m.tp}, ep {m.ep}{origin}"
        else:
            self.checkpoint = read_checkpoint(folder)
            self.model = read_model(self.checkpoint)
            shards = len(self.checkpoint.shards)
            self.kind = f"a checkpoint of {shards} shard{'' if shards == 1 else 's'}"
        self.reader = Reader(lambda name: folder / name, progress)
        self._scratch = Scratch()

    def stored(self, group: Group, index: int) -> StoredExpert | None:
        """An expert as it lies in blobs, its digests compared; None for a checkpoint's."""
        if not isinstance(group, StoredGroup):
            return None
        expert = StoredExpert(group, index, self.reader, self._scratch)
        expert.check()
        return expert

    def plain(self, group: Group, index: int) -> _Plain:
        """The plain arrays of a checkpoint's expert."""
        expert, format, take = group.experts[index], self.model.family.format, self._scratch.take
        read = {
            tensor: take(f"source {i}", tensor.shape, NUMPY_BITS[tensor.dtype])
            for i, tensor in enumerate(expert.kept)
        }
        self.reader.read_together(read.items())
        return {
            (projection, role): format.plain(projection, role, tensor, read[tensor], take)
            for projection, matrix in zip(PROJECTIONS, expert, strict=True)
            for role, tensor in matrix.by_role.items()
        }

    def chunks(self, group: Group, tensor: SourceTensor) -> Iterator[memoryview]:
        """A whole tensor's bytes; at the end its digest is compared, if it has one."""
        state = new_digest()
        for chunk in self.reader.chunks(tensor, self._scratch.take("c", (CHUNK_BYTES,), np.uint8)):
            state.update(chunk)
            yield chunk
        refuse_changed(self.reader, tensor, state.hexdigest(), group.digest_of(tensor))


def diff(
    a: str | Path,
    b: str | Path,
    workers: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Diff:
    """Compare two models, each a checkpoint's folder or a converted one.

    Names of shards do not matter, nor layout, tp and ep of blobs: tensors are compared by name, and
    experts by their codes, scales, zero points and biases. Raises what reading either does:
    OutputError, CheckpointError (also if a blob was changed), UnsupportedError.
    """
    begin = time.perf_counter()
    one, other = _Side(Path(a), progress), _Side(Path(b), progress)
    result = Diff(str(a), str(b), one.kind, other.kind)
    try:
        result.differences += _compare_files(one, other)
        with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
            for name in dict.fromkeys((*one.model.groups, *other.model.groups)):
                here = [side.model.groups.get(name) for side in (one, other)]
                if here[0] is None or here[1] is None or here[0].absent or here[1].absent:
                    lacking = next(
                        side for side, group in zip((one, other), here, strict=True)
                        if group is None or group.absent
                    )  # fmt: skip
                    result.differences.append(
                        Difference(name, name, text=f"is not in {lacking.folder}")
                    )
                    continue
                tasks = list(_tasks(result, one, other, here[0], here[1]))
                for found in pool.map(lambda task: list(task()), tasks):
                    result.differences += found
    finally:
        for side in (one, other):
            side.reader.close()
    result.bytes_read = one.reader.bytes_read + other.reader.bytes_read
    result.seconds = time.perf_counter() - begin
    return result


def _compare_files(one: _Side, other: _Side) -> Iterator[Difference]:
    """Small files, config.json among them."""
    names = dict.fromkeys((*one.checkpoint.small_files, *other.checkpoint.small_files))
    for name in names:
        contents = [
            (side.folder / name).read_bytes() if name in side.checkpoint.small_files else None
            for side in (one, other)
        ]
        if None in contents:
            lacking = (one, other)[contents.index(None)]
            yield Difference("files", name, text=f"is not in {lacking.folder}")
        elif contents[0] != contents[1]:
            yield Difference("files", name, text="differs")


def _tasks(
    result: Diff, one: _Side, other: _Side, a: Group, b: Group
) -> Iterator[Callable[[], Iterator[Difference]]]:
    result.groups += 1
    whole = [{tensor.name: tensor for tensor in group.whole} for group in (a, b)]
    for name in dict.fromkeys((*whole[0], *whole[1])):
        if name in whole[0] and name in whole[1]:
            result.tensors += 1
            yield partial(_compare_whole, one, other, a, b, whole[0][name], whole[1][name])
        else:
            lacking = other if name in whole[0] else one
            missing = Difference(a.name, name, text=f"is not in {lacking.folder}")
            yield partial(iter, [missing])
    sizes = [(len(g.experts), s.model.dims.hidden, s.model.dims.intermediate,
              s.model.dims.quantization) for g, s in ((a, one), (b, other))]  # fmt: skip
    if not (a.experts or b.experts):
        return
    if sizes[0] != sizes[1]:
        text = " against ".join(
            f"{count} experts of {hidden} × {intermediate} in {q.text}"
            for count, hidden, intermediate, q in sizes
        )
        yield partial(iter, [Difference(a.name, "experts", text=text)])
        return
    result.compared[a.name] = len(a.experts)
    for index in range(len(a.experts)):
        result.experts += 1
        yield partial(_compare_expert, one, other, a, b, index)


def _compare_whole(
    one: _Side, other: _Side, a: Group, b: Group, mine: SourceTensor, theirs: SourceTensor
) -> Iterator[Difference]:
    if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
        text = f"{mine.dtype} {list(mine.shape)} against {theirs.dtype} {list(theirs.shape)}"
        yield Difference(a.name, mine.name, text=text)
        return
    width, changed = DTYPE_BYTES[mine.dtype], 0
    for left, right in zip(one.chunks(a, mine), other.chunks(b, theirs), strict=True):
        x, y = np.frombuffer(left, np.uint8), np.frombuffer(right, np.uint8)
        if not np.array_equal(x, y):
            changed += int((x != y).reshape(-1, width).any(1).sum())
    if changed:
        yield Difference(a.name, mine.name, None, changed, mine.nbytes // width)


_CALLED: dict[Role, str] = {
    "code": "codes", "scale": "scales", "zero_point": "zero points", "bias": "biases",
}  # fmt: skip


def _compare_expert(
    one: _Side, other: _Side, a: Group, b: Group, index: int
) -> Iterator[Difference]:
    stored = one.stored(a, index), other.stored(b, index)
    if stored[0] and stored[1] and stored[0].lies_as(stored[1]):
        return
    mine, theirs = (
        expert.plain() if expert else side.plain(group, index)
        for expert, side, group in zip(stored, (one, other), (a, b), strict=True)
    )
    quantization = one.model.dims.quantization
    dtypes = [_scale_dtype(group, index) for group in (a, b)]
    for role in quantization.roles:
        bits = {"code": quantization.bits, "zero_point": 4}.get(role)
        changed = total = 0
        for projection in PROJECTIONS:
            x, y = mine[projection, role], theirs[projection, role]
            if role == "scale" and dtypes[0] != dtypes[1]:
                x, y = _floats(x, dtypes[0]), _floats(y, dtypes[1])
            total += x.size * (32 // bits if bits else 1)
            if not np.array_equal(x, y):
                changed += _changed(x, y, bits)
        if changed:
            yield Difference(a.name, _CALLED[role], index, changed, total)


def _scale_dtype(group: Group, index: int) -> str:
    """The dtype of an expert's scales as they lie there: an output's may have been cast."""
    if isinstance(group, StoredGroup):
        return next(p.place.dtype for p in group.parts(index) if p.stacked.role == "scale")
    return group.experts[index].gate.scale.dtype


def _floats(bits: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The values of scales given as their bits; MXFP4's bytes as they are, whatever their dtype is
    called."""
    return bits if bits.dtype == np.uint8 else widened(bits, dtype)


def _changed(x: NDArray[Any], y: NDArray[Any], bits: int | None) -> int:
    """How many elements differ; `bits`: of an element, if they are packed into int32 words."""
    if bits is None:
        return int((x != y).sum())
    other = x.view(np.uint32) ^ y.view(np.uint32)
    shift = 1
    while shift < bits:  # any set bit of a field sets its lowest
        other = other | other >> np.uint32(shift)
        shift *= 2
    lowest = np.uint32(0xFFFFFFFF // ((1 << bits) - 1))
    return int(np.bitwise_count(other & lowest).sum())
