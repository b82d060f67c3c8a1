"""What the commands say: results as tables for --json, and the same tables as text."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kconvert.convert.progress import SHOWN, hours, rate
from kconvert.layouts.errors import printable
from kconvert.layouts.model import groups_text

if TYPE_CHECKING:
    from kconvert.convert.export import Exported
    from kconvert.convert.prepare import Prepared
    from kconvert.convert.run import Conversion
    from kconvert.layouts.manifest import Manifest
    from kconvert.validate.findings import Validation


_MEASURABLE = 100_000_000  # bytes: below that, a stage's time is mostly its start


def size(count: int) -> str:
    """Exact bytes, GB and GiB: people confuse the latter two."""
    if count < 10_000_000:
        return f"{count:,} B"
    return f"{count:,} B ({count / 1e9:.2f} GB, {count / 2**30:.2f} GiB)"


def plan_table(prepared: "Prepared") -> dict[str, Any]:
    """A prepared conversion: files and bytes, and the disk and memory they need."""
    from kconvert.convert.execute import memory_bound  # numba is not for `--help`

    plan, rest = prepared.plan, prepared.rest
    folders: dict[str, dict[str, int]] = {}
    for file in plan.files:
        entry = folders.setdefault(file.path.rpartition("/")[0], {"files": 0, "bytes": 0})
        entry["files"] += 1
        entry["bytes"] += file.nbytes
    return {
        "output": str(prepared.output),
        "layout": plan.target.layout.name,
        "tp": plan.target.parallelism.tp,
        "ep": plan.target.parallelism.ep,
        "source_tensors": len(prepared.source.checkpoint.tensors),
        "files": len(plan.files),
        "bytes": sum(file.nbytes for file in plan.files),
        "folders": folders,
        "published_files": len(plan.files) - len(rest.files),
        "replaced": prepared.replaced,
        "trusted": sorted(prepared.state.trusted),
        "foreign": list(prepared.state.foreign),
        "workers": prepared.workers,
        "buffer_bytes": memory_bound(plan, prepared.workers),
        "repo": prepared.source.name,
        "commit": prepared.source.commit,
        "share": prepared.workspace.name or None,
        "download": prepared.download,
        "bytes_to_read": sum(job.source_bytes for job in rest.jobs),
        "bytes_to_write": sum(prepared.sizes.values()),
        "disks": [
            {"folder": str(folder), "needed": needed, "free": free}
            for folder, needed, free in prepared.disks()
        ],
        "ignored": list(prepared.ignored),
        "warnings": list(prepared.warnings),
        "verified": prepared.source.verified,
        "left_out": list(plan.left_out),
    }


def plan_text(table: dict[str, Any]) -> str:
    """The plan for a person."""
    lines = [
        f"plan: {table['source_tensors']:,} tensors → {table['files']} files,"
        f" {table['layout']}, tp {table['tp']}, ep {table['ep']}"
    ]
    if table["repo"]:
        lines.append(f"from {table['repo']} at {table['commit']}")
    if table["share"]:
        lines.append(f"of all, {table['share']}")
    for name, folder in sorted(table["folders"].items()):
        files = "1 file" if folder["files"] == 1 else f"{folder['files']} files"
        lines.append(f"  {name}/  {files}  {size(folder['bytes'])}")
    lines.append(f"total  {size(table['bytes'])}")
    if table["published_files"]:
        lines.append(f"{table['published_files']} files are there already")
    if table["download"]:
        count, nbytes = len(table["download"]), sum(table["download"].values())
        lines.append(f"to download {count} shards, {size(nbytes)}")
    lines.append(f"to read  {size(table['bytes_to_read'])}")
    lines.append(f"to write {size(table['bytes_to_write'])}")
    for disk in table["disks"]:
        enough = "enough" if disk["free"] >= disk["needed"] else "NOT ENOUGH"
        lines.append(f"disk of {disk['folder']}: {size(disk['free'])} free, {enough}")
    lines.append(f"buffers  {size(table['buffer_bytes'])} for {table['workers']} workers")
    return _text([*lines, *_notes(table)])


def conversion_table(result: "Conversion") -> dict[str, Any]:
    """A conversion that was done."""
    stages = {name: asdict(stage) for name, stage in result.stages.items()}
    return {**vars(result), "output": str(result.output), "stages": stages}


def conversion_text(table: dict[str, Any]) -> str:
    """The same for a person."""
    lines = [
        f"{table['output']}: {table['files_written']} blobs written,"
        f" {size(table['bytes_written'])}; {table['files_kept']} were there already"
    ]
    if table["files_linked"]:
        lines.append(f"{table['files_linked']} blobs are links to those of the output given")
    if table["repo"]:
        lines.append(f"from {table['repo']} at {table['commit']}")
    if table["files_written"]:
        lines.append(f"took {hours(table['seconds'])}: {_shares(table)}")
    if table["share"] and not table["complete"]:
        lines.append(f"this was {table['share']}: the last share to end completes what was asked")
    elif not table["complete"]:
        lines.append("not complete yet: run without --layers and --ranks to finish it")
    return _text([*lines, *_notes(table)])


def finish_table(output: Path, manifest: "Manifest") -> dict[str, Any]:
    """An output that was finished."""
    return {"output": str(output), "files": len(manifest.files), "complete": manifest.complete}


def finish_text(table: dict[str, Any]) -> str:
    """The same for a person."""
    return f"{table['output']}: complete, {table['files']} files"


def export_table(result: "Exported") -> dict[str, Any]:
    """An export that was done."""
    stages = {name: asdict(stage) for name, stage in result.stages.items()}
    return {**vars(result), "folder": str(result.folder), "stages": stages}


def export_text(table: dict[str, Any]) -> str:
    """The same for a person."""
    lines = [
        f"{table['folder']}: {table['tensors']:,} tensors in {table['shards']} shards;"
        f" {table['files_written']} written, {size(table['bytes_written'])}; {table['files_kept']}"
        " were there already"
    ]
    if table["files_written"]:
        lines.append(f"took {hours(table['seconds'])}: {_shares(table)}")
    return _text([*lines, *(f"warning: {text}" for text in table["warnings"])])


def _shares(table: dict[str, Any]) -> str:
    """Each stage's rate, if it means something, and the part of the time it was busy."""
    shares = []
    for name, stage in table["stages"].items():
        if name in SHOWN and stage["busy"] > 0:
            known = stage["nbytes"] >= _MEASURABLE
            speed = f" {rate(stage['nbytes'] / stage['busy'])}" if known else ""
            shares.append(f"{name}{speed} ({stage['busy'] / table['seconds']:.0%} busy)")
    return ", ".join(shares)


def _text(lines: list[str]) -> str:
    """Lines, escaped: others chose the names in them, and a terminal would obey some."""
    return "\n".join(map(printable, lines))


def _notes(table: dict[str, Any]) -> list[str]:
    notes = [f"warning: {text}" for text in table["warnings"]]
    notes += [f"ignored: {text}" for text in table["ignored"]]
    if not table["verified"]:
        notes.append(
            "contents were not compared with hashes: --verify does, if hashes came with them"
        )
    if table["replaced"]:
        count, nbytes = len(table["replaced"]), sum(table["replaced"].values())
        notes.append(f"replaced or removed (--overwrite): {count} files, {size(nbytes)}")
    if table["trusted"]:
        count = len(table["trusted"])
        notes.append(f"not compared, as their shards are not here: {count} published blobs")
    if table["foreign"]:
        some, more = table["foreign"][:3], len(table["foreign"][3:])
        notes.append(
            f"left alone, as no conversion made it: {', '.join(some)}"
            + (f" and {more} more" if more else "")
        )
    if table["left_out"]:
        notes.append(f"left out: {groups_text(table['left_out'])}")
    return notes


def validation_table(result: "Validation") -> dict[str, Any]:
    """The outcome of a validation, as validate/schema/1.json describes it."""
    table = {
        **vars(result),
        "ok": result.ok,
        "source": result.source and result.source.table(),
        "findings": [finding.table() for finding in result.findings],
        "checks": [check.table() for check in result.checks],
        "pace": [pace._asdict() for pace in result.pace],
        "ledger": [entry._asdict() for entry in result.ledger],
        "statistics": {str(n): layer.table() for n, layer in sorted(result.statistics.items())},
    }
    return {**table, "summary": _summary(table)}


def _summary(table: dict[str, Any]) -> str:
    """One line: what was found, and how much was checked."""
    checked = (
        f"{table['files']} files, {table['tensors']:,} tensors, {table['experts']:,} expert parts,"
        f" {size(table['bytes_read'])} read"
    )
    if table["ok"]:
        some = f" of {table['sample']} experts a layer" if table["sample"] else ""
        proof = (
            f"every code and scale{some} is the source's" if table["against_source"]
            else f"all digests{some} agree (give --source to compare with the checkpoint)"
        )  # fmt: skip
        part = "" if table["complete"] else "; the output is not complete yet"
        return f"ok: {checked}; {proof}{part}"
    warnings = sum(finding["severity"] == "warning" for finding in table["findings"])
    errors = len(table["findings"]) - warnings
    counts = [(errors, "error"), (warnings, "warning")]
    found = ", ".join(f"{n:,} {what}{'' if n == 1 else 's'}" for n, what in counts if n)
    return f"{'DIFFERENT' if errors else 'WARNING'}: {found}; {checked}"


def validation_text(table: dict[str, Any]) -> str:
    """The same for a person; the first 20 findings."""
    if table["ok"]:
        return str(table["summary"])
    found = table["findings"]
    lines = [table["summary"]]
    lines += [
        f"  {'warning: ' if finding['severity'] == 'warning' else ''}{finding['sentence']}"
        for finding in found[:20]
    ]
    if len(found) > 20:
        lines.append(f"  and {len(found) - 20} more (--json has all)")
    lines.append("to mend a blob, delete it and run the same `kconvert convert` again")
    return "\n".join(lines)


def smoke_text(table: dict[str, Any]) -> str:
    """How a generation went; its text was printed as it came."""
    speed, speedup = table["tokens_per_second"], table["speedup_over_ar"]
    budget = "" if table["budget"] is None else f", budget {table['budget']}"  # ar has none
    lines = [
        "",
        f"{table['mode']}{budget}: {len(table['tokens'])} tokens,"
        + (f" {speed:.1f} tokens/s," if speed else "")  # one token is the prompt's
        + f" {table['target_forwards']} target forwards,"
        f" {table['committed_per_forward']:.2f} committed a forward"
        + (f", {speedup:.2f} × ar" if speedup else ""),
    ]
    if table["checked"]:
        lines.append(
            "exact: every token and logit bit is ar's" if table["differs"] is None
            else f"NOT EXACT: position {table['differs']} is the first that differs from ar"
        )  # fmt: skip
    return "\n".join(lines)


def synth_text(table: dict[str, Any]) -> str:
    """What `synth` wrote."""
    shards = table["shards"]
    return f"{table['output']}: {len(shards)} shard(s), {size(sum(shards.values()))}"


def inspection_text(table: dict[str, Any]) -> str:
    """What something holds, a line for each fact, tables indented. Why it is refused is said
    elsewhere."""
    lines = []
    for key, value in table.items():
        if key == "refused":
            continue
        label = key.replace("_", " ")
        if isinstance(value, dict):
            lines.append(f"{label}:")
            lines += [f"  {name}  {_value(name, entry)}" for name, entry in value.items()]
        elif isinstance(value, list):
            lines += [f"{label}: {entry}" for entry in value]
        else:
            lines.append(f"{label}: {_value(key, value)}")
    return _text(lines)


def _value(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_value(name, entry)}" for name, entry in value.items())
    return size(value) if key.endswith("bytes") and isinstance(value, int) else str(value)
