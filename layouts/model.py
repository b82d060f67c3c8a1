"""A checkpoint's tensors sorted by where they belong (each layer, outer, vision) and checked
against its config: what the compiler plans from and the validator compares with."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kconvert.layouts.blob import digest
from kconvert.layouts.checkpoint import Checkpoint, SourceTensor
from kconvert.layouts.errors import CheckpointError, UnsupportedError
from kconvert.layouts.families.agreement import disagreements
from kconvert.layouts.families.family import (
    BUFFER,
    EXPERTS,
    SCHEMES,
    SPELLINGS,
    Family,
    Location,
    projections,
)
from kconvert.layouts.families.known import read_family
from kconvert.layouts.fields import CONFIG_NAME
from kconvert.layouts.formats.format import Expert
from kconvert.layouts.sharding import ModelDims

OUTER, VISION = "outer", "vision"
_WRAPPED = "language_model."


class Identity(NamedTuple):
    """Digests of the source bytes of a group's tensors: the whole ones, and the experts'."""

    whole: str
    experts: str


@dataclass(frozen=True)
class Group:
    """Tensors that are converted together: a layer, or `outer`, or `vision`.

    A group with `absent` shards is known by name only: it has no tensors here.
    """

    name: str
    whole: tuple[SourceTensor, ...]  # not cut; in the order the runtime reads them
    experts: tuple[Expert, ...] = ()
    prefix: str = ""  # what the experts' names begin with, up to `experts.`
    absent: tuple[str, ...] = ()

    @property
    def tensors(self) -> list[SourceTensor]:
        """All of them, the experts' last."""
        return [*self.whole, *(t for expert in self.experts for t in expert.tensors)]

    def read_for(self, expert: int) -> Iterable[SourceTensor]:
        """What is read to have an expert: where its bytes lie."""
        return self.experts[expert].tensors

    def identity(self, contents: Mapping[str, str]) -> Identity:
        """The identity of its tensors' bytes; `contents` has that of each shard."""
        experts = (tensor for expert in self.experts for tensor in expert.tensors)
        return Identity(_identity(self.whole, contents), _identity(experts, contents))

    def digest_of(self, tensor: SourceTensor) -> str | None:
        """The digest that a whole tensor must have, if it is known beforehand."""
        return None


def _identity(tensors: Iterable[SourceTensor], contents: Mapping[str, str]) -> str:
    """The digest of one line for each tensor: its shard's content, and the byte where it begins."""
    return digest("".join(f"{contents[t.shard]}{t.start}\n" for t in tensors).encode())


@dataclass(frozen=True)
class Model:
    """Family and groups of a checkpoint; groups in the order of the layers, then outer, vision."""

    family: Family
    groups: dict[str, Group]
    skipped: tuple[str, ...] = ()  # tensors that nobody reads, as they are computed
    quantized_beside: int = 0  # matrices beside the experts that are quantized too, and stay whole

    @property
    def dims(self) -> ModelDims:
        """What sharding depends on."""
        return self.family.dims


def layer_name(layer: int) -> str:
    """The name of a layer's group, and of its blobs."""
    return f"layer-{layer:05}"


def layer_numbers(names: Iterable[str]) -> list[int]:
    """The layers among some groups' names, sorted."""
    return sorted(number for name in names if (number := layer_number(name)) is not None)


def layer_number(name: str) -> int | None:
    """The layer that a group's name is of; None for `outer` and `vision`."""
    return int(name[-5:]) if name.startswith("layer-") else None


def read_model(checkpoint: Checkpoint) -> Model:
    """Sort and check every tensor of `checkpoint`.

    Raises CheckpointError if tensors are missing or disagree with the config, UnsupportedError
    if a name has no rule or the quantization is not supported.
    """
    family = read_family(checkpoint.config)
    dims = family.dims
    whole: dict[str, list[tuple[int, SourceTensor]]] = defaultdict(list)
    experts: dict[str, set[int]] = defaultdict(set)
    bases: dict[str, str] = {}  # group → what its experts' names begin with
    absent: dict[str, set[str]] = defaultdict(set)
    here: dict[str, int] = defaultdict(int)  # tensors that are present, by group
    layers: set[int] = set()
    stated: dict[str, dict[str, SourceTensor | None]] = defaultdict(dict)
    skipped = []
    for names in (dict.fromkeys(checkpoint.tensors, ""), checkpoint.absent):
        runs, others = _runs_of_experts(names, family)
        for run in runs:
            group = _group_of(run.where)
            layers.add(run.where.layer)
            experts[group] |= run.experts
            bases.setdefault(group, run.base)
            if names is checkpoint.absent:
                absent[group] |= run.shards
                whole.setdefault(group, [])
            else:
                here[group] += run.names
        for name in others:
            where = family.locate(name)
            if where.group == BUFFER:
                skipped.append(name)
                continue
            group = _group_of(where)
            layers.add(where.layer)
            tensor = checkpoint.tensors.get(name)
            if where.group in ("expert", "fused"):
                experts[group].update([where.expert] if where.expert >= 0 else range(dims.experts))
                bases.setdefault(group, name[: name.index(EXPERTS) + len(EXPERTS)])
            else:
                stated[group][name] = tensor
                if tensor is not None:
                    whole[group].append((where.order, tensor))
            if tensor is not None:
                here[group] += 1
            else:
                absent[group].add(checkpoint.absent[name])
                whole.setdefault(group, [])
    layers.discard(-1)  # outer and vision
    _check_scheme(checkpoint, family, experts)
    _check_layers(layers, dims)
    groups = {}
    for name in [*map(layer_name, sorted(layers)), OUTER, VISION]:
        if name not in whole and name not in experts:
            continue
        _check_experts(name, experts.get(name, set()), dims)
        if absent[name]:
            groups[name] = Group(name, (), absent=tuple(sorted(absent[name])))
            continue
        base = bases.get(name, "")
        groups[name] = Group(
            name,
            tuple(tensor for _, tensor in sorted(whole[name], key=_reading_order)),
            tuple(_experts(checkpoint.tensors, base, family)) if name in experts else (),
            base,
        )
    for sorted_group in groups.values():
        if not sorted_group.absent and _placed(sorted_group, family) != here[sorted_group.name]:
            raise _unplaced(checkpoint, family, sorted_group)
    prefix = name_prefix(stated[OUTER])
    for name in [*map(layer_name, sorted(layers)), OUTER]:
        _check_stated(checkpoint, family, name, prefix, stated[name], bases.get(name, ""))
    beside = sum(
        family.format.roles.get(name.rpartition(".")[2]) == "code"
        for tensors in stated.values()
        for name in tensors
    )
    return Model(family, groups, tuple(skipped), beside)


class _Run(NamedTuple):
    """All names of one layer's experts, taken together."""

    base: str  # what they begin with
    where: Location  # of the first
    experts: set[int]
    names: int
    shards: set[str]


def _runs_of_experts(names: Mapping[str, str], family: Family) -> tuple[list[_Run], list[str]]:
    """The experts among `names` (tensor → shard), layer by layer, and the names of all others.

    Nearly all names are experts', and their ends are the same in most layers: such a layer is
    checked as one. If a single name is odd, all names of its layer go to the others.
    """
    by_prefix: dict[str, tuple[list[str], set[str]]] = defaultdict(lambda: ([], set()))
    runs, others = [], []
    prefix = ""
    for name, shard in names.items():
        if not prefix or not name.startswith(prefix):  # most begin as the one before
            base, found, _ = name.partition(EXPERTS)
            if not found:
                others.append(name)
                continue
            prefix = base + found
            ends, shards = by_prefix[prefix]
        ends.append(name[len(prefix) :])
        shards.add(shard)
    numbers = {str(expert): expert for expert in range(family.dims.experts)}
    members = _members(family)
    alike: frozenset[str] = frozenset()
    experts: set[int] = set()
    for prefix, (ends, shards) in by_prefix.items():
        where = family.locate(prefix + ends[0])
        known = len(ends) == len(alike) and alike.issuperset(ends)
        if not known:
            parts = [end.partition(".") for end in ends]
            known = all(number in numbers and member in members for number, _, member in parts)
            if known:
                alike, experts = frozenset(ends), {numbers[number] for number, _, _ in parts}
        if where.group != "expert" or not known:
            others += [prefix + end for end in ends]
            continue
        runs.append(_Run(prefix, where, experts, len(ends), shards))
    return runs, others


def _members(family: Family) -> set[str]:
    """What may follow an expert's number in its tensors' names."""
    if family.format.fused:
        return set()
    called = {name for names in SPELLINGS.values() for name in names}
    return {f"{name}.{companion}" for name in called for companion in family.format.roles}


def name_prefix(outer: Collection[str]) -> str:
    """What the model's names begin with, as its outer tensors show: a wrapper's `language_model.`,
    or nothing."""
    return _WRAPPED if any(name.startswith(_WRAPPED) for name in outer) else ""


def _check_stated(
    checkpoint: Checkpoint,
    family: Family,
    group: str,
    prefix: str,
    tensors: dict[str, SourceTensor | None],
    experts: str,
) -> None:
    """Raise CheckpointError for the first tensor of a group that config.json does not fit."""
    layer = layer_number(group)
    found = next(disagreements(family, layer, prefix, tensors, experts), None)
    if found is None:
        return
    shard, tensor = checkpoint.unindexed.get(found.tensor), tensors.get(found.tensor)
    where = f"{tensor.shard}, " if tensor else ""
    more = f"; it lies in {shard}, which the index does not say" if shard else ""
    raise CheckpointError(f"{where}tensor {found.tensor} {found.text}{more}.")


def _placed(group: Group, family: Family) -> int:
    """How many tensors of the checkpoint a group is made of."""
    if not (family.format.fused and group.experts):
        return len(group.tensors)
    return len(group.whole) + len(group.experts[0].tensors)


def _unplaced(checkpoint: Checkpoint, family: Family, group: Group) -> CheckpointError:
    """The error for a tensor whose place in its group another one has taken."""
    placed = {tensor.name.partition("[")[0] for tensor in group.tensors}
    name = next(
        name
        for name in checkpoint.tensors
        if name not in placed and _group_of(family.locate(name)) == group.name
    )
    return CheckpointError(
        f"{checkpoint.tensors[name].shard}, tensor {name}: {group.name} has another tensor in its"
        " place; one of the two would be lost."
    )


def _group_of(where: Location) -> str:
    return layer_name(where.layer) if where.layer >= 0 else where.group


def _reading_order(item: tuple[int, SourceTensor]) -> tuple[int, str]:
    """By name if nothing else is known: the output must not depend on the source's order."""
    order, tensor = item
    return order, tensor.name


def _experts(tensors: Mapping[str, SourceTensor], base: str, family: Family) -> Iterable[Expert]:
    """A layer's experts; `base` is what their names begin with, up to `experts.`"""
    n, k, format = family.dims.intermediate, family.dims.hidden, family.format
    if format.fused:
        yield from _fused_experts(tensors, base, family)
        return
    for expert in range(family.dims.experts):
        gate, up, down = (f"{base}{expert}.{name}." for name in projections(base))
        yield Expert(
            format.matrix(tensors, gate, n, k),
            format.matrix(tensors, up, n, k),
            format.matrix(tensors, down, k, n),
        )


def _fused_experts(
    tensors: Mapping[str, SourceTensor], base: str, family: Family
) -> Iterable[Expert]:
    """Experts that all lie in one tensor, gate and up in one matrix: each is a part of it."""
    dims, format = family.dims, family.format
    shapes = {
        "gate_up_proj": (2 * dims.intermediate, dims.hidden),
        "down_proj": (dims.hidden, dims.intermediate),
    }
    for projection in shapes:
        for companion in format.roles:
            tensor = tensors.get(f"{base}{projection}{companion}")
            if tensor is not None and (not tensor.shape or tensor.shape[0] != dims.experts):
                raise CheckpointError(
                    f"{tensor.shard}, tensor {tensor.name}: {list(tensor.shape)} found,"
                    f" {dims.experts} experts expected ({CONFIG_NAME})."
                )
    for expert in range(dims.experts):
        parts = {
            name: tensor.part(expert)._replace(name=f"{name}[{expert}]")
            for projection in shapes
            for companion in format.roles
            if (tensor := tensors.get(name := f"{base}{projection}{companion}")) is not None
        }
        gate_up, down = (
            format.matrix(parts, f"{base}{projection}", *shape)
            for projection, shape in shapes.items()
        )
        yield Expert(gate_up, gate_up, down)


def _check_scheme(checkpoint: Checkpoint, family: Family, experts: Mapping[str, set[int]]) -> None:
    """If the architecture is not known, the experts must be."""
    if experts or family.dims.dense is not None:
        return
    names = [*checkpoint.tensors, *checkpoint.absent]
    found = [name for name in names if "expert" in name] or names
    raise UnsupportedError(
        f"{CONFIG_NAME}: the architecture is not known, and no tensor has the name of an expert"
        f" that can be converted ({SCHEMES}); found {', '.join(found[:3])}."
    )


def _check_layers(layers: set[int], dims: ModelDims) -> None:
    missing = sorted(set(range(dims.layers)) - layers)
    surplus = sorted(layers - set(range(dims.layers + dims.mtp_layers)))
    if missing:
        raise CheckpointError(
            f"the checkpoint has no tensors of layer(s) {ranges(missing)}, config.json says"
            f" num_hidden_layers {dims.layers}."
        )
    if surplus:
        raise CheckpointError(
            f"the checkpoint has layer(s) {ranges(surplus)}, config.json says num_hidden_layers"
            f" {dims.layers} and num_nextn_predict_layers {dims.mtp_layers}."
        )


def _check_experts(group: str, found: set[int], dims: ModelDims) -> None:
    layer = layer_number(group)
    is_moe = False if layer is None else dims.is_moe(layer)
    if is_moe is None:  # if there are some, there are all
        is_moe = bool(found)
    expected = dims.experts if is_moe else 0
    if len(found) == expected and max(found, default=-1) == expected - 1:
        return
    raise CheckpointError(
        f"{group} has {len(found)} routed experts ({ranges(sorted(found))}), config.json says"
        f" {expected} there (number of experts, dense layers)."
    )


def groups_text(names: Iterable[str]) -> str:
    """Names of groups for a person: layers 0-3,60, outer, vision."""
    names = list(names)
    layers = layer_numbers(names)
    others = [name for name in names if not name.startswith("layer-")]
    return ", ".join([f"layers {ranges(layers)}"] * bool(layers) + others)


def ranges(numbers: Iterable[int]) -> str:
    """Sorted numbers as a user writes them: 0-3,60; "none" if there are none."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in spans) or "none"
