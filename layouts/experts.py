"""The stacked tensors of a layer's routed experts, stated once: names, and what each is made of.

The plan lays them out, the compiler fills them, the validator compares them with the source, the
engine and the kernels read them: all ask here. Matrices of an expert are `gate` and `up`, both
[intermediate, hidden], and `down` [hidden, intermediate]; a family says how its tensors are called.
"""

from typing import Literal, NamedTuple

from kconvert.layouts.quantization import Quantization, Role

Projection = Literal["gate", "up", "down"]
Matrix = Literal["w13", "w2"]
W13_ROWS = "gate_up"  # as a blob says it: all rows of gate, then all of up


class Part(NamedTuple):
    """What one source matrix gives to a stacked tensor, of every expert alike."""

    projection: Projection
    rows: range  # of the source matrix
    columns: range
    at: int  # the row of the stacked matrix where they begin


class Cut(NamedTuple):
    """A stacked tensor as a rank holds it: of each expert a matrix [n, k] made of `parts`."""

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
        """What a rank holds that has the part `intermediate` of every expert."""
        whole = range(hidden)
        rows, columns = (intermediate, whole) if self.axis == "rows" else (whole, intermediate)
        parts = tuple(
            Part(projection, rows, columns, i * len(rows))
            for i, projection in enumerate(self.projections)
        )
        return Cut(self, len(parts) * len(rows), len(columns), parts)

    def copies(self, quantization: Quantization, moe_tp: int) -> int:
        """On how many of the `moe_tp` ranks that share an expert the same bytes lie: channelwise
        scales have no columns to cut."""
        whole = self.role == "scale" and self.axis == "columns" and not quantization.group_size
        return moe_tp if whole else 1


_W13: tuple[Projection, ...] = ("gate", "up")
_W2: tuple[Projection, ...] = ("down",)
# In the order a forward pass reads them.
STACKED = (
    StackedTensor("w13", "code", "w13_weight_packed", _W13, "rows"),
    StackedTensor("w13", "scale", "w13_weight_scale", _W13, "rows"),
    StackedTensor("w2", "code", "w2_weight_packed", _W2, "columns"),
    StackedTensor("w2", "scale", "w2_weight_scale", _W2, "columns"),
)
_BY_NAME = {tensor.name: tensor for tensor in STACKED}


def stacked(matrix: Matrix, role: Role) -> StackedTensor:
    """The tensor that holds this of this matrix."""
    return next(tensor for tensor in STACKED if (tensor.matrix, tensor.role) == (matrix, role))


def stacked_by_name(name: str) -> StackedTensor:
    """The tensor called `name` in a blob; KeyError where a rank's blob has none such."""
    return _BY_NAME[name.rpartition(".")[2]]
