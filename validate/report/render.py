"""A validation as HTML, and what the page says of it."""

from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
from markupsafe import Markup

from kconvert.layouts.blob import BlobInfo
from kconvert.layouts.errors import one_line
from kconvert.layouts.header import Header
from kconvert.layouts.manifest import Manifest
from kconvert.validate.findings import Validation
from kconvert.validate.report.pictures import bars, heat_map, ranges
from kconvert.validate.statistics import LayerStatistics

_SHOWN = 50  # findings of a check, and tensors of a rank in the page


class Subject(NamedTuple):
    """What was validated, as the page names it."""

    output: str
    source: str | None
    manifest: Manifest
    digest: str  # the manifest's own
    shards: list[tuple[str, int, str]]  # the source's: name, bytes, xxh3 of its header
    parity: list[tuple[str, Header, BlobInfo]]  # the first layer's blob of each rank
    rank_bytes: dict[str, int]  # a rank's folder, or common → bytes
    version: str
    made: str  # when
    label: str = ""  # of pages that are no validation of anything, said on top


class Picture(NamedTuple):
    """A picture with what it shows."""

    title: str
    image: Markup
    caption: str


def render(result: Validation, subject: Subject) -> str:
    """The page: one HTML document that needs no network and no script."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["size"] = _size
    template = environment.from_string(Path(__file__).with_name("page.html").read_text())
    return template.render(
        result=result,
        subject=subject,
        verdict=_verdict(result),
        limits=limits(result),
        checks=[(check, check.table(), _of(result, check.id)) for check in result.checks],
        shown=_SHOWN,
        total=sum(entry.bytes for entry in result.ledger),
        pictures=_pictures(result.statistics, subject.rank_bytes),
        commands=_commands(result, subject),
    )


def _of(result: Validation, check: str) -> list[str]:
    return [str(finding) for finding in result.findings if finding.check == check]


def _verdict(result: Validation) -> str:
    if not result.ok:
        return f"Different: {len(result.findings):,} finding(s)."
    if not result.against_source:
        return "Every digest agrees."
    return "Every code, scale and tensor is the source's, bit for bit."


def limits(result: Validation) -> list[str]:
    """What was not compared: sentences."""
    found = []
    if not result.against_source:
        found.append("No source was given: that the blobs hold its values was not compared.")
    if result.sample is not None:
        read = sum(int((s.scales[:, 0] > 0).sum()) for s in result.statistics.values())
        all_of_them = sum(len(s.scales) for s in result.statistics.values())
        chance = 1 - 0.99**read
        found.append(
            f"Of {all_of_them:,} experts {read:,} were read, drawn with seed {result.seed}: if one"
            f" in a hundred were damaged, at least one of those would be among them with a"
            f" probability of {chance:.1%}."
        )
    if not result.complete:
        found.append("The output is not complete: what is not there yet was not compared.")
    if result.unread:
        found.append(
            f"The data of {len(result.unread)} blob(s) was not read, as their headers are not to be"
            " trusted: mend them and look again."
        )
    return found


def _commands(result: Validation, subject: Subject) -> list[str]:
    again = f"kconvert validate {subject.output}"
    again += f" --source {subject.source}" if subject.source else ""
    if result.sample is not None:
        again += f" --sample {result.sample} --seed {result.seed}"
    found = [again]
    if not result.ok:
        manifest = subject.manifest
        source = subject.source or manifest.repo or "SOURCE"
        ep = f" --ep {manifest.ep}" if manifest.ep > 1 else ""
        damaged = sorted({finding.file for finding in result.findings})[:5]
        found.append("rm " + " ".join(f"{subject.output}/{file}" for file in damaged))
        found.append(
            f"kconvert convert {source} {subject.output} --layout {manifest.layout}"
            f" --tp {manifest.tp}{ep}"
        )
    return [one_line(command) for command in found]


def _pictures(statistics: dict[int, LayerStatistics], rank_bytes: dict[str, int]) -> list[Picture]:
    names = [name.removeprefix("rank-").partition("-of-")[0].lstrip("0") or "0"
             for name in rank_bytes]  # fmt: skip
    unit, step = ("GB", 1e9) if max(rank_bytes.values(), default=0) > 1e8 else ("MB", 1e6)
    found = [
        Picture("Bytes by rank", bars(names, [n / step for n in rank_bytes.values()], unit),
                "Each rank's blobs, and what all ranks share.")
    ]  # fmt: skip
    layers = {n: s for n, s in sorted(statistics.items()) if s.scales[:, 0].any()}
    if not layers:
        return found
    codes = sum(s.codes.sum(axis=0) for s in layers.values())
    shares: Any = 100 * codes / codes.sum()
    caption = "How often each stored code occurs, in % of all codes."
    if len(shares) == 16:
        caption += f" Code 0, which means −8 in INT4: {shares[0]:.3f} %."
    found.append(
        Picture("Codes", bars([str(i) for i in range(len(shares))], shares.tolist(), "%"), caption)
    )
    if all(s.greatest.max() > 0 for s in layers.values()):
        found.append(
            Picture(
                "Scales by layer",
                ranges(
                    [str(n) for n in layers],
                    [s.least.min() for s in layers.values()],
                    [s.totals.sum() / s.scales[:, 0].sum() for s in layers.values()],
                    [s.greatest.max() for s in layers.values()],
                ),
                "Least, mean and greatest magnitude of a layer's scales; zeros left out.",
            )
        )
    for title, values, caption in (
        ("Mean scale", [s.means for s in layers.values()],
         "Mean magnitude of an expert's scales."),
        ("Code 0", [_share(s) for s in layers.values()],
         "Share of an expert's codes that are 0."),
        ("Zero groups", [s.scales[:, 1] / np.maximum(1, s.scales[:, 0]) for s in layers.values()],
         "Share of an expert's groups whose scale is zero."),
    ):  # fmt: skip
        matrix = np.array(values, np.float64)
        low, high = np.nanmin(matrix), np.nanmax(matrix)
        where = f"Rows are layers {min(layers)} to {max(layers)}, columns experts."
        found.append(
            Picture(f"{title}, by layer and expert", heat_map(matrix),
                    f"{caption} {where} Dark {low:.3g}, bright {high:.3g}.")
        )  # fmt: skip
    return found


def _share(statistics: LayerStatistics) -> Any:
    counts = statistics.codes.sum(axis=1)
    shares = np.full(len(counts), np.nan)
    return np.divide(statistics.codes[:, 0], counts, out=shares, where=counts > 0)


def _size(nbytes: int) -> str:
    for unit, step in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= step:
            return f"{nbytes / step:.2f} {unit}"
    return f"{nbytes} B"
