"""A validation as HTML, and what the page says of it."""

import shlex
from typing import NamedTuple

from kconvert.layouts.errors import one_line
from kconvert.layouts.manifest import Manifest
from kconvert.validate.findings import Finding, Validation
from kconvert.validate.report.gallery import facts, pictures
from kconvert.validate.report.page import counted, fill
from kconvert.validate.report.parity import Held, Parity, parity_table

_SHOWN = 50  # findings of a check
_OPEN = 5  # so many are seen without a click
_REMOVED = 5  # damaged files that the page's commands name


class Subject(NamedTuple):
    """What was validated, as the page names it."""

    output: str
    manifest: Manifest
    digest: str  # the manifest's own
    parity: Parity
    rank_bytes: dict[str, int]  # a rank's folder, or common → bytes
    layer_bytes: dict[str, int]  # a layer's name, outer or vision → bytes of all ranks
    made: str  # by which program, and when
    label: str = ""  # a line at the top of a page that validates nothing real


def render(result: Validation, subject: Subject) -> str:
    """The page: one HTML document that needs no network and no script."""
    return fill(
        "validation.html",
        name=subject.output,
        command="validate",
        label=subject.label,
        ok=result.ok,
        verdict=_verdict(result),
        limits=limits(result),
        made=subject.made,
        commands=_commands(result, subject),
        reach=_reach(result),
        result=result,
        subject=subject,
        checks=[(check, check.table(), _of(result, check.id)) for check in result.checks],
        first_layer=_first_layer(subject.parity),
        parity=parity_table(subject.parity),
        facts=facts(result.statistics),
        shown=_SHOWN,
        opened=_OPEN,
        total=sum(entry.bytes for entry in result.ledger),
        pictures=pictures(result, subject.rank_bytes, subject.layer_bytes),
    )


def _first_layer(parity: Parity) -> dict[str, dict[str, Held]]:
    """What is shown of each rank: its first blob; the JSON has all."""
    of_ranks = sorted(path for path in parity if path.startswith("rank-"))
    first = of_ranks[0].rpartition("/")[2] if of_ranks else ""
    return {path: parity[path] for path in of_ranks if path.endswith(f"/{first}")}


def _of(result: Validation, check: str) -> list[Finding]:
    return [finding for finding in result.findings if finding.check == check]


def _verdict(result: Validation) -> str:
    warnings = sum(finding.severity == "warning" for finding in result.findings)
    errors = len(result.findings) - warnings
    if errors:
        more = f" and {counted(warnings, 'warning')}" if warnings else ""
        return f"Different: {counted(errors, 'error')}{more}."
    if warnings:
        return f"No error, and {counted(warnings, 'warning')}."
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
            f"{read:,} of {all_of_them:,} experts were read, drawn with seed {result.seed}: if one"
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


def _reach(result: Validation) -> list[str]:
    """What no validation of this kind tells: sentences."""
    found = ["Digests are xxh3_128: they show every accident, and no forgery."]
    if result.against_source:
        found.append(
            "The source's shards have the hashes that they came with."
            if result.verified
            else "The source is taken as it lies there; --verify compares it with the hashes at"
            " hand."
        )
    found.append(
        "The inverse by formulas, the product in the kernels' order and the decoding by"
        " compressed-tensors are of one expert a layer; everything else is of every expert"
        + (" that was drawn." if result.sample is not None else ".")
    )
    found.append("No model was run: kconvert smoke-generate and bench exact do that.")
    return found


def _commands(result: Validation, subject: Subject) -> list[str]:
    again = ["kconvert", "validate", subject.output]
    source = result.source
    again += ["--source", source.name] if source else []
    again += ["--revision", source.commit] if source and source.commit else []
    if result.sample is not None:
        again += ["--sample", str(result.sample), "--seed", str(result.seed)]
    again += ["--verify"] if result.verified and not (source and source.commit) else []
    found = [again]
    if not result.ok:
        manifest = subject.manifest
        made_from = source.name if source else manifest.repo or "SOURCE"
        damaged = sorted({finding.file for finding in result.findings})
        found += [["rm", "-f", f"{subject.output}/{file}"] for file in damaged[:_REMOVED]]
        made = ["--layout", manifest.layout, "--tp", str(manifest.tp), "--ep", str(manifest.ep)]
        made += ["--text-only"] if manifest.text_only else []
        made += (
            ["--revision", manifest.commit]
            if made_from == manifest.repo and manifest.commit
            else []
        )
        found.append(["kconvert", "convert", made_from, subject.output, *made])
    lines = [one_line(shlex.join(command)) for command in found]
    if not result.ok and len(damaged) > _REMOVED:
        lines.insert(-1, f"# and {len(damaged) - _REMOVED:,} more files, which --json names")
    return lines
