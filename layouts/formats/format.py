"""What a quantization format is: which tensors hold a matrix, and how they become plain."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from typing import Any, ClassVar, NamedTuple

from numpy.typing import NDArray

from kconvert.layouts.checkpoint import SourceTensor
from kconvert.layouts.errors import CheckpointError
from kconvert.layouts.experts import Projection
from kconvert.layouts.fields import CONFIG_NAME
from kconvert.layouts.quantization import Quantization, Role

GROUP_SIZES = (32, 64, 128)  # of integer codes
SCALE_DTYPES = ("BF16", "F16", "F32")
Take = Callable[[str, tuple[int, ...], Any], NDArray[Any]]  # reader.Scratch.take


class QuantizedMatrix(NamedTuple):
    """The stored tensors of one quantized [N, K] matrix, by role."""

    code: SourceTensor
    scale: SourceTensor
    dropped: tuple[SourceTensor, ...] = ()  # checked and not kept
    zero_point: SourceTensor | None = None
    bias: SourceTensor | None = None

    @property
    def by_role(self) -> dict[Role, SourceTensor]:
        """What is kept."""
        kept: dict[Role, SourceTensor] = {"code": self.code, "scale": self.scale}
        if self.zero_point is not None:
            kept["zero_point"] = self.zero_point
        if self.bias is not None:
            kept["bias"] = self.bias
        return kept

    @property
    def tensors(self) -> tuple[SourceTensor, ...]:
        """All of them."""
        if self.zero_point is None and self.bias is None:
            return self.code, self.scale, *self.dropped
        return *self.by_role.values(), *self.dropped


class Expert(NamedTuple):
    """A routed expert: gate and up are [intermediate, hidden], down is [hidden, intermediate].
    If gate and up are the same object, one matrix holds the rows of both."""

    gate: QuantizedMatrix
    up: QuantizedMatrix
    down: QuantizedMatrix

    @property
    def stored(self) -> tuple[QuantizedMatrix, ...]:
        """Its matrices as they are stored, each once."""
        gate, up, down = self
        return (gate, down) if up is gate else (gate, up, down)

    @property
    def tensors(self) -> list[SourceTensor]:
        """All of them."""
        return [tensor for matrix in self.stored for tensor in matrix.tensors]

    @property
    def kept(self) -> list[SourceTensor]:
        """Those that are converted, not only checked."""
        return [tensor for matrix in self.stored for tensor in matrix.by_role.values()]


class Kind(NamedTuple):
    """What a tensor must be: of one of these dtypes, and of this shape."""

    dtypes: tuple[str, ...]
    shape: tuple[int, ...]


class Format(ABC):
    """One checkpoint's way to store a matrix [n, k]: as companions called `<base>.<companion>`."""

    name: str  # as configs call it; part of a blob's fingerprint
    quantization: Quantization
    roles: Mapping[str, Role | None]  # companion → what it is; None: checked and dropped
    optional: ClassVar[frozenset[str]] = frozenset()  # companions that may be absent
    fused: ClassVar[bool] = False  # all experts in one tensor, gate and up in one matrix
    groups_axis: ClassVar[int] = 1  # the scales' axis of groups
    restores: ClassVar[bool] = False  # whether it stores the plain bytes, so that export can too
    copies: ClassVar[int] = 1  # of an expert in memory at a time: 2 if `plain` makes one

    @abstractmethod
    def kinds(self, n: int, k: int) -> dict[str, Kind]:
        """Companion → what it must be for a matrix [n, k]."""

    @abstractmethod
    def plain(
        self,
        projection: Projection,
        role: Role,
        tensor: SourceTensor,
        stored: NDArray[Any],
        take: Take,
    ) -> NDArray[Any]:
        """What was read as a plain array (`quantization.py`): a view, or a copy in a buffer from
        `take`.

        Raises CheckpointError naming `tensor` if its data cannot be right.
        """

    @abstractmethod
    def check_dropped(self, tensor: SourceTensor, stored: NDArray[Any], n: int, k: int) -> None:
        """Raise CheckpointError if a dropped companion's data contradicts the rest of its matrix
        [n, k]."""

    def matrix(
        self, tensors: Mapping[str, SourceTensor], base: str, n: int, k: int
    ) -> QuantizedMatrix:
        """The [n, k] matrix stored under `base` ("…gate_proj."), its companions found by name.

        Raises CheckpointError naming file, tensor, expected and found.
        """
        found: dict[Role, SourceTensor] = {}
        dropped = []
        for companion, role, kind in self._wanted(n, k):
            tensor = tensors.get(base + companion)
            if tensor is None:
                if companion in self.optional:
                    continue
                needed = ", ".join(c for c in self.roles if c not in self.optional)
                raise CheckpointError(
                    f"tensor {base}{companion} is in no shard: every quantized matrix needs"
                    f" {needed}."
                )
            if tensor.shape != kind.shape or tensor.dtype not in kind.dtypes:
                raise self._misshapen(tensor, role, kind, k)
            if role is None:
                dropped.append(tensor)
            else:
                found[role] = tensor
        return QuantizedMatrix(
            found["code"], found["scale"], tuple(dropped), found.get("zero_point"),
            found.get("bias"),
        )  # fmt: skip

    def dropped_data(self, companion: str, dtype: str, n: int, k: int) -> bytes:
        """The bytes of a dropped companion of a matrix [n, k], if the format `restores`."""
        raise NotImplementedError

    @cached_property
    def _wanted(self) -> Callable[[int, int], list[tuple[str, Role | None, Kind]]]:
        """Companion, role and kind, kept by shape: a model has two shapes of matrices, and hundreds
        of thousands of tensors."""

        @lru_cache(maxsize=8)
        def wanted(n: int, k: int) -> list[tuple[str, Role | None, Kind]]:
            kinds = self.kinds(n, k)
            return [(companion, role, kinds[companion]) for companion, role in self.roles.items()]

        return wanted

    def _misshapen(
        self, tensor: SourceTensor, role: Role | None, kind: Kind, k: int
    ) -> CheckpointError:
        where = f"{tensor.shard}, tensor {tensor.name}"
        axis, shape = self.groups_axis, tensor.shape
        if role == "scale" and len(shape) == 2 and shape[axis] != kind.shape[axis]:
            return CheckpointError(
                f"{where}: {shape[axis]} scales a row found, {kind.shape[axis]} expected for {k}"
                f" columns and {self.quantization} ({CONFIG_NAME})."
            )
        return CheckpointError(
            f"{where}: expected {' or '.join(kind.dtypes)} {list(kind.shape)}, found"
            f" {tensor.dtype} {list(shape)}."
        )


def groups(quantization: Quantization, k: int) -> int:
    """How many scales a row of k columns has."""
    return len(quantization.groups(range(k)))
