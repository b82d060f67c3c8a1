"""What can go wrong with a request, and when it does.

A Fault is a value; a schedule is a function that is asked for each request and answers with a
Fault or None.
"""

import random
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["api", "resolve", "cdn"]
FaultKind = Literal[
    "status",  # an answer with `status`, and Retry-After if `retry_after` is given
    "expired",  # the CDN's 403 for a link that is too old
    "redirect",  # 307 to the same place, as a relative location
    "delay",  # nothing for `seconds`: before the headers, or after `after` bytes of the body
    "reset",  # the connection is reset: before the headers, or after `after` bytes of the body
    "short",  # the right Content-Length, but the connection is closed after `after` bytes
    "truncated",  # `after` bytes with a Content-Length to match: it looks complete
    "corrupt",  # the byte at `offset` of the file flipped
    "resize",  # a file `delta` bytes longer or shorter than the tree says
    "range",  # bytes and Content-Range that lie `offset` bytes (1) beside what was asked for
    "whole",  # the Range ignored: 200 with everything
]


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong; a kind reads what it needs.

    Without `after`, "delay" and "reset" come before the headers, "short" and "truncated" in the
    middle of the body; without `offset`, "corrupt" flips the byte in the middle.
    """

    kind: FaultKind
    after: int | None = None
    offset: int | None = None
    delta: int = -1
    seconds: float = 30.0
    status: int = 503
    retry_after: int | None = None


@dataclass
class Request:
    """One request as the Hub saw it. `sent` counts bytes of the body."""

    number: int
    kind: Kind
    method: str
    repo: str
    path: str
    range: str | None = None
    token: str | None = None
    fault: Fault | None = None
    status: int | None = None
    sent: int = 0


Schedule = Callable[[Request], Fault | None]


def no_faults(request: Request) -> Fault | None:
    return None


def always(
    fault: Fault, kind: Kind | None = None, method: str | None = None, path: str | None = None
) -> Schedule:
    """The fault for every request of this kind, method and path; None means any."""

    def schedule(request: Request) -> Fault | None:
        return fault if _matches(request, kind, method, path) else None

    return schedule


def at(
    faults: Mapping[int, Fault],
    kind: Kind | None = None,
    method: str | None = None,
    path: str | None = None,
) -> Schedule:
    """Faults by number, from 0, of the requests of this kind, method and path since now."""
    lock = threading.Lock()
    count = -1

    def schedule(request: Request) -> Fault | None:
        nonlocal count
        if not _matches(request, kind, method, path):
            return None
        with lock:
            count += 1
            return faults.get(count)

    return schedule


def first_of(*schedules: Schedule) -> Schedule:
    """All schedules are asked, so that they go on counting; the first fault is taken."""

    def schedule(request: Request) -> Fault | None:
        answers = [ask(request) for ask in schedules]
        return next((fault for fault in answers if fault), None)

    return schedule


def random_faults(
    seed: int, rate: float, kinds: Iterable[FaultKind | Fault], limit: int | None = None
) -> Schedule:
    """A share `rate` of the requests fails, `limit` at most, each with one of `kinds`.

    A request's number alone decides, so that threads in another order meet the same faults. A
    kind given by name gets random parameters, and one that cannot touch the request is no fault.
    """
    kinds = list(kinds)
    lock = threading.Lock()
    left = limit

    def schedule(request: Request) -> Fault | None:
        nonlocal left
        draw = random.Random(f"{seed}/{request.number}")
        if draw.random() >= rate:
            return None
        chosen = draw.choice(kinds)
        fault = chosen if isinstance(chosen, Fault) else _drawn(chosen, draw)
        if not touches(fault, request):
            return None
        with lock:
            if left is not None:
                if left == 0:
                    return None
                left -= 1
        return fault

    return schedule


def touches(fault: Fault, request: Request) -> bool:
    """Whether the request can show the fault."""
    match fault.kind:
        case "expired":
            return request.kind == "cdn"
        case "redirect":
            return request.kind != "api"
        case "short" | "truncated" | "corrupt" | "resize":
            return request.kind != "api" and request.method == "GET"
        case "range" | "whole":
            return request.kind != "api" and request.range is not None
    return True


def _drawn(kind: FaultKind, draw: random.Random) -> Fault:
    # The whole set is drawn whatever the kind, for simplicity; a kind reads what it needs.
    return Fault(
        kind,
        after=draw.choice([None, draw.randrange(1 << 20)]),
        delta=draw.choice([-1, 1]) * draw.randint(1, 1000),
        status=draw.choice([429, 500, 502, 503, 504]),
        retry_after=draw.choice([None, 0]),
    )


def _matches(request: Request, kind: str | None, method: str | None, path: str | None) -> bool:
    return (
        kind in (None, request.kind)
        and method in (None, request.method)
        and path in (None, request.path)
    )
