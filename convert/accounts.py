"""The plan's accounts: every source tensor goes to one place, with every byte."""

from collections.abc import Iterable
from operator import attrgetter

from kconvert.convert.plan import Plan
from kconvert.layouts.errors import KconvertError
from kconvert.layouts.experts import StackedTensor, stacked_tensors
from kconvert.layouts.formats.format import Expert
from kconvert.layouts.header import DTYPE_BYTES

_PLACE = attrgetter("shard", "start", "name")


def check_accounts(plan: Plan) -> None:
    """Raise KconvertError unless every source tensor goes to one place, with every byte.

    If all ranks of a group are planned, the bytes written are the bytes read, less what is checked
    and dropped (weight_shape), plus what every rank that shares an expert needs whole.
    """
    seen: set[tuple[str, int, str]] = set()
    moe_tp, quantization = plan.target.parallelism.moe_tp, plan.dims.quantization
    for job in plan.jobs:
        places = list(map(_PLACE, job.source_tensors))
        if len(set(places)) < len(places) or not seen.isdisjoint(places):
            raise KconvertError(f"{job.group.name}: a tensor is planned twice; this is a bug.")
        seen.update(places)
        ranks = [file for file in job.files if file.rank_slice is not None]
        if len(ranks) not in (0, plan.target.parallelism.tp):
            continue
        whole = job.group.whole if any(file.copied for file in job.files) else ()
        read = sum(tensor.nbytes for tensor in whole)
        experts = [job.group.experts[e] for e in job.experts]
        for stacked in stacked_tensors(quantization):
            copies = stacked.copies(quantization, moe_tp)
            read += copies * _stored_bytes(experts, stacked, plan.target.scale_dtype)
        written = sum(tensor.blob.nbytes for file in job.files for tensor in file.tensors)
        if read != written:
            raise KconvertError(
                f"{job.group.name}: {read:,} bytes are read and {written:,} planned to be written;"
                " this is a bug."
            )


def _stored_bytes(
    experts: Iterable[Expert], stacked: StackedTensor, scale_dtype: str | None
) -> int:
    """Bytes that experts contribute to a stacked tensor, cast if that is asked for."""
    nbytes, cast = 0, scale_dtype if stacked.role == "scale" else None
    for expert in experts:
        fused = expert.up is expert.gate  # one matrix gives both
        for projection in stacked.projections[:1] if fused else stacked.projections:
            source = getattr(getattr(expert, projection), stacked.role)
            if cast is None:
                nbytes += source.nbytes
            else:
                nbytes += source.nbytes // DTYPE_BYTES[source.dtype] * DTYPE_BYTES[cast]
    return nbytes
