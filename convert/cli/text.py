"""What the commands say: results as tables for --json, and the same tables as text."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kconvert.convert.progress import SHOWN, hours
from kconvert.layouts.errors import printable
from kconvert.layouts.model import groups_text

if TYPE_CHECKING:
    from kconvert.convert.prepare import Prepared
    from kconvert.convert.run import Conversion
    from kconvert.layouts.manifest import Manifest
    from kconvert.validate.findings import Validation


def size(count: int) -> str:
    """Exact bytes, GB and GiB: people confuse the latter two."""
    if count < 10_000_000:
        return f"{count:,} B"
    return f"{count:,} B ({count / 1e9:.2f} GB, {count / 2**30:.2f} GiB)"


def plan_table(prepared: "Prepared") -> dict[str, Any]:
    """A conversion that was prepared: files and bytes, and the disk and memory they need."""
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
        "ignored": list(prepared.source.checkpoint.ignored),
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
        lines.append(f"  {name}/  {folder['files']} files  {size(folder['bytes'])}")
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


def _shares(table: dict[str, Any]) -> str:
    """Each stage's rate, and in which part of the time it was busy."""
    return ", ".join(
        f"{name} {stage['nbytes'] / stage['busy'] / 1e9:.2f} GB/s"
        f" ({stage['busy'] / table['seconds']:.0%} busy)"
        for name, stage in table["stages"].items()
        if name in SHOWN and stage["busy"] > 0
    )


def _text(lines: list[str]) -> str:
    """Lines with names in them that others chose: escaped, as a terminal would obey some."""
    return "\n".join(map(printable, lines))


def _notes(table: dict[str, Any]) -> list[str]:
    notes = [f"ignored: {text}" for text in table["ignored"]]
    if table["replaced"]:
        count, nbytes = len(table["replaced"]), sum(table["replaced"].values())
        notes.append(f"replaced or removed (--overwrite): {count} files, {size(nbytes)}")
    if table["trusted"]:
        count = len(table["trusted"])
        notes.append(f"not compared, as their shards are not here: {count} published blobs")
    if table["left_out"]:
        notes.append(f"left out: {groups_text(table['left_out'])}")
    return notes


def validation_table(result: "Validation") -> dict[str, Any]:
    """The outcome of a validation."""
    findings = [{**finding._asdict(), "sentence": str(finding)} for finding in result.findings]
    return {**vars(result), "ok": result.ok, "findings": findings}


def validation_text(table: dict[str, Any]) -> str:
    """The same for a person; the first 20 findings."""
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
    found = table["findings"]
    lines = [f"DIFFERENT: {len(found)} finding(s); {checked}"]
    lines += [f"  {finding['sentence']}" for finding in found[:20]]
    if len(found) > 20:
        lines.append(f"  and {len(found) - 20} more (--json has all)")
    lines.append("to mend a blob, delete it and run the same `kconvert convert` again")
    return "\n".join(lines)


def smoke_text(table: dict[str, Any]) -> str:
    """How a generation went; its text was printed as it came."""
    speedup = table["speedup_over_ar"]
    budget = "" if table["budget"] is None else f", budget {table['budget']}"  # ar has none
    lines = [
        "",
        f"{table['mode']}{budget}: {len(table['tokens'])} tokens,"
        f" {table['tokens_per_second']:.1f} tokens/s, {table['target_forwards']} target forwards,"
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
    """What was made up."""
    shards = table["shards"]
    return f"{table['output']}: {len(shards)} shard(s), {size(sum(shards.values()))}"


def bench_repack_text(table: dict[str, Any]) -> str:
    """`bench repack` as a table."""
    lines = [
        _machine(table),
        "slice   repack GB/s   copy GB/s   repack / copy   speed-up on cores: repack (copy)",
    ]
    for row in table["rows"]:
        cores = "  ".join(
            f"{count}: {entry['repack_speedup']:.2f} ({entry['copy_speedup']:.2f})"
            for count, entry in row["on_cores"].items()
        )
        lines.append(
            f"{row['slice']:<7} {row['repack_gbps']:>11.2f} {row['copy_gbps']:>11.2f}"
            f" {row['ratio_to_copy']:>15.2f}   {cores}"
        )
    return "\n".join(lines)


def bench_convert_text(table: dict[str, Any]) -> str:
    """`bench convert` as a table."""
    return "\n".join(
        [
            _machine(table),
            f"source               {size(table['source_bytes'])}",
            f"convert              {table['convert_seconds']:.2f} s",
            f"copy and sync        {table['copy_seconds']:.2f} s",
            f"the same, O_DIRECT   {table['direct_copy_seconds']:.2f} s",
            f"convert / copy       {table['ratio_to_copy']:.2f}"
            f" ({table['ratio_to_direct_copy']:.2f} with O_DIRECT)",
            f"core-seconds per GB  {table['core_seconds_per_gb']:.2f}",
            f"peak private memory  {size(table['peak_private_bytes'])}",
        ]
    )


def bench_moe_text(table: dict[str, Any]) -> str:
    """`bench moe` as a table: microseconds, and the floor of only reading the weights."""
    lines = [
        f"{table['card']}, {table['date']}",
        "shape      M  experts       µs    TB/s  floor µs  align µs  router µs",
    ]
    for row in table["rows"]:
        lines.append(
            f"{row['shape']:<5} {row['M']:>6} {row['experts']:>8.0f} {row['us']:>8.1f}"
            f" {row['tbps']:>7.2f} {row['floor_us']:>9.1f}"
            + (
                f" {row['align_us']:>9.1f} {row['router_us']:>10.1f}"
                if row["backend"] == "kconvert"
                else f"  {row['backend']}: {row['inside']}"
            )
        )
    return "\n".join(lines)


def bench_linear_text(table: dict[str, Any]) -> str:
    """`bench linear` as a table: microseconds, and the floor of only reading the weight."""
    lines = [
        f"{table['card']}, {table['date']}",
        "product                   N      K    M       µs  floor µs  × floor",
    ]
    lines += [
        f"{row['product']:<16} {row['N']:>10} {row['K']:>6} {row['M']:>4} {row['us']:>8.1f}"
        f" {row['floor_us']:>9.1f} {row['over_floor']:>8.2f}"
        for row in table["rows"]
    ]
    return "\n".join(lines)


def bench_exchange_text(table: dict[str, Any]) -> str:
    """`bench exchange` as a table: a line a way, a column a number of rows."""
    rows = sorted({row["M"] for row in table["rows"]})
    us = {(row["way"], row["M"]): row["us"] for row in table["rows"]}
    same = all(row["same_bits"] for row in table["rows"])
    lines = [
        f"{table['ranks']} × {table['card']}, {table['date']}, µs of an exchange of"
        f" [M, {table['hidden']}], float32; ours {'has' if same else 'DOES NOT HAVE'} NCCL's bits",
        f"{'M':<36}" + "".join(f"{m:>8}" for m in rows),
    ]
    for way in dict.fromkeys(row["way"] for row in table["rows"]):
        lines.append(f"{way:<36}" + "".join(f"{us[way, m]:>8.1f}" for m in rows))
    return "\n".join(lines)


def bench_decode_text(table: dict[str, Any]) -> str:
    """`bench decode` as a table."""
    lines = [
        f"{table['prompts']} prompts × {table['new_tokens']} tokens, {table['dtype']},"
        f" tp {table['tp']}",
        "mode    budget  tokens/s   × ar  forwards  fewer by  committed"
        "  draft  tree  verify  walk  host",
    ]
    if table.get("device") == "cuda":
        return _gpu_decode_text(table, lines[0])
    for row in table["rows"]:
        share = row["share"]
        lines.append(
            f"{row['mode']:<7} {row['budget']:>6} {row['tokens_per_second']:>9.1f}"
            f" {row['speedup']:>6.2f} {row['target_forwards']:>9} {row['forwards_saved']:>9.2f}"
            f" {row['committed_per_forward']:>10.2f} {share.get('draft', 0):>6.0%}"
            f" {share.get('tree', 0):>5.1%} {share.get('verify', 0):>7.0%}"
            f" {share.get('walk', 0):>5.1%} {share.get('host', 0):>5.1%}"
        )
    return "\n".join(lines)


def _gpu_decode_text(table: dict[str, Any], title: str) -> str:
    """Microseconds: of a token, of a step, of its host's work, of the gap before the next step."""
    lines = [
        f"{title}, GPU memory taken {table['gpu_bytes'] / 1e9:.2f} GB",
        "mode    budget  tokens/s   × ar  committed  µs/token  µs/step  host  between"
        "  draft  tree  verify",
    ]
    for row in table["rows"]:
        time = row["timeline"]
        share = time["share"]
        lines.append(
            f"{row['mode']:<7} {row['budget']:>6} {row['tokens_per_second']:>9.0f}"
            f" {row['speedup']:>6.2f} {row['committed_per_forward']:>10.2f}"
            f" {1e6 / row['tokens_per_second']:>9.1f} {row['us_per_step']:>8.1f}"
            f" {row['us_per_step'] * row['share'].get('host', 0):>5.1f} {time['between_us']:>8.1f}"
            f" {share.get('draft', 0):>6.0%} {share.get('tree', 0):>5.0%}"
            f" {share.get('verify', 0):>7.0%}"
        )
    return "\n".join(lines)


def bench_exact_text(table: dict[str, Any]) -> str:
    """`bench exact` in a line, or a line a difference."""
    tokens = sum(row["tokens"] for row in table["rows"])
    if table["exact"]:
        return (
            f"exact at tp {table['tp']}: {tokens:,} tokens in {len(table['rows'])} configurations,"
            f" {table['prompts']} prompts, every logit bit is ar's"
        )
    return "\n".join(
        f"NOT EXACT: {row['layout']} {row['dtype']} T {row['temperature']} {row['mode']}"
        f" {row['budget']}, prompt {prompt}: position {position}"
        for row in table["rows"]
        for prompt, position in row["differ"].items()
    )


def bench_plan_text(table: dict[str, Any]) -> str:
    """`bench plan` as a table."""
    return "\n".join(
        [
            _machine(table),
            f"plan of all K2.6     {table['plan_seconds']:.2f} s, {size(table['plan_peak_bytes'])}",
            f"kconvert --help      {table['help_seconds']:.2f} s",
        ]
    )


def _machine(table: dict[str, Any]) -> str:
    machine = table["machine"]
    return f"{machine['cpu']}, {machine['cores']} cores, {table['pairs']} pairs"


def inspection_text(table: dict[str, Any]) -> str:
    """What a folder holds, a line a fact; lists and tables indented."""
    lines = []
    for key, value in table.items():
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
