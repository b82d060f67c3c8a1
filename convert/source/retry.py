"""Calls over the network: which failures pass by themselves, and what the others mean.

huggingface_hub retries some failures itself, but not resets, 5xx answers to downloads or wrong
bytes.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from kconvert.convert.source.endpoint import shown_endpoint
from kconvert.layouts.errors import (
    AccessError,
    CheckpointError,
    HubError,
    KconvertError,
    UnavailableError,
)

T = TypeVar("T")
_LONGEST_PAUSE = 60.0
_log = logging.getLogger(__name__)
# Answers that another attempt will get as well. 401 and 403 have sentences of their own.
_FINAL_ANSWERS = (400, 404, 405, 406, 410, 451)


class TransferError(OSError):
    """Bytes arrived, but not the right ones: worth another attempt."""


class ContentError(TransferError):
    """A whole file arrived, with the hash `found` and not the one that the Hub names."""

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(f"content {expected} expected, {found} found")
        self.found = found


@dataclass(frozen=True)
class Patience:
    """How often a call is tried, and how to wait in between: 1, 2, 4 … 60 seconds."""

    attempts: int = 5
    pause: Callable[[float], object] = time.sleep

    def __call__(
        self, what: str, call: Callable[[int], T], progress: Callable[[], int] = lambda: 0
    ) -> T:
        """`call(n)` until it succeeds, n counting the calls. Failures are counted anew when
        `progress()` has grown.

        Raises CheckpointError or UnavailableError if trying again would not help or did not, and
        OSErrors of the local disk as they are.
        """
        number, failures, before = 0, 0, progress()
        contents: set[str] = set()
        while True:
            try:
                return call(number)
            except KconvertError:
                raise
            except (httpx2.HTTPError, httpx2.InvalidURL, ImportError, OSError, ValueError) as error:
                final = _final(what, error)
                if final is not None:
                    raise final from None
                reason, advice = _reason(error), _advice(error)
                if isinstance(error, ContentError):
                    if error.found in contents:  # so it was no accident of the transfer
                        raise HubError(
                            f"{what}: {reason}, twice the same: the Hub's copy is damaged, or that"
                            " of a proxy or mirror on the way; get it by another way, or tell the"
                            " repository's owner."
                        ) from None
                    contents.add(error.found)
            number, now = number + 1, progress()
            failures = 1 if now > before else failures + 1
            before = now
            if failures == self.attempts:
                raise HubError(
                    f"{what}: {reason}, {failures} times; {advice}, then run the same command"
                    " again: it resumes."
                )
            seconds = min(2.0 ** (failures - 1), _LONGEST_PAUSE)
            _log.warning("%s: %s; again in %.0f s", what, reason, seconds)
            self.pause(seconds)


def _final(what: str, error: Exception) -> Exception | None:
    """What to raise for a failure that will not pass, or None."""
    if isinstance(error, GatedRepoError):
        return AccessError(
            f"{what}: the repository is gated; ask for access on its page, and set HF_TOKEN."
        )
    if isinstance(error, RepositoryNotFoundError):
        return CheckpointError(
            f"{what}: the Hub has no such repository, or it is private; check the name, or set"
            " HF_TOKEN to a token that may read it."
        )
    if isinstance(error, HFValidationError):
        return CheckpointError(f"{what}: the Hub allows no such name; check it.")
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
        # A 403 from another host or port means that a link has expired.
        url, hub = error.response.url, urlsplit(constants.ENDPOINT)
        ours = (url.host, url.port) == (hub.hostname, hub.port)
        if error.response.status_code == 401 or (error.response.status_code == 403 and ours):
            return AccessError(f"{what}: the Hub wants a token that may read it; set HF_TOKEN.")
        if error.response.status_code in _FINAL_ANSWERS:
            return HubError(
                f"{what}: {_reason(error)}, it does not have that; check the name, and HF_ENDPOINT"
                " if it is set."
            )
        return None
    if isinstance(error, (httpx2.InvalidURL, httpx2.UnsupportedProtocol)):
        return UnavailableError(f"{what}: HF_ENDPOINT or a proxy variable is no URL; correct it.")
    if isinstance(error, ImportError):  # such as a SOCKS proxy's package
        return UnavailableError(f"{what}: {_first_line(error)}.")
    # The system's own errors have a number: the disk is full, not the network slow.
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, error.strerror, error.filename or what)
    return None


def _reason(error: BaseException) -> str:
    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        return _reason(error.__cause__)
    if isinstance(error, HfHubHTTPError):
        url = error.response.url
        return f"{url.host} answered {error.response.status_code}"
    if isinstance(error, httpx2.TimeoutException):
        return "the server did not answer in time"
    if isinstance(error, httpx2.ConnectError):
        return f"no connection to {shown_endpoint(constants.ENDPOINT)} ({_first_line(error)})"
    if isinstance(error, httpx2.TransportError):
        return "the connection broke"
    return _first_line(error)


def _advice(error: BaseException) -> str:
    """What to do about a failure that did not pass by itself."""
    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        return _advice(error.__cause__)
    if isinstance(error, HfHubHTTPError):
        if error.response.status_code == 429:
            return "wait for some minutes, or set HF_TOKEN, which allows more requests"
        return "wait until that server is well again"
    return "check the network"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__
