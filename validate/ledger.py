"""Where every byte of the source went. Pure."""

from collections import defaultdict
from collections.abc import Iterator, Mapping

from kconvert.layouts.checkpoint import Checkpoint
from kconvert.layouts.model import Group, Model
from kconvert.validate.findings import Entry

_ROLES = {"code": "codes, packed", "scale": "scales", "zero_point": "zero points",
          "bias": "biases"}  # fmt: skip
UNEXPLAINED = "unexplained"
VERBATIM, DROPPED = "tensors that are not cut", "companions that follow from shapes, dropped"


def ledger(checkpoint: Checkpoint, model: Model, converted: set[str]) -> list[Entry]:
    """The bytes of the source's shards by what became of them; `converted`: the groups that the
    output holds. If nothing accounts for some bytes, they are the last entry."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for label, nbytes in _accounts(model.groups, converted):
        sums[label][0] += nbytes
        sums[label][1] += 1
    for name in model.skipped:
        if name in checkpoint.tensors:
            sums["buffers that are computed"][0] += checkpoint.tensors[name].nbytes
            sums["buffers that are computed"][1] += 1
    entries = [Entry(label, nbytes, count) for label, (nbytes, count) in sums.items()]
    total = sum(shard.size - shard.data_start for shard in checkpoint.shards.values())
    rest = total - sum(entry.bytes for entry in entries)
    if checkpoint.unindexed:
        entries.append(
            Entry("tensors that the index does not name", rest, len(checkpoint.unindexed))
        )
    elif rest:
        entries.append(Entry(UNEXPLAINED, rest, 0))
    return entries


def _accounts(groups: Mapping[str, Group], converted: set[str]) -> Iterator[tuple[str, int]]:
    for name, group in groups.items():
        if name not in converted:
            yield from (("not in this output", tensor.nbytes) for tensor in group.tensors)
            continue
        yield from ((VERBATIM, tensor.nbytes) for tensor in group.whole)
        for expert in group.experts:
            for matrix in expert.stored:
                yield from ((_ROLES[role], t.nbytes) for role, t in matrix.by_role.items())
                yield from ((DROPPED, tensor.nbytes) for tensor in matrix.dropped)
