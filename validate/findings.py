"""What a check found: each finding names its file, and the tensor and expert where there is one."""

from dataclasses import dataclass, field
from typing import NamedTuple

from kconvert.layouts.errors import one_line


class Finding(NamedTuple):
    """One difference. `expert` is the model's number of it, not the rank's."""

    file: str
    text: str
    tensor: str | None = None
    expert: int | None = None

    def __str__(self) -> str:
        tensor = f", tensor {self.tensor}" if self.tensor else ""
        expert = f", expert {self.expert}" if self.expert is not None else ""
        return one_line(f"{self.file}{tensor}{expert}: {self.text}")


@dataclass
class Validation:
    """The outcome: what was compared, and every difference. `ok` means that there is none."""

    complete: bool  # what the manifest says of the output
    against_source: bool
    sample: int | None  # so many experts a layer were read; None: all
    files: int = 0
    tensors: int = 0
    experts: int = 0  # an expert counts once for every rank that holds a part of it
    bytes_read: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no check found a difference."""
        return not self.findings
