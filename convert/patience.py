"""Calls over the network: which failures pass by themselves, and what the others mean.

huggingface_hub repeats some failures itself; resets, 5xx answers to downloads and wrong bytes it
does not. One call is tried ATTEMPTS times, with pauses that double.
"""

import time
from collections.abc import Callable
from typing import TypeVar

import httpx2
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from kconvert.layouts.errors import CheckpointError, KconvertError, UnavailableError

ATTEMPTS = 5
T = TypeVar("T")


class TransferError(OSError):
    """Bytes arrived, but not the right ones: worth another attempt."""


def patiently(
    what: str, call: Callable[[int], T], pause: Callable[[float], object] = time.sleep
) -> T:
    """`call(attempt)` until it succeeds, attempt being 0 … ATTEMPTS − 1.

    Raises CheckpointError or UnavailableError where trying again is no use or was none, and
    OSErrors of the local disk as they are.
    """
    for attempt in range(ATTEMPTS):
        try:
            return call(attempt)
        except KconvertError:
            raise
        except (httpx2.HTTPError, OSError, ValueError) as error:
            final = _final(what, error)
            if final is not None:
                raise final from None
            reason = _reason(error)
        if attempt + 1 < ATTEMPTS:
            pause(2**attempt)
    raise UnavailableError(
        f"{what}: {reason}, {ATTEMPTS} times; check the network, then run the same command again:"
        " it resumes."
    )


def _final(what: str, error: Exception) -> Exception | None:
    """What to raise for a failure that will not pass, or None."""
    if isinstance(error, GatedRepoError):
        return UnavailableError(
            f"{what}: the repository is gated; ask for access on its page, and set HF_TOKEN."
        )
    if isinstance(error, RepositoryNotFoundError):
        return CheckpointError(
            f"{what}: the Hub has no such repository, or it is private; check the name, or set"
            " HF_TOKEN to a token that may read it."
        )
    if isinstance(error, RevisionNotFoundError):
        return CheckpointError(f"{what}: the repository has no such revision; check --revision.")
    if isinstance(error, OfflineModeIsEnabled):
        return UnavailableError(
            f"{what} is not in the cache and HF_HUB_OFFLINE is set: unset it to download."
        )
    if isinstance(error, LocalEntryNotFoundError):  # the lookup failed; the cause is chained
        cause = error.__cause__
        return _final(what, cause) if isinstance(cause, Exception) else None
    if isinstance(error, EntryNotFoundError):
        return CheckpointError(f"{what}: the repository has no such file at this revision.")
    if isinstance(error, HfHubHTTPError):
        refused = error.response.status_code == 401
        return UnavailableError(f"{what}: HF_TOKEN was refused; renew it.") if refused else None
    # The system's own errors have a number: the disk is full, not the network slow.
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, error.strerror, error.filename or what)
    return None


def _reason(error: BaseException) -> str:
    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        return _reason(error.__cause__)
    if isinstance(error, HfHubHTTPError):
        return f"the server answered {error.response.status_code}"
    if isinstance(error, httpx2.TimeoutException):
        return "the server did not answer in time"
    if isinstance(error, httpx2.ConnectError):
        return "no connection to the server"
    if isinstance(error, httpx2.TransportError):
        return "the connection broke"
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__
