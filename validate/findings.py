"""What a validation records, as plain data: its checks, what they found, the ledger, statistics.

Everything that is shown (a line, JSON, the report) is made from this and nothing else.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from kconvert.layouts.errors import one_line

if TYPE_CHECKING:
    from kconvert.validate.statistics import LayerStatistics

# What is looked at, and what it is compared with. Ids are published (schema/1.json): none is ever
# given another meaning.
CHECKS = {
    "files": ("every file's size, small files' bytes, files that do not belong", "the manifest"),
    "coverage": ("the blobs that the manifest names", "the layers and ranks of config.json"),
    "alignment": ("where blobs' data and its tensors of whole pages begin",
                  "multiples of 4,096 bytes"),
    "provenance": ("the repository and commit that every blob names", "the manifest's"),
    "headers": ("digests, places, shapes and dtypes in the blobs' headers",
                "the manifest and config.json"),
    "tensors": ("the tensors that are not cut, by name, shape and dtype", "config.json"),
    "source-files": ("small files and groups of tensors", "the source's"),
    "ledger": ("every byte of the source's shards", "what became of it"),
    "product": ("numbers times one expert a layer, read in the kernels' order",
                "the same times what the layout's inverse unpacks"),
    "digests": ("the bytes of every tensor and every expert", "the digests in the headers"),
    "finite": ("scales", "NaN and infinity"),
    "common": ("the tensors that are not cut", "the source's, byte for byte"),
    "codes": ("codes, unpacked by the layout's inverse", "the source's, bit for bit"),
    "scales": ("scales, unpacked by the layout's inverse", "the source's, bit for bit"),
    "zero-points": ("zero points, unpacked by the layout's inverse", "the source's, bit for bit"),
    "biases": ("biases", "the source's, bit for bit"),
    "library": ("one expert's codes a layer", "compressed-tensors' own decoding"),
}  # fmt: skip
OF_SOURCE = ("source-files", "ledger", "common", "codes", "scales", "zero-points", "biases",
             "library")  # fmt: skip
ROLE_CHECKS = {"code": "codes", "scale": "scales", "zero_point": "zero-points", "bias": "biases"}


Severity = Literal["error", "warning"]


class Place(NamedTuple):
    """Where a matrix in plain order, as a rank holds it, differs from the source's. `expected` and
    `found` are as stored: a code, or a float's bits. The values are what they mean: a code's
    without its scale, None if that depends on a zero point or is not finite."""

    row: int
    column: int | None  # for scales and zero points a group; None for a bias
    expected: int
    found: int
    expected_value: float | None
    found_value: float | None


class Finding(NamedTuple):
    """One difference. `expert` is counted in the model, not on the rank; `severity` warning: what
    an engine loads is not wrong."""

    file: str
    text: str
    tensor: str | None = None
    expert: int | None = None
    check: str = ""  # of CHECKS
    severity: Severity = "error"
    places: tuple[Place, ...] = ()  # the first that differ
    differing: int | None = None  # how many do, if they were counted

    @property
    def id(self) -> str:
        """An id that is the same in every run that finds the same."""
        where = (self.file, self.tensor, self.expert)
        return ":".join([self.check, *(str(part) for part in where if part is not None)])

    def table(self) -> dict[str, Any]:
        """For --json."""
        places = [place._asdict() for place in self.places]
        return {"id": self.id, **self._asdict(), "places": places, "sentence": str(self)}

    def __str__(self) -> str:
        tensor = f", tensor {self.tensor}" if self.tensor else ""
        expert = f", expert {self.expert}" if self.expert is not None else ""
        return one_line(f"{self.file}{tensor}{expert}: {self.text}")


@dataclass
class Check:
    """One check: whether it passed, and how much was looked at."""

    id: str
    amount: int = 0  # files, tensors, experts' parts or bytes
    unit: str = ""
    bytes: int = 0  # of what was looked at and what it was compared with
    seconds: float = 0.0  # of all threads together
    findings: int = 0
    skipped: str = "not reached"  # why it was not made; empty: it was

    @property
    def outcome(self) -> Literal["passed", "failed", "skipped"]:
        """`skipped`: nothing was compared."""
        return "failed" if self.findings else "skipped" if self.skipped else "passed"

    def table(self) -> dict[str, Any]:
        """For --json."""
        looked_at, against = CHECKS[self.id]
        return {**vars(self), "outcome": self.outcome, "what": looked_at, "against": against}


class Entry(NamedTuple):
    """A line of the ledger: bytes of the source, and what became of them."""

    label: str
    bytes: int
    tensors: int


class Pace(NamedTuple):
    """What was read for one group of tensors, and in what time."""

    group: str
    bytes: int
    seconds: float


class SourceShard(NamedTuple):
    """A file of the source, by what identifies it. `content`: the hash of the whole file that it
    came with, on the Hub its sha256; None if it came with none."""

    name: str
    bytes: int
    header: str  # xxh3_128
    content: str | None


class SourceIdentity(NamedTuple):
    """What the output was compared with."""

    name: str  # a path, or a repository of the Hub
    commit: str | None
    shards: list[SourceShard]

    def table(self) -> dict[str, Any]:
        """For --json."""
        return {**self._asdict(), "shards": [shard._asdict() for shard in self.shards]}


class Tally:
    """What one task looked at, by check."""

    def __init__(self) -> None:
        self.amounts: dict[str, tuple[int, int, float]] = {}

    def add(self, check: str, amount: int, nbytes: int, seconds: float) -> None:
        """Count `amount` things of so many bytes, and the seconds that they took."""
        before = self.amounts.get(check, (0, 0, 0.0))
        now = (amount, nbytes, seconds)
        self.amounts[check] = tuple(a + b for a, b in zip(before, now, strict=True))  # type: ignore[assignment]


@dataclass
class Validation:
    """The outcome: what was compared, and every difference. `ok` means that there is none."""

    complete: bool  # what the manifest says of the output
    against_source: bool
    sample: int | None  # how many experts of each layer were read; None: all
    seed: int | None = None  # which they were drawn with
    source: SourceIdentity | None = None
    verified: bool = False  # the source's files were compared with the hashes they came with
    files: int = 0
    tensors: int = 0
    experts: int = 0  # an expert counts once for every rank that holds a part of it
    bytes_read: int = 0
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)  # blobs whose headers are not to be trusted
    checks: list[Check] = field(default_factory=lambda: [Check(id) for id in CHECKS])
    pace: list[Pace] = field(default_factory=list)
    ledger: list[Entry] = field(default_factory=list)
    statistics: "dict[int, LayerStatistics]" = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether no check found a difference."""
        return not self.findings

    def record(self, name: str, findings: Iterable[Finding], amount: int, unit: str) -> None:
        """Note that a check of `amount` things was made, with these findings."""
        check = self.check(name)
        check.amount, check.unit, check.skipped = check.amount + amount, unit, ""
        self.found(finding._replace(check=name) for finding in findings)

    def found(self, findings: Iterable[Finding]) -> None:
        """Add findings, which name their checks."""
        for finding in findings:
            self.findings.append(finding)
            self.check(finding.check).findings += 1

    def took(self, tally: Tally, unit: str) -> None:
        """Add what a task looked at."""
        for name, (amount, nbytes, seconds) in tally.amounts.items():
            check = self.check(name)
            check.skipped, check.unit = "", unit
            check.amount += amount
            check.bytes += nbytes
            check.seconds += seconds

    def check(self, name: str) -> Check:
        """The check with this id."""
        return next(check for check in self.checks if check.id == name)
