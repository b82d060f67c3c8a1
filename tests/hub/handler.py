"""The HTTP side of the test Hub: what the client asks, and how each fault looks on the wire."""

import io
import json
import os
import re
import socket
import struct
import time
from functools import partial
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import parse_qs, parse_qsl, unquote, urlencode

from hub.faults import Fault, Request
from hub.repository import File, Repository, expanded

if TYPE_CHECKING:
    from hub.server import Hub

NO_FAULT = Fault("delay", seconds=0)
API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(.*))?")
RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
CDN = re.compile(r"/cdn/([^/]+/[^/]+)/([^/]+)/(.+)")
RANGE = re.compile(r"bytes=(\d*)-(\d*)")


class Refused(Exception):  # noqa: N818 (an answer, not a failure of ours)
    """An answer other than success, as the Hub words it."""

    def __init__(self, status: int, code: str = "", message: str = "", **headers: str) -> None:
        self.status = status
        self.message = message
        named = {"X-Error-Code": code, "X-Error-Message": message}
        self.headers = {name: value for name, value in named.items() if value} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes

    def __init__(self, hub: "Hub", *arguments: object) -> None:
        self.hub = hub
        super().__init__(*arguments)

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        # The body is read whatever the answer, or it would be taken for the next request.
        self.content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.place, _, query = self.path.partition("?")
        self.query = dict(parse_qsl(query))
        if api := API.fullmatch(self.place):
            answer, kind = partial(self.api, api[2] or ""), "api"
            repo, path = api[1], unquote(api[2] or "")
        elif resolve := RESOLVE.fullmatch(self.place):
            repo, path, kind = resolve[1], unquote(resolve[3]), "resolve"
            answer = partial(self.resolve, unquote(resolve[2]), path)
        elif cdn := CDN.fullmatch(self.place):
            repo, path, kind = cdn[1], unquote(cdn[3]), "cdn"
            answer = partial(self.cdn, cdn[2], path)
        else:
            # Telemetry and its like come when they please: they are no requests to count.
            self.request_seen = Request(-1, "api", self.command, "", self.path)
            return self.refuse(Refused(404, message="Not Found"))
        self.request_seen = self.hub.record(
            partial(
                Request,
                kind=kind,
                method=self.command,
                repo=repo,
                path=path,
                range=self.headers.get("Range"),
                token=self.headers.get("Authorization", "").removeprefix("Bearer ") or None,
            )
        )
        self.answer(repo, answer)

    do_HEAD = do_POST = do_GET  # noqa: N815

    def answer(self, repo: str, answer: partial) -> None:
        """Answer, unless a fault comes before."""
        fault = self.fault
        try:
            match fault:
                case Fault("delay", after=None):
                    if self.hub.stopping.wait(fault.seconds):
                        self.close_connection = True
                        return
                case Fault("reset", after=None):
                    return self.reset()
                case Fault("status"):
                    wait = fault.retry_after
                    again = {} if wait is None else {"Retry_After": str(wait)}
                    raise Refused(fault.status, message="a fault was asked for", **again)
                case Fault("redirect"):
                    raise Refused(307, Location=self.path)
                case Fault("expired"):
                    raise Refused(403, message="Request has expired")
            answer(self.repository(repo))
        except Refused as refused:
            self.refuse(refused)

    @property
    def fault(self) -> Fault:
        return self.request_seen.fault or NO_FAULT

    # -- what is asked ---------------------------------------------------------------------------

    def repository(self, name: str) -> Repository:
        repo = self.hub.repos.get(name)
        token = self.request_seen.token
        if self.request_seen.kind != "cdn" and (
            repo is None or (repo.private is not None and repo.private != token)
        ):
            # The client takes a bare 401 for an unknown repository only from an https endpoint.
            status, message = (404, "Repository not found") if token else (401, "Invalid username")
            raise Refused(status, "RepoNotFound", message)
        if repo is None:
            raise Refused(404, message="Not Found")
        return repo

    def commit(self, repo: Repository, revision: str) -> str:
        sha = repo.resolve(revision)
        if sha is None:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha

    def api(self, rest: str, repo: Repository) -> None:
        what, _, rest = rest.partition("/")
        revision, _, folder = rest.partition("/")
        sha = self.commit(repo, unquote(revision) or "main")
        match self.command, what:
            case "GET", "" | "revision":
                self.send_json(repo.info(sha, blobs=_true(self.query.get("blobs"))))
            case "GET", "tree":
                self.tree(repo, sha, unquote(folder))
            case "POST", "paths-info":
                self.send_json(self.paths_info(repo, sha))
            case _:
                raise Refused(404, message="Not Found")

    def tree(self, repo: Repository, sha: str, folder: str) -> None:
        """One page, and a Link to the next."""
        entries = repo.tree(sha, folder, _true(self.query.get("recursive")))
        if entries is None:
            raise Refused(404, "EntryNotFound", f"{folder} does not exist on {sha}")
        expand = _true(self.query.get("expand"))
        size = min(self.hub.page_size, 50) if expand else self.hub.page_size
        first = int(self.query.get("cursor", 0))
        page = entries[first : first + size]
        headers = {}
        if first + size < len(entries):
            query = urlencode(self.query | {"cursor": str(first + size)})
            headers["Link"] = f'<{self.hub.url}{self.place}?{query}>; rel="next"'
        self.send_json([expanded(entry, sha) for entry in page] if expand else page, headers)

    def paths_info(self, repo: Repository, sha: str) -> list[dict]:
        if "json" in self.headers.get("Content-Type", ""):
            form = json.loads(self.content)
            paths, expand = form["paths"], form.get("expand", False)
        else:
            fields = parse_qs(self.content.decode())
            paths, expand = fields.get("paths", []), _true(fields.get("expand", [""])[0])
        entries = repo.paths(sha, paths)
        return [expanded(entry, sha) for entry in entries] if expand else entries

    def resolve(self, revision: str, path: str, repo: Repository) -> None:
        if repo.gated is not None and repo.gated != self.request_seen.token:
            status = 403 if self.request_seen.token else 401
            raise Refused(status, "GatedRepo", f"Access to model {repo.name} is restricted.")
        sha = self.commit(repo, revision)
        file = repo.commits[sha].get(path)
        if file is None:
            raise Refused(404, "EntryNotFound", "Entry not found", X_Repo_Commit=sha)
        headers = {"X-Repo-Commit": sha}
        if not file.is_lfs:
            return self.send_file(file, headers)
        size = file.size + (self.fault.delta if self.fault.kind == "resize" else 0)
        headers["X-Linked-Etag"] = f'"{file.etag}"'
        headers["X-Linked-Size"] = str(size)
        headers["Location"] = self.hub.link(repo.name, sha, path)
        self.begin(302, headers | {"Content-Length": "0"})

    def cdn(self, sha: str, path: str, repo: Repository) -> None:
        if not self.hub.link_is_good(self.place, self.query):
            raise Refused(403, message="Request has expired")
        self.send_file(repo.commits[sha][path], {})

    # -- how it is answered ----------------------------------------------------------------------

    def begin(self, status: int, headers: dict[str, str]) -> None:
        self.request_seen.status = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def refuse(self, refused: Refused) -> None:
        content = json.dumps({"error": refused.message}).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(content))}
        self.begin(refused.status, headers | refused.headers)
        if self.command != "HEAD":
            self.request_seen.sent += len(content)
            self.wfile.write(content)

    def send_json(self, value: object, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(value).encode()
        about = {"Content-Type": "application/json", "Content-Length": str(len(content))}
        self.begin(200, about | (headers or {}))
        self.send_body(io.BytesIO(content), 0, len(content))

    def send_file(self, file: File, headers: dict[str, str]) -> None:
        """A file or the range of it that was asked for."""
        fault = self.fault
        etag = f'"{file.etag}"'
        headers |= {"ETag": etag, "Accept-Ranges": "bytes"}
        size = max(0, file.size + (fault.delta if fault.kind == "resize" else 0))
        asked = RANGE.fullmatch(self.headers.get("Range", ""))
        if fault.kind == "whole" or self.headers.get("If-Range", etag) != etag:
            asked = None
        status, start, stop = 200, 0, size
        if asked and any(asked.groups()):
            start, stop = _span(asked[1], asked[2], size)
            if start >= stop:
                raise Refused(416, Content_Range=f"bytes */{size}")
            if fault.kind == "range":
                by = fault.offset or 1
                by = -by if start >= by else by
                beside = start + by, min(stop + by, size)
                start, stop = beside if beside[0] < beside[1] else (start, stop)
            status = 206
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        length = stop - start
        if fault.kind == "truncated":
            length = self.cut(length)
        self.begin(status, headers | {"Content-Length": str(length)})
        with file.path.open("rb") as source:
            self.send_body(source, start, length)

    def cut(self, length: int) -> int:
        """Where in a body the fault comes."""
        after = self.fault.after
        return length // 2 if after is None else min(after, length)

    def send_body(self, source: BinaryIO, start: int, length: int) -> None:
        """Send these bytes, as the fault lets them."""
        if self.command == "HEAD":
            return
        source.seek(start)
        match self.fault:
            case Fault("short"):
                self.send_bytes(source, start, self.cut(length), length)
                self.close_connection = True
            case Fault("reset"):
                self.send_bytes(source, start, self.cut(length), length)
                time.sleep(0.05)  # a reset throws away what the network still holds
                self.reset()
            case Fault("delay", after=after) if after is not None:
                first = self.cut(length)
                self.send_bytes(source, start, first, length)
                if self.hub.stopping.wait(self.fault.seconds):
                    self.close_connection = True
                else:
                    self.send_bytes(source, start + first, length - first, length)
            case _:
                self.send_bytes(source, start, length, length)

    def send_bytes(self, source: BinaryIO, start: int, count: int, length: int) -> None:
        throttle = self.hub.throttle if self.request_seen.kind == "cdn" else None
        flipped = -1
        if self.fault.kind == "corrupt":
            offset = self.fault.offset
            flipped = start + length // 2 if offset is None else offset
        position, stop = start, start + count
        while position < stop:
            size = min(throttle.piece() if throttle else 1 << 16, stop - position)
            if throttle and (wait := throttle.wait_for(size)) and self.hub.stopping.wait(wait):
                self.close_connection = True
                return
            # A file that was said to be longer than it is ends in zeros.
            piece = bytearray(source.read(size).ljust(size, b"\0"))
            if position <= flipped < position + size:
                piece[flipped - position] ^= 0xFF
            # Counted first: a client that has the last byte finds it in the record.
            self.request_seen.sent += size
            self.wfile.write(piece)
            position += size

    def reset(self) -> None:
        """Close with a reset in the place of a good-bye."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.connection.detach())  # at once, though files still refer to the socket
        self.close_connection = True


def _span(first: str, last: str, size: int) -> tuple[int, int]:
    """The first byte of a range and the one behind its last."""
    if not first:
        return max(0, size - int(last)), size
    return int(first), min(int(last) + 1, size) if last else size


def _true(value: str | None) -> bool:
    return (value or "").lower() in ("1", "true")
