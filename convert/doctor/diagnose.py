"""`kconvert doctor`: what is here, and what would limit a conversion of Kimi K2.6 here."""

from pathlib import Path
from typing import Any, NamedTuple

from kconvert.convert.doctor import probe
from kconvert.convert.progress import rate
from kconvert.convert.source.protocol import WINDOW

# Kimi K2.6's 64 shards as the Hub lists them (moonshotai/Kimi-K2.6, commit 2755962). The output
# is as large within 0.01 %, whatever the layout: `kconvert convert --dry-run`.
K26_BYTES = 595_177_988_208
K26_SHARD = 9_809_050_936  # the largest

CONVERT_MEMORY = 3 << 29  # 1.5 GiB: plan, buffers, interpreter
XET_MEMORY = 2_000_000_000, 8_000_000_000  # hf_xet's buffers: at least, at most
NETWORKS = 1, 10  # Gbit/s, as examples: the network is not measured


class Rates(NamedTuple):
    """GB/s; None: not known."""

    sha256: float | None  # one core; a shard is hashed in order
    pack: float | None  # one core
    cores: float  # how many; a share if a cgroup allows only that
    write: float | None  # the output's disk
    read: float | None


def diagnose(output: Path | None = None, source_cache: Path | None = None) -> dict[str, Any]:
    """Look at this machine as a place to convert K2.6 from the Hub into `output`.

    Writes 256 MiB to the output's disk and to the cache's, and removes them; takes seconds.
    """
    output = (output or Path()).absolute()
    cache = (source_cache or probe.hub_cache()).absolute()
    same_disk = probe.device(output) == probe.device(cache)
    speed = probe.disk_speed(output)
    cache_speed = speed if same_disk and speed["why"] is None else probe.disk_speed(cache)
    table: dict[str, Any] = {
        "cpu": {**probe.cpu(), "sha256_gbps": probe.sha256_gbps(), "pack_gbps": probe.pack_gbps()},
        "memory": probe.memory(),
        "disks": {
            "output": {**probe.disk(output), **speed},
            "cache": {**probe.disk(cache), **cache_speed},
        },
        "same_disk": same_disk,
        "packages": probe.packages(),
        "hub": probe.hub(),
        "gpu": probe.gpu(),
    }
    return {
        "problems": problems(table),
        **table,
        "k26": {
            **estimate(rates_in(table)),
            "space_needed": space_needed(same_disk),
            "space_needed_with_keep_shards": space_needed(same_disk, keep_shards=True),
        },
    }


def rates_in(table: dict[str, Any]) -> Rates:
    """What was measured, as far as the estimate needs it."""
    cpu, disk = table["cpu"], table["disks"]["output"]
    cores = min(cpu["cores"], cpu["quota"] or cpu["cores"])
    return Rates(cpu["sha256_gbps"], cpu["pack_gbps"], cores, disk["write_gbps"], disk["read_gbps"])


def estimate(rates: Rates) -> dict[str, Any]:
    """Hours of each stage by itself, and the slowest part of the machine.

    The next shard is downloaded while one is converted, so a conversion takes about as long as
    the slowest part. Shards are stored, read and written as blobs on the output's disk, so the
    three add up there; a shard that memory still holds is not read from the disk.
    """
    rows: list[dict[str, Any]] = [
        {"stage": stage, "part": part, "gbps": gbps, "hours": _hours(gbps) if gbps else None}
        for stage, part, gbps in (
            *((f"download at {gbit} Gbit/s", "network", gbit / 8) for gbit in NETWORKS),
            ("store the shards", "disk", rates.write),
            ("check their sha256", "one core", rates.sha256),
            ("read them", "disk", rates.read),
            ("pack", "all cores", rates.pack and rates.pack * rates.cores),
            ("write the blobs", "disk", rates.write),
        )
    ]
    hours: dict[str, float] = {}
    for row in rows:
        if row["part"] != "network" and row["hours"] is not None:
            hours[row["part"]] = hours.get(row["part"], 0) + row["hours"]
    slowest = max(hours, key=lambda part: hours[part], default=None)
    return {
        "bytes": K26_BYTES,
        "stages": rows,
        "slowest": slowest,
        "hours": hours[slowest] if slowest else None,
        # The network that takes as long as that.
        "network_gbit": K26_BYTES * 8e-9 / hours[slowest] / 3600 if slowest else None,
    }


def _hours(gbps: float) -> float:
    """How long K2.6 takes at so many GB/s."""
    return K26_BYTES / gbps / 1e9 / 3600


def space_needed(same_disk: bool, keep_shards: bool = False) -> dict[str, int]:
    """Bytes on each disk: shards lie in the output until their blobs are written, or with
    --keep-shards in the cache for good."""
    if not keep_shards:
        return {"output": K26_BYTES + WINDOW * K26_SHARD}
    return {"output": 2 * K26_BYTES} if same_disk else {"output": K26_BYTES, "cache": K26_BYTES}


def problems(table: dict[str, Any]) -> list[str]:
    """What stops a conversion or slows it badly, in sentences that say what to do."""
    return _disk_problems(table) + _memory_problems(table) + _hub_problems(table)


def _disk_problems(table: dict[str, Any]) -> list[str]:
    disks, sentences = table["disks"], []
    free, needed = disks["output"]["free"], space_needed(table["same_disk"])["output"]
    if free < needed:
        sentences.append(
            f"The output's disk has {_gb(free)} free, a K2.6 conversion needs {_gb(needed)}:"
            f" free {_gb(needed - free)} more, or choose another output folder."
        )
    for name, choice in ("output", "output folder"), ("cache", "cache folder (HF_HUB_CACHE)"):
        if not disks[name]["writable"]:
            sentences.append(
                f"The {name} cannot be written to {disks[name]['folder']}: check the permissions,"
                f" or choose another {choice}."
            )
    return sentences


def _memory_problems(table: dict[str, Any]) -> list[str]:
    memory, xet = table["memory"], _xet(table)
    known = [memory[name] for name in ("available", "limit") if memory[name] is not None]
    least, most = (CONVERT_MEMORY + (buffers if xet else 0) for buffers in XET_MEMORY)
    if not known or min(known) >= most:
        return []
    limited = min(known) == memory["limit"]
    raise_it = "raise the memory limit" if limited else "end other programs"
    has = f"{_gb(min(known))} of memory can be used, a K2.6 conversion"
    otherwise = " or set HF_HUB_DISABLE_XET=1 (slower downloads)" if xet else ""
    if min(known) < least:
        return [f"{has} needs {_gb(least)} or more: {raise_it}{otherwise}."]
    return [f"{has} may take {_gb(most)}: if it is killed, {raise_it}{otherwise}."]


def _hub_problems(table: dict[str, Any]) -> list[str]:
    hub, sentences = table["hub"], []
    if hub["offline"]:
        sentences.append(
            "HF_HUB_OFFLINE is set, so only what is in the cache can be converted: unset it to"
            " download."
        )
    if table["packages"]["hf_xet"] is None:
        sentences.append("hf_xet is not installed, so downloads are slower: pip install hf_xet.")
    if hub["token"]["why"]:
        sentences.append(f"The Hub token cannot be read ({hub['token']['why']}): hf auth login.")
    return sentences


def _xet(table: dict[str, Any]) -> bool:
    return table["packages"]["hf_xet"] is not None and not table["hub"]["xet_disabled"]


def doctor_text(table: dict[str, Any]) -> str:
    """The same for a person, problems first."""
    cpu, disks, hub, gpu = table["cpu"], table["disks"], table["hub"], table["gpu"]
    packages = {name: number or "missing" for name, number in table["packages"].items()}
    python = packages.pop("python")
    client = ", ".join(f"{name} {packages.pop(name)}" for name in ("huggingface_hub", "hf_xet"))
    others = ", ".join(f"{name} {number}" for name, number in packages.items())
    facts = {
        "cpu": _cpu_text(cpu),
        "": f"on one core: sha256 {_rate(cpu['sha256_gbps'])}, packing {_rate(cpu['pack_gbps'])}",
        "memory": _memory_text(table["memory"]),
        "output": _disk_text(disks["output"]),
        "cache": disks["cache"]["folder"] + ": the same disk"
        if table["same_disk"] and disks["output"]["why"] is None else _disk_text(disks["cache"]),
        "python": f"{python}, {others}",
        "hub": f"{client}, {hub['endpoint']}"
        + (", HF_HUB_DISABLE_XET is set" if hub["xet_disabled"] else "")
        + (", HF_HUB_OFFLINE is set" if hub["offline"] else ""),
        "token": _token_text(hub["token"]),
        "gpu": _gpu_text(gpu),
        "nvrtc": gpu["nvrtc"] or "none",
    }  # fmt: skip
    lines = _head(table["problems"])
    lines += ["", *(f"{label:<8}{text}" for label, text in facts.items()), ""]
    return "\n".join(lines + _estimate_text(table))


def _head(sentences: list[str]) -> list[str]:
    what = f"a conversion of Kimi K2.6 ({_gb(K26_BYTES)}) here"
    if not sentences:
        return [f"ok: nothing stands in the way of {what}"]
    count = "1 problem" if len(sentences) == 1 else f"{len(sentences)} problems"
    return [f"{count} for {what}:", *(f"  {problem}" for problem in sentences)]


def _cpu_text(cpu: dict[str, Any]) -> str:
    quota = f", {cpu['quota']:g} by its cgroup" if cpu["quota"] else ""
    features = [name if there else f"no {name}" for name, there in cpu["features"].items()]
    cores = "1 core" if cpu["cores"] == 1 else f"{cpu['cores']} cores"
    return f"{cpu['model']}, {cores}{quota}; {', '.join(features) or 'features unknown'}"


def _memory_text(memory: dict[str, int | None]) -> str:
    limit = "no cgroup limit" if memory["limit"] is None else f"{_gb(memory['limit'])} by cgroup"
    return f"{_gb(memory['total'])}, {_gb(memory['available'])} available, {limit}"


def _disk_text(disk: dict[str, Any]) -> str:
    speed = (
        f"writes {_rate(disk['write_gbps'])}, reads {_rate(disk['read_gbps'])}"
        if disk["why"] is None else f"not measured: {disk['why']}"
    )  # fmt: skip
    cached = ", no O_DIRECT" if disk["direct"] is False else ""
    kind = disk["file_system"] or "unknown"
    return f"{disk['folder']}: {kind}, {_gb(disk['free'])} free, {speed}{cached}"


def _token_text(token: dict[str, Any]) -> str:
    if token["present"]:
        return "there, from " + ("its file" if token["source"] == "file" else token["source"])
    return token["why"] or "none: public repositories only, at lower rate limits"


def _gpu_text(gpu: dict[str, Any]) -> str:
    cards = [
        f"{card['name'] or 'unknown'}, {_gb(card['memory'])}, compute capability"
        f" {card['compute_capability'] or '?'}"
        for card in gpu["gpus"]
    ]
    found = "; ".join(
        (f"{cards.count(card)} × " if cards.count(card) > 1 else "") + card
        for card in dict.fromkeys(cards)
    )
    driver = f"; driver {gpu['driver']}, CUDA {gpu['cuda']}" if gpu["driver"] else ""
    return (found or f"{gpu['why']}; a conversion needs none") + driver


def _estimate_text(table: dict[str, Any]) -> list[str]:
    result = table["k26"]
    lines = ["K2.6 here, each by itself    hours    GB/s   on"]
    for row in result["stages"]:
        hours = "?" if row["hours"] is None else f"{row['hours']:.2f}"
        gbps = "?" if row["gbps"] is None else f"{row['gbps']:.2f}"
        example = ", an example: not measured" if row["part"] == "network" else ""
        lines.append(f"  {row['stage']:<24} {hours:>7} {gbps:>7}   {row['part']}{example}")
    if result["slowest"]:
        lines.append(
            f"slowest: {result['slowest']}, {result['hours']:.2f} hours for all it has to do;"
            f" a network under {result['network_gbit']:.1f} Gbit/s is slower still"
        )
    needs, kept = (
        ", ".join(f"{name} {_gb(size)}" for name, size in result[key].items())
        for key in ("space_needed", "space_needed_with_keep_shards")
    )
    return [*lines, f"disk space: {needs}; with --keep-shards: {kept}"]


def _gb(count: int | None) -> str:
    return "?" if count is None else f"{count / 1e9:,.1f} GB"


def _rate(gbps: float | None) -> str:
    return "?" if gbps is None else rate(gbps * 1e9)
