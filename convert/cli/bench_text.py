"""What `kconvert bench …` measured, as tables."""

from typing import Any

from kconvert.convert.cli.text import size


def repack_text(table: dict[str, Any]) -> str:
    """`bench repack` as a table."""
    lines = [
        _machine(table),
        "slice        repack GB/s   copy GB/s   repack / copy   speed-up on cores: repack (copy)",
    ]
    for row in table["rows"]:
        cores = "  ".join(
            f"{count}: {entry['repack_speedup']:.2f} ({entry['copy_speedup']:.2f})"
            for count, entry in row["on_cores"].items()
        )
        lines.append(
            f"{row['slice']:<12} {row['repack_gbps']:>11.2f} {row['copy_gbps']:>11.2f}"
            f" {row['ratio_to_copy']:>15.2f}   {cores}"
        )
    return "\n".join(lines)


def convert_text(table: dict[str, Any]) -> str:
    """`bench convert` as tables: the raw rates, then each case beside its copies."""
    lines = [_machine(table), "raw, blocks of 8 MiB    in flight   write GB/s   read GB/s"]
    for name, raw in table["raw"].items():
        how = "" if raw["direct"] else ", through the page cache"
        for row in raw["rows"]:
            lines.append(
                f"{name + how:<23} {row['in_flight']:>9} {row['write_gbps']:>12.2f}"
                f" {row['read_gbps']:>11.2f}"
            )
    lines.append(
        "case                 GB  plan s  convert s   GB/s   cp s  O_DIRECT s  / better"
        "  core-s/GB  memory GiB"
    )
    for row in table["rows"]:
        copies = (
            f" {row['copy_seconds']:>6.2f} {row['direct_copy_seconds']:>11.2f}"
            f" {row['ratio_to_copy']:>9.2f}"
            if "copy_seconds" in row
            else f" {'–':>6} {'–':>11} {'–':>9}"
        )
        lines.append(
            f"{row['case']:<18} {row['source_bytes'] / 1e9:>4.1f} {row['plan_seconds']:>7.2f}"
            f" {row['convert_seconds']:>10.2f} {row['gbps']:>6.2f}{copies}"
            f" {row['core_seconds_per_gb']:>10.2f} {row['peak_private_bytes'] / 2**30:>11.2f}"
        )
    lines.append("where the workers' time went")
    for row in table["rows"]:
        spent = row["workers_time"]
        waiting = max(0.0, 1 - sum(spent.values()))
        parts = ", ".join(f"{name} {share:.0%}" for name, share in spent.items())
        lines.append(f"{row['case']:<18} {row['workers']} workers: {parts}, nothing {waiting:.0%}")
    return "\n".join(lines)


def moe_text(table: dict[str, Any]) -> str:
    """`bench moe` as a table: microseconds, the floor (the weights only read), and kconvert's time
    as a part of a peer's for the same."""
    lines = [
        f"{table['card']}, {table['date']}",
        "shape      M  experts       µs    TB/s  floor µs  align µs  router µs",
    ]
    peers = [row for row in table["rows"] if row["backend"] != "kconvert"]
    for row in table["rows"]:
        if row["backend"] != "kconvert":
            continue
        lines.append(
            f"{row['shape']:<5} {row['M']:>6} {row['experts']:>8.0f} {row['us']:>8.1f}"
            f" {row['tbps']:>7.2f} {row['floor_us']:>9.1f}"
            f" {row['align_us']:>9.1f} {row['router_us']:>10.1f}"
        )
        for total, name in (("gemms_us", "GEMMs"), ("layer_us", "layer")):
            beside = [
                f"{peer['backend']} {peer['us']:.1f}, kconvert's is {peer['ratio']:.2f} of it"
                for peer in peers
                if (peer["shape"], peer["M"], peer["against"]) == (row["shape"], row["M"], total)
            ]
            if beside:
                lines.append(f"      {name} {row[total]:.1f}; " + "; ".join(beside))
    if peers:
        lines += [f"{what}: {inside}" for what, inside in table["inside"].items()]
    return "\n".join(lines)


def linear_text(table: dict[str, Any]) -> str:
    """`bench linear` as a table: microseconds, and the floor (the weight only read)."""
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


def tree_text(table: dict[str, Any]) -> str:
    """`bench tree` as a table: microseconds of each part, then the goals."""
    parts = ("top-k", "grow", "top-k and grow", "pick", "walk", "walk and compact")
    lines = [
        f"{table['card']}, {table['date']}, µs; {table['vocabulary']:,} tokens,"
        f" {table['levels']} drafted positions, {table['layers']} layers of cache",
        "ranks  budget  accepted" + "".join(f"{part:>{len(part) + 2}}" for part in parts),
    ]
    lines += [
        f"{row['ranks']:>5} {row['budget']:>7} {row['accepted']:>9}"
        + "".join(f"{row[part]:>{len(part) + 2}.1f}" for part in parts)
        for row in table["rows"]
    ]
    lines += [
        f"goal of {part} at budget {budget}, one rank: {us} µs"
        for part, of in table["goals"].items()
        for budget, us in of.items()
    ]
    return "\n".join(lines)


def exchange_text(table: dict[str, Any]) -> str:
    """`bench exchange` as a table: a line for each way, a column for each number of rows."""
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


def load_text(table: dict[str, Any]) -> str:
    """`bench load` as a table: GB/s, the share of the run's best rate, and the goal for it."""
    where = table["card"] or "the host's memory, no GPU"
    title = f"{table['bytes'] / 1e9:.2f} GB in {table['files']} blob(s) to {where}"
    if table["ranks"] > 1:
        title += f", on each of {table['ranks']} ranks at once"
    lines = [
        f"{title}, {table['cores']} cores, {table['date']},"
        f" buffers of {size(table['buffer_bytes'])}",
        "from        at a time  digests    GB/s   of best    goal   slowest rank",
    ]
    for kind, alone in (("page cache", "best_pread"), ("disk", "raw_direct")):
        if best := table[alone]:
            way = "O_DIRECT" if kind == "disk" else "pread"
            lines.append(
                f"{kind:<11} {f'{way} alone':<18} {best['gbps']:>8.2f}   {best['threads']} threads"
            )
    for row in table["rows"]:
        kind = row["from"] + (", digests" if row["digests"] and row["from"] != "disk" else "")
        lines.append(
            f"{row['from']:<11} {row['at_a_time']:<9} {'yes' if row['digests'] else 'no':>8}"
            f" {row['gbps']:>8.2f} {row['of_best']:>9.2f} {table['goals'][kind]:>7.2f}"
            f" {row['slowest_rank']:>14.2f}"
        )
    if table["card"]:
        lines.append(f"and {table['goals']['GB/s']} GB/s from the page cache without digests")
    return "\n".join(lines)


def decode_text(table: dict[str, Any]) -> str:
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
    """Microseconds a token, a step, of the host's work in it, and of the gap before the next."""
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


def shape_text(table: dict[str, Any]) -> str:
    """`bench decode --shape` as tables: steps, then where a step's time goes."""
    lines = [
        f"one rank of {table['rank_of']} of {table['shape']}, {table['layers']} layers, made up;"
        f" {table['card']}, {table['date']}, GPU memory taken {table['gpu_bytes'] / 1e9:.1f} GB",
        f"exchange: {table['exchange']}",
        *_check_lines(table["check"]),
    ]
    if not table["rows"]:
        return "\n".join(lines)
    lines.append(
        "context  step            rows experts (unlike)     GB       ms  tokens/s  launches a layer"
    )
    lines += [_step_line(row) for row in table["rows"]]
    seen = [row for row in table["rows"] if row.get("timeline", {}).get("kernels")]
    for row in seen:
        kernels = list(row["timeline"]["kernels"].items())
        total = sum(us for _, us in kernels)
        parts = ", ".join(f"{name} {us / total:.0%}" for name, us in kernels[:8])
        rows = f", {row['rows']} rows" if "rows" in row else ""
        lines.append(f"{_step_name(row)}{rows}: {parts}")
    return "\n".join(lines)


def _check_lines(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return ["not checked"]
    layers = ", ".join(
        f"layer {row['layer']} {row['largest']:.1e}"
        + (f" ({row['tossed']} rows left out)" if row["tossed"] else "")
        for row in found["layers"]
    )
    wrong = [row for row in found["bits"] if not row["same"]]
    ways = sorted({row["way"] for row in found["bits"]})
    contexts = sorted({row["context"] for row in found["bits"]})
    return [
        f"from float64, at most {found['near']:.0e}: {layers or 'not compared'}",
        f"bits of 16 tokens through all layers, one by one, {', '.join(ways)}, contexts"
        f" {', '.join(map(str, contexts))}: "
        + (
            "; ".join(f"NOT THE SAME in {row['way']} at {row['context']}" for row in wrong)
            or "the same"
        ),
    ]


def _step_name(row: dict[str, Any]) -> str:
    if row["what"] == "verify":
        return "verify" if row["texts"] == 1 else f"verify, {row['texts']} texts"
    return row["what"] if row["what"] == "ar" else f"ddtree {row['budget']}"


def _step_line(row: dict[str, Any]) -> str:
    touched = f"{row['experts']:.0f} ({row['experts_expected']:.0f})" if "experts" in row else "–"
    line = f"{row['context']:>7}  {_step_name(row):<16}{row.get('rows', '–'):>4} {touched:>16}"
    line += f" {row['bytes'] / 1e9:>6.2f}" if "bytes" in row else f" {'–':>6}"
    if row.get("collapsed"):
        return f"{line}  routing collapsed: not told"
    launches = row.get("timeline", {}).get("launches_a_layer", "")
    return f"{line} {row['ms']:>8.3f} {row['tokens_per_second']:>9.1f} {launches:>17}".rstrip()


def projection_text(table: dict[str, Any]) -> str:
    """`bench projection` as tables, one for each machine: a tree's rate is a range."""
    from kconvert.runtime.bench.shape.projection import best, groups

    lines = [f"PROJECTED, not measured, from {table['from']}, {table['context']} of context"]
    last = None
    for (machine, exchange, profile), rows in groups(table).items():
        if machine != last:
            budgets = "".join(f"{row['budget'] or 'ar':>11}" for row in rows)
            lines.append(f"{machine + ', tokens/s by budget':<44}{budgets}  auto")
            last = machine
        cells = []
        for row in rows:
            low, high = row["tokens_per_second"]
            cells.append(f"{low:.0f}" if low == high else f"{low:.0f}–{high:.0f}")
        name = f"{profile}, exchange {exchange}"
        chosen = best(rows)["budget"] or "ar"
        lines.append(f"  {name:<42}" + "".join(f"{cell:>11}" for cell in cells) + f"  {chosen}")
        if exchange == "two shots" and profile == list(table["profiles"])[-1]:
            said = (
                f"{name} {low}–{high}" for name, (low, high) in table["published"][machine].items()
            )
            lines.append(f"  published: {'; '.join(said)}")
    return "\n".join(lines)


def exact_text(table: dict[str, Any]) -> str:
    """`bench exact` in a line, or a line for each difference; on a GPU, another line says how near
    it is to the CPU."""
    tokens = sum(row["tokens"] for row in table["rows"])
    if table["exact"]:
        texts = f", texts of up to {table['longest']:,}" if table.get("longest") else ""
        lines = [
            f"exact at tp {table['tp']}: {tokens:,} tokens in {len(table['rows'])} configurations,"
            f" {table['prompts']} prompts{texts}, every logit bit is ar's"
        ]
    else:
        lines = [
            f"NOT EXACT: {row['layout']} {row['dtype']} T {row['temperature']} {row['mode']}"
            f" {row['budget']}, {row.get('what', 'prompt')} {key}: position {position}"
            for row in table["rows"]
            for key, position in row["differ"].items()
        ]
    if near := table.get("against_cpu"):
        lines.append(
            f"against the CPU: {near['tossed']} of {near['positions']:,} positions"
            f" ({near['tossed_share']:.2%}) with other experts, whose scores are at most"
            f" {near['widest_margin']:.1e} apart ({near['unlike']} too far for a toss); logits of"
            f" the rest {near['median']:.1e} apart (median), {near['largest']:.1e} at most"
        )
    return "\n".join(lines)


def reshard_text(table: dict[str, Any]) -> str:
    """`bench reshard`: each case beside its copies; above 1 it is quicker than the better copy."""
    lines = [
        _machine(table),
        "case                GB written       s   GB/s    cp s  O_DIRECT s  copy / it  core-s/GB",
    ]
    lines += [
        f"{row['case']:<18} {row['bytes'] / 1e9:>11.1f} {row['seconds']:>7.2f} {row['gbps']:>6.2f}"
        f" {row['copy_seconds']:>7.2f} {row['direct_copy_seconds']:>11.2f}"
        f" {row['ratio_to_copy']:>10.2f} {row['core_seconds_per_gb']:>10.2f}"
        for row in table["rows"]
    ]
    return "\n".join(lines)


def validate_text(table: dict[str, Any]) -> str:
    """`bench validate`: a ratio of 1 is as quick as only reading the same bytes."""
    return (
        f"{_machine(table)}, {table['bytes'] / 1e9:.1f} GB of source"
        f" and blobs\nvalidate {table['seconds']:>8.2f} s {table['gbps']:>6.2f} GB/s\n"
        f"read     {table['read_seconds']:>8.2f} s {table['read_gbps']:>6.2f} GB/s\n"
        f"read / validate {table['ratio_to_reading']:.2f}; core-seconds a GB"
        f" {table['core_seconds_per_gb']:.2f}, of reading {table['read_core_seconds_per_gb']:.2f};"
        f" at most {table['peak_private_bytes'] / 2**30:.2f} GiB"
    )


def plan_text(table: dict[str, Any]) -> str:
    """`bench plan` as a table."""
    lines = [_machine(table)]
    # Results from before K3 was planned too have one model.
    for model, key in (("K2.6", "plan"), ("K3", "k3_plan")):
        if f"{key}_seconds" in table:
            peak = size(table[f"{key}_peak_bytes"])
            plan = f"plan of all {model}"
            lines.append(f"{plan:<20} {table[f'{key}_seconds']:.2f} s, {peak}")
    return "\n".join([*lines, f"kconvert --help      {table['help_seconds']:.2f} s"])


def _machine(table: dict[str, Any]) -> str:
    machine = table["machine"]
    pairs = "1 pair" if table["pairs"] == 1 else f"{table['pairs']} pairs"
    return f"{machine['cpu']}, {machine['cores']} cores, {pairs}"
