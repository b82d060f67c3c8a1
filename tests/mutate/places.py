"""Where a change is, as a finding has to name it."""

import re
from pathlib import Path
from typing import NamedTuple

from kconvert.layouts.blob import read_blob
from kconvert.layouts.checkpoint import SourceTensor
from kconvert.layouts.model import Model
from kconvert.validate.findings import Finding


class Place(NamedTuple):
    """`group`: of the blob that a finding names; `tensor`: what the name of its tensor ends with,
    or of an expert's begins with; `name`: of the tensor that was changed."""

    group: str
    tensor: str
    expert: int | None
    name: str

    def named_by(self, finding: Finding) -> bool:
        tensor = finding.tensor or ""
        right = tensor.endswith(self.tensor) or self.tensor in tensor.rpartition(".")[2]
        return (Path(finding.file).stem, finding.expert) == (self.group, self.expert) and right


def place_in_blob(path: Path, at: int) -> Place:
    """Of a byte of a blob; experts are counted through the ranks of a tp 2, ep 2 output."""
    header, info = read_blob(path)
    tensor = next(t for t in header.tensors.values() if t.start <= at < t.start + t.nbytes)
    expert = None
    if tensor.name in info.expert_digests:
        here = tensor.shape[0]
        expert = info.sharding.rank * here + (at - tensor.start) // (tensor.nbytes // here)
    return Place(path.stem, tensor.name, expert, tensor.name)


def places_in_source(model: Model, shard: str, start: int, end: int) -> frozenset[Place]:
    """Of some bytes of a shard: whole tensors, and parts of experts."""

    def there(tensor: SourceTensor) -> bool:
        begin = tensor.start
        return tensor.shard == shard and begin < end and start < begin + tensor.nbytes

    found = set()
    for group in model.groups.values():
        found |= {Place(group.name, t.name, None, t.name) for t in group.whole if there(t)}
        for index, expert in enumerate(group.experts):
            for tensor in filter(there, expert.tensors):
                down = re.search(r"down|[.]w2[.]", tensor.name)
                found.add(Place(group.name, "w2_" if down else "w13_", index, tensor.name))
    return frozenset(found)
