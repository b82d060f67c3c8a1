"""A Hub on this machine that the real client talks to, with a CDN, and faults on request."""

import contextlib
import hashlib
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

from hub.faults import Request, Schedule, no_faults
from hub.handler import Handler
from hub.repository import Repository, Source
from hub.throttle import Throttle


def environment(url: str, home: Path | str) -> dict[str, str]:
    """The environment for a client in a process of its own, with nothing of the user's."""
    ours = ("HF_", "HUGGING", "TRANSFORMERS_")
    proxies = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(ours) and name.upper() not in proxies
    }
    return kept | {
        "HF_ENDPOINT": url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "127.0.0.1,localhost",
    }


class Hub:
    """`with Hub() as hub: hub.add_repo("org/name", folder)`, and `hub.url` is the endpoint.

    The CDN has a port of its own, because the client follows a redirect within one origin as
    part of looking a file up: only another origin is a place to download from.
    """

    def __init__(self, port: int = 0, bandwidth: float | None = None) -> None:
        self.repos: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.faults: Schedule = no_faults
        self.page_size = 1000  # entries in a page of a tree; 50 at most with expand
        self.link_seconds = 3600.0  # how long a link to the CDN is good for
        self.throttle = Throttle()
        self.bandwidth = bandwidth
        self.stopping = threading.Event()
        self._secret = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._servers = [_Server(self, port), _Server(self, 0)]
        self.url, self.cdn_url = (
            f"http://127.0.0.1:{server.server_port}" for server in self._servers
        )

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second that the CDN sends over all connections together, None for no limit."""
        return self.throttle.rate

    @bandwidth.setter
    def bandwidth(self, rate: float | None) -> None:
        self.throttle.rate = rate

    def shards_sent(self) -> dict[str, int]:
        """Bytes of shards that were sent whole or in part, headers by range apart."""
        sent: dict[str, int] = {}
        for request in self.requests:
            path, whole = request.path, request.kind == "cdn" and not request.range
            if whole and path.endswith(".safetensors"):
                sent[path] = sent.get(path, 0) + request.sent
        return sent

    def add_repo(
        self,
        name: str,
        source: Source,
        *,
        sha256: Mapping[str, str] | None = None,
        private: str | None = None,
        gated: str | None = None,
    ) -> Repository:
        """A repository with one commit on main; `private` or `gated` is the token that opens it."""
        repo = Repository(name, private, gated)
        repo.commit(source, sha256=sha256)
        self.repos[name] = repo
        return repo

    def record(self, make_request: partial[Request]) -> Request:
        """Number a request, ask for its fault and keep it."""
        with self._lock:
            request = make_request(number=len(self.requests))
            self.requests.append(request)
            request.fault = self.faults(request)
            return request

    def link(self, repo: str, sha: str, path: str) -> str:
        """A link to the CDN that expires."""
        place = quote(f"/cdn/{repo}/{sha}/{path}")
        expires = f"{time.time() + self.link_seconds:.3f}"
        return f"{self.cdn_url}{place}?Expires={expires}&Signature={self._sign(place, expires)}"

    def link_is_good(self, place: str, query: Mapping[str, str]) -> bool:
        expires = query.get("Expires", "0")
        signed = query.get("Signature") == self._sign(place, expires)
        return signed and time.time() < float(expires)

    def _sign(self, place: str, expires: str) -> str:
        return hashlib.sha256(f"{self._secret} {place} {expires}".encode()).hexdigest()

    def __enter__(self) -> "Hub":
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()
            server.cut()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, hub: Hub, port: int) -> None:
        self._open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), partial(Handler, hub))

    def process_request(self, request: socket.socket, client_address: object) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def cut(self) -> None:
        """End the connections that clients still hold, and with them their threads."""
        for connection in list(self._open):
            with contextlib.suppress(OSError):  # closed meanwhile
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client may leave at any time
            super().handle_error(request, client_address)
