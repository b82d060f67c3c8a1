"""`kconvert bench projection`: tokens a second of eight GPUs, reckoned from one. PROJECTED, not
measured: every number that is not measured is in this file, with where it comes from.

    step of eight ranks = one rank's measured step, its bytes at the machine's rate
                        + its exchanges × (an exchange between eight − the norm that stood for it)
    tokens a second     = tokens that a step commits ÷ that
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from kconvert.layouts.errors import UnsupportedError

RANKS, HIDDEN, CONTEXT = 8, 7168, 1024
_WHOLE = (RANKS - 1) * HIDDEN * 4  # bytes that a rank sends of a row: float32 sums to every other
# In two shots: a share of the sums to each, then a share of the rounded total to each.
_TWO_SHOTS = (RANKS - 1) * (HIDDEN // RANKS) * (4 + 2)
FORMS = {"whole": (_WHOLE, 1), "two shots": (_TWO_SHOTS, 2)}  # bytes a row, rounds
_NORM = "rows_add_norm"  # the kernel that exchanges
_DRAFTED = 8  # rows of a draft


class Machine(NamedTuple):
    """Eight GPUs and what lies between them."""

    name: str
    read_tbps: float  # of a GPU's memory, as a kernel that only reads gets
    link_gbps: float  # out of a GPU, one way
    latency_us: float | None  # of an exchange of one row; None: as two H200 were measured
    round_us: float  # of each further round of an exchange
    gather_us: float  # of a small all-gather through NCCL


# The H200's 4.54 TB/s is measured (NOTES.md); 0.8 of NVLink's 450 GB/s. RTX PRO 6000: 1.79 TB/s by
# its datasheet, of which the same share as on the H200; 0.8 of the 63 GB/s of PCIe 5.0 x16. Its
# latencies, the further rounds and the gathers are guesses.
MACHINES = (
    Machine("8 × H200", 4.54, 360.0, None, 4.0, 8.0),
    Machine("8 × RTX PRO 6000", 1.69, 50.0, 14.0, 8.0, 20.0),
)
# Share of steps whose draft is accepted at least so deep: the best published of Kimi's drafter, and
# one that falls evenly, to the 2.7 committed that another user of it saw.
PROFILES = {
    "4.7 committed": (0.89, 0.75, 0.57, 0.49, 0.41, 0.34, 0.28),
    "2.7 committed": tuple(0.64**depth for depth in range(1, 8)),
}
# Of the misses on a path, the most that a sibling in a tree of so many nodes catches, at every
# depth; at least none. Nobody has published one for Kimi.
CAUGHT = {15: 0.35, 32: 0.5}
# Published decode rates of one text, tokens a second (reports on K2.x, K2.6 and K2.7-Code).
PUBLISHED = {
    "8 × H200": {"K2.x, reports": (96, 134)},
    "8 × RTX PRO 6000": {
        "vLLM, plain": (87, 92),
        "vLLM, EAGLE3": (117, 139),
        "vLLM, DFlash, K2.7-Code": (132, 219),
    },
}


def bench_projection(shape: Path, exchange: Path) -> dict[str, Any]:
    """`project` of two files of results. Raises UnsupportedError for files that are none."""
    return project(*(_read(path) for path in (shape, exchange)))


def _read(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text())
        assert isinstance(result["rows"], list)
    except (ValueError, KeyError, TypeError, AssertionError):
        raise UnsupportedError(
            f"{path} is no result of a benchmark: give its --save file."
        ) from None
    return {**result, "file": str(path)}


def project(shape: dict[str, Any], exchange: dict[str, Any]) -> dict[str, Any]:
    """Tokens a second by machine, form of the exchange, profile and budget, from the results of
    `bench decode --shape k2.6 --rank-of 8` and of `bench exchange` on two GPUs. Raises
    UnsupportedError if one of them lacks what is needed."""
    steps = [
        row
        for row in shape["rows"]
        if row.get("context") == CONTEXT
        and row.get("what") in ("ar", "ddtree")
        and row.get("budget") != "auto"
        and {"ms", "bytes", "bucket"} <= row.keys()
        and _NORM in row.get("timeline", {}).get("kernels", {})
    ]
    if not any(row["budget"] for row in steps) or shape.get("rank_of") != RANKS:
        raise UnsupportedError(
            f"{shape.get('file', 'the result')} has no drafted steps of a rank of {RANKS} at a"
            f" context of {CONTEXT}: run bench decode --shape k2.6 --rank-of {RANKS}."
        )
    pair = [
        row["us"]
        for row in exchange["rows"]
        if row.get("M") == 1 and row.get("way") == "ours, with residual and norm"
    ]
    if not pair:
        raise UnsupportedError(
            f"{exchange.get('file', 'the result')} has no exchange of one row: run bench exchange."
        )
    rows = [
        _rate(step, machine, form, profile, pair[0], shape["layers"])
        for machine in MACHINES
        for form in FORMS
        for profile in PROFILES
        for step in steps
    ]
    return {
        "bench": "projection", "projected": True, "context": CONTEXT,
        "from": f"{shape['card']}, {shape['date']}, commit {shape['commit'][:8]}",
        "machines": {machine.name: machine._asdict() for machine in MACHINES},
        "profiles": PROFILES, "caught": CAUGHT, "published": PUBLISHED, "rows": rows,
    }  # fmt: skip


def _rate(
    step: dict[str, Any], machine: Machine, form: str, profile: str, pair_us: float, layers: int
) -> dict[str, Any]:
    ms = step_ms(step, machine, form, pair_us, layers)
    tokens = committed(profile, step["budget"])
    return {
        "machine": machine.name, "exchange": form, "profile": profile, "budget": step["budget"],
        "ms": round(ms, 2), "committed": [round(count, 2) for count in tokens],
        "tokens_per_second": [round(count / ms * 1e3, 1) for count in tokens],
    }  # fmt: skip


def step_ms(
    step: dict[str, Any], machine: Machine, form: str, pair_us: float, layers: int
) -> float:
    """A step of eight ranks: the measured one with its memory at another rate, and the exchanges
    in place of the kernels that added one rank's sums."""
    own = MACHINES[0].read_tbps
    memory = step["bytes"] * 1e-9  # ms at 1 TB/s
    alone = step["ms"] - memory / own + memory / machine.read_tbps
    seen = step["timeline"]
    # Two in each layer of the target, and the drafter's; the first norm of each adds nothing.
    target = 2 * layers
    drafter = max(0, round(seen["launched"][_NORM]) - target - 2)
    between = target * exchange_us(step["bucket"], machine, form, pair_us)
    between += drafter * exchange_us(_DRAFTED, machine, form, pair_us)
    gathers = 6 if drafter else 3  # embedding and choices; of a draft once more, and its keys
    added: float = between - seen["kernels"][_NORM] + gathers * machine.gather_us  # µs
    return float(alone + added * 1e-3)


def exchange_us(rows: int, machine: Machine, form: str, pair_us: float) -> float:
    """Microseconds of an exchange of `rows` rows between eight ranks, with residual and norm."""
    size, rounds = FORMS[form]
    latency = pair_us if machine.latency_us is None else machine.latency_us
    return latency + (rounds - 1) * machine.round_us + rows * size / machine.link_gbps * 1e-3


def committed(profile: str, budget: int) -> tuple[float, float]:
    """Tokens a step, on average, without and with what siblings catch; a budget that is no larger
    than the block's seven is taken for a chain."""
    totals = []
    for caught in (0.0, CAUGHT.get(budget, 0.0)):
        total, path, before = 1.0, 1.0, 1.0
        for share in PROFILES[profile][:budget]:
            kept = share / before
            path *= kept + (1 - kept) * caught
            total, before = total + path, share
        totals.append(total)
    return totals[0], totals[1]


def best(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the budget `auto` would take: the greatest rate, by the middle of what trees may do."""
    return max(rows, key=lambda row: sum(row["tokens_per_second"]))


def groups(table: dict[str, Any]) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    """The rows by machine, exchange and profile."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in table["rows"]:
        found.setdefault((row["machine"], row["exchange"], row["profile"]), []).append(row)
    return found
