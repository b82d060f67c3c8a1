"""The stacked tensors of a layer's routed experts: their names, and what each is made from.

The plan lays them out, the compiler fills them, the validator compares them with the source, the
engine and the kernels read them: all ask here. An expert's matrices are `gate` and `up`, both
[intermediate, hidden], and `down` [hidden, intermediate]; a family says what they are called.
"""

from typing import Literal, NamedTuple

from kconvert.layouts.quantization import Quantization, Role

Projection = Literal["gate", "up", "down"]
PROJECTIONS: tuple[Projection, ...] = ("gate", "up", "down")
Matrix = Literal["w13", "w2"]
W13_ROWS = "gate_up"  # as a blob says it: all rows of gate, then all of up


class Part(NamedTuple):
    """What one source matrix of each expert contributes to a stacked tensor."""

    projection: Projection
    rows: range  # of the source matrix
    columns: range
    at: int  # the stacked matrix's row where they begin


class Cut(NamedTuple):
    """A stacked tensor as a rank holds it: for each expert a matrix [n, k] made from `parts`."""

    tensor: "StackedTensor"
    n: int
    k: int
    parts: tuple[Part, ...]

    @property
    def intermediate(self) -> range:
        """The part of every expert that the rank has."""
        rows, columns = self.parts[0].rows, self.parts[0].columns
        return rows if self.tensor.axis == "rows" else columns


class StackedTensor(NamedTuple):
    """One tensor of a rank's blob: the same matrix of all local experts, one behind the other."""

    matrix: Matrix
    role: Role
    name: str  # behind `…mlp.experts.`
    projections: tuple[Projection, ...]  # the source matrices, stacked by rows in this order
    axis: Literal["rows", "columns"]  # of the source matrices: what tensor parallelism cuts

    def cut(self, intermediate: range, hidden: int) -> Cut:
        """What a rank holds if it has the part `intermediate` of every expert."""
        whole = range(hidden)
        rows, columns = (intermediate, whole) if self.axis == "rows" else (whole, intermediate)
        parts = tuple(
            Part(projection, rows, columns, i * len(rows))
            for i, projection in enumerate(self.projections)
        )
        return Cut(self, len(parts) * len(rows), len(columns), parts)

    def copies(self, quantization: Quantization, moe_tp: int) -> int:
        """How many of the `moe_tp` ranks that share an expert hold the same bytes: channelwise
        scales and zero points have no columns to cut, and neither has a bias."""
        if self.axis == "rows" or self.role == "code":
            return 1
        return moe_tp if self.role == "bias" or not quantization.group_size else 1


_W13: tuple[Projection, ...] = ("gate", "up")
_W2: tuple[Projection, ...] = ("down",)
# In the order a forward pass reads them.
_ALL = (
    StackedTensor("w13", "code", "w13_weight_packed", _W13, "rows"),
    StackedTensor("w13", "scale", "w13_weight_scale", _W13, "rows"),
    StackedTensor("w13", "zero_point", "w13_weight_zero_point", _W13, "rows"),
    StackedTensor("w13", "bias", "w13_bias", _W13, "rows"),
    StackedTensor("w2", "code", "w2_weight_packed", _W2, "columns"),
    StackedTensor("w2", "scale", "w2_weight_scale", _W2, "columns"),
    StackedTensor("w2", "zero_point", "w2_weight_zero_point", _W2, "columns"),
    StackedTensor("w2", "bias", "w2_bias", _W2, "columns"),
)
_BY_NAME = {tensor.name: tensor for tensor in _ALL}


def stacked_tensors(quantization: Quantization) -> tuple[StackedTensor, ...]:
    """The stacked tensors of a layer whose experts have this quantization."""
    return tuple(tensor for tensor in _ALL if tensor.role in quantization.roles)


STACKED = stacked_tensors(Quantization(None))  # for symmetric codes, which the engines here read


def stacked(matrix: Matrix, role: Role) -> StackedTensor:
    """The stacked tensor with the `role` of `matrix`."""
    return next(tensor for tensor in _ALL if (tensor.matrix, tensor.role) == (matrix, role))


def stacked_by_name(name: str) -> StackedTensor:
    """The tensor called `name` in a blob; KeyError if ranks' blobs have no such tensor."""
    return _BY_NAME[name.rpartition(".")[2]]
