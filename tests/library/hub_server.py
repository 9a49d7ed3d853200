"""A local server with the hub's protocol and ordered faults: it lies, stalls, drops and refuses.

    GET  /api/models/OWNER/NAME[/revision/REV]?blobs=True     what a repository holds (also /tree/REV)
    HEAD, GET /OWNER/NAME/resolve/REV/FILE                    small files at once; large ones by a redirect
    GET  /cdn/HASH                                            on another port: ranges, If-Range, an ETag of its own

It counts the bytes that it sends, and records the requests and their logins.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import ssl
import struct
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

PIECE = 2**15
PAGE = b"<!doctype html><title>Welcome to our network</title>" + bytes(b" " * 2000)
LARGE = 2**10  # files of this size or more are in large file storage


@dataclass
class StoredFile:
    """A file of the server: in memory or on disk."""

    path: str
    content: bytes | Path
    large: bool
    blob: str = ""
    size: int = 0

    def __post_init__(self) -> None:
        self.size = len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size
        if self.blob:
            return
        if isinstance(self.content, Path):
            with self.content.open("rb") as file:
                self.blob = hashlib.file_digest(file, "sha256").hexdigest()
        elif self.large:
            self.blob = hashlib.sha256(self.content).hexdigest()
        else:
            self.blob = hashlib.sha1(b"blob %d\0" % self.size + self.content).hexdigest()

    def read(self, start: int, end: int) -> bytes:
        if isinstance(self.content, bytes):
            return self.content[start:end]
        with self.content.open("rb") as file:
            file.seek(start)
            return file.read(end - start)


@dataclass
class Fault:
    """A fault of the next requests for a file's bytes.

    kind: reset, close, stall (after so many bytes of the answer), flip (one byte at that offset of the file), status,
    range (another range than requested), length (a Content-Length that is `by` off), whole (200 in place of 206), gzip,
    size (another size in Content-Range), drip (a byte now and then), headers (which drip),
    page (of the network's login).
    """

    kind: str
    after: int = 0
    times: int = 1
    status: int = 500
    by: int = 0
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Sent:
    """One answer with bytes of a file."""

    path: str
    start: int
    count: int = 0
    range: str | None = None
    if_range: str | None = None
    login: str | None = None
    status: int = 0

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass
class Repo:
    name: str
    files: dict[str, StoredFile]
    commit: str
    revisions: dict[str, str]
    gated: bool = False
    private: bool = False
    licence: str = "apache-2.0"


class HubServer:
    """The hub on one port, its file servers on another. Use as a context manager."""

    def __init__(
        self,
        rate: float | None = None,
        cdn_etag: str = '"cdn-%s"',
        send_buffer: int | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.rate = rate  # bytes a second of each answer
        self.cdn_etag = cdn_etag
        self.send_buffer = send_buffer
        self.tls = tls
        self.together = 0  # answers after the first that must have begun before one of them sends a byte
        self.at_most = 1000  # answers at a time; others are refused
        self.open_answers = 0
        self.begun_answers = 0
        self.token = "hf_right"
        self.repos: dict[str, Repo] = {}
        self.renamed: dict[str, str] = {}
        self.faults: dict[str, list[Fault]] = {}  # path in the repository: the next faults
        self.api_faults: list[Fault] = []
        self.requests: list[tuple[str, str, str | None]] = []  # method, path, authorization
        self.agents: list[tuple[str, str]] = []  # path, User-Agent; of both servers
        self.sent: list[Sent] = []
        self.changed = threading.Condition()
        self.stopping = threading.Event()
        self._servers = [self._serve(HubHandler), self._serve(CdnHandler)]
        scheme = "http" if tls is None else "https"
        self.url, self.cdn = (f"{scheme}://127.0.0.1:{server.server_address[1]}" for server in self._servers)

    def _serve(self, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
        bound = type(handler.__name__, (handler,), {"hub": self})
        server = _Server(("127.0.0.1", 0), bound)
        if self.tls is not None:  # the handshake is the handler's, at its first read
            server.socket = self.tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return server

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stopping.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def add(self, name: str, files: dict[str, bytes | Path], *, commit: str = "c" * 40, **more: Any) -> Repo:
        """Add a repository; files of a kilobyte or more, and weights, are large ones."""
        stored = {
            path: StoredFile(path, content, isinstance(content, Path) or len(content) >= LARGE)
            for path, content in files.items()
        }
        repo = Repo(name, stored, commit, {"main": commit, commit: commit, "v1": commit}, **more)
        self.repos[name] = repo
        return repo

    def order(self, path: str, *faults: Fault) -> None:
        self.faults.setdefault(path, []).extend(faults)

    def next_fault(self, path: str) -> Fault | None:
        with self.changed:
            waiting = self.faults.get(path)
            if not waiting:
                return None
            fault = waiting[0]
            fault.times -= 1
            if fault.times <= 0:
                waiting.pop(0)
            return fault

    def may_answer(self) -> bool:
        """Count one more answer; wait until enough have begun, or return False if too many are sent already."""
        with self.changed:
            if self.open_answers >= self.at_most:
                return False
            self.open_answers += 1
            self.begun_answers += 1
            self.changed.notify_all()
            if self.begun_answers > 1:
                assert self.changed.wait_for(lambda: self.begun_answers > self.together, 30), "too few requests"
        return True

    def sent_bytes(self, path: str | None = None) -> int:
        return sum(sent.count for sent in self.sent if path is None or sent.path == path)

    def wait_for_bytes(self, count: int, timeout_s: float = 30) -> None:
        """Wait until so many bytes of files were sent."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.sent_bytes() >= count, timeout_s), "nothing was downloaded"

    def metadata_requests(self) -> int:
        return sum(path.startswith("/api/") for _, path, _ in self.requests)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass

    def parse_request(self) -> bool:
        is_valid = super().parse_request()
        if is_valid:
            self.hub.agents.append((urlsplit(self.path).path, self.headers["user-agent"] or ""))
        return is_valid

    def setup(self) -> None:
        super().setup()
        if self.hub.send_buffer is not None:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.hub.send_buffer)

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, code: str = "", message: str = "", **headers: str) -> None:
        named = {"X-Error-Code": code, "X-Error-Message": message}
        self.reply(status, json.dumps({"error": message}).encode(), **{k: v for k, v in named.items() if v}, **headers)

    def drip_headers(self) -> None:
        """Send a header that never ends, a byte now and then."""
        self.wfile.write(b"HTTP/1.1 200 OK\r\nx-slow: ")
        while not self.hub.stopping.wait(0.05):
            self.wfile.write(b"a")

    def send_file(self, file: StoredFile, etag: str, **headers: str) -> None:
        """Answer with the requested bytes, and with the next ordered fault."""
        fault = self.hub.next_fault(file.path) or Fault("none")
        if fault.kind == "status":
            self.refuse(fault.status, **fault.headers)
            return
        if fault.kind == "headers":
            self.drip_headers()
        if fault.kind == "page":
            self.reply(200, PAGE, content_type="text/html")
            return
        if self.command == "GET" and not self.hub.may_answer():
            self.refuse(503)
            return
        try:
            self._answer(file, etag, fault, headers)
        finally:
            with self.hub.changed:
                self.hub.open_answers -= self.command == "GET"
                self.hub.changed.notify_all()

    def _answer(self, file: StoredFile, etag: str, fault: Fault, headers: dict[str, str]) -> None:
        start, end, status = self._range(file, etag, fault)
        sent = Sent(
            file.path, start, 0, self.headers["range"], self.headers["if-range"], self.headers["authorization"], status
        )
        if self.command == "GET":
            self.hub.sent.append(sent)
        if status == 416:
            self.refuse(416, content_range=f"bytes */{file.size}")
            return
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("etag", etag)
        self.send_header("accept-ranges", "bytes")
        if status == 206:
            off = 1 if fault.kind == "range" else 0
            size = file.size + (fault.by if fault.kind == "size" else 0)
            self.send_header("content-range", f"bytes {start + off}-{end - 1 + off}/{size}")
        if fault.kind == "gzip":
            self.send_header("content-encoding", "gzip")
        self.send_header("content-length", str(end - start + (fault.by if fault.kind == "length" else 0)))
        self.end_headers()
        if self.command == "GET":
            self._send(file, start, end, fault, sent)

    def _range(self, file: StoredFile, etag: str, fault: Fault) -> tuple[int, int, int]:
        requested = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["range"] or "")
        if requested is None or fault.kind == "whole" or self.headers["if-range"] not in (None, etag):
            return 0, file.size, 200
        start, end = int(requested[1]), min(file.size, int(requested[2] or file.size) + 1)
        return (start, end, 206) if start < end else (0, 0, 416)

    def _send(self, file: StoredFile, start: int, end: int, fault: Fault, sent: Sent) -> None:
        if fault.kind == "none" and self.hub.rate is None and isinstance(file.content, Path):
            with file.content.open("rb") as opened:  # as fast as this machine sends
                sent.count = end - start
                sent.count = self.connection.sendfile(opened, start, end - start)
            return
        begun = time.monotonic()
        at = start
        while at < end:
            stop = min(at + PIECE, end)
            if fault.kind in ("reset", "close", "stall"):
                stop = min(stop, start + fault.after)
            if fault.kind == "drip":
                stop = at + 1
            piece = file.read(at, stop)
            if fault.kind == "flip" and at <= fault.after < stop:
                piece = bytearray(piece)
                piece[fault.after - at] ^= 1
            if piece:
                with self.hub.changed:  # before it is sent: a client that has it may look at once
                    sent.count += len(piece)
                    self.hub.changed.notify_all()
                self.connection.sendall(piece)
                at = stop
            if fault.kind in ("reset", "close", "stall") and at >= start + fault.after:
                self._break(fault)
                return
            if fault.kind == "drip":
                self.hub.stopping.wait(0.05)
            if self.hub.rate is not None:
                time.sleep(max(0.0, (at - start) / self.hub.rate - (time.monotonic() - begun)))

    def _break(self, fault: Fault) -> None:
        self.close_connection = True
        if fault.kind == "stall":
            self.hub.stopping.wait(60)
        if fault.kind == "reset":  # what is on its way is thrown away as well
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()


class HubHandler(_Handler):
    """The hub itself."""

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.hub.requests.append((self.command, path, self.headers["authorization"]))
        for old, new in self.hub.renamed.items():
            if f"/{old}" in path:
                self.reply(307, location=self.path.replace(f"/{old}", f"/{new}", 1))
                return
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
            self._api(match[1], match[2], unquote(match[3] or "main"))
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(match[1], unquote(match[2]), unquote(match[3]))
        else:
            self.refuse(404)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _api(self, name: str, kind: str | None, revision: str) -> None:
        with self.hub.changed:
            fault = self.hub.api_faults.pop(0) if self.hub.api_faults else None
        if fault is not None:
            if fault.kind == "stall":
                self.hub.stopping.wait(60)
            if fault.kind == "headers":
                self.drip_headers()
            if fault.kind == "page":
                self.reply(200, PAGE, content_type="text/html")
                return
            self.refuse(fault.status, **fault.headers)
            return
        repo = self._repo(name)
        if repo is None:
            return
        if revision not in repo.revisions:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        siblings = [self._sibling(file) for file in repo.files.values()]
        if kind == "tree":
            answer: object = [{"type": "file", "oid": "0" * 40, "path": file["rfilename"], **file} for file in siblings]
        else:
            answer = {
                "id": repo.name, "modelId": repo.name, "sha": repo.revisions[revision], "siblings": siblings,
                "private": repo.private, "gated": "auto" if repo.gated else False, "tags": [],
                "cardData": {"license": repo.licence},
            }  # fmt: skip
        self.reply(200, json.dumps(answer).encode(), content_type="application/json")

    def _sibling(self, file: StoredFile) -> dict[str, Any]:
        entry: dict[str, Any] = {"rfilename": file.path, "size": file.size, "blobId": file.blob}
        if file.large:
            entry["blobId"] = "b" * 40
            entry["lfs"] = {"oid": file.blob, "sha256": file.blob, "size": file.size, "pointerSize": 134}
        return entry

    def _repo(self, name: str) -> Repo | None:
        repo = self.hub.repos.get(name)
        login = self.headers["authorization"]
        if login is not None and login != f"Bearer {self.hub.token}":
            self.refuse(401, message="Invalid credentials in Authorization header")
            return None
        if repo is None or (repo.private and login is None):
            if login is None:
                self.refuse(401, message="Invalid username or password.")
            else:
                self.refuse(404, "RepoNotFound", "Repository not entry")
            return None
        return repo

    def _resolve(self, name: str, revision: str, path: str) -> None:
        repo = self._repo(name)
        if repo is None:
            return
        if repo.gated and self.headers["authorization"] is None:
            self.refuse(401, "GatedRepo", f"Access to model {name} is restricted.")
            return
        file = repo.files.get(path)
        if file is None:
            self.refuse(404, "EntryNotFound", "Entry not entry")
            return
        named = {"X_Repo_Commit": repo.commit}
        if not file.large:
            self.send_file(file, f'"{file.blob}"', **named)
            return
        named |= {"X_Linked_Etag": f'"{file.blob}"', "X_Linked_Size": str(file.size), "ETag": f'"{file.blob}"'}
        self.reply(302, Location=f"{self.hub.cdn}/cdn/{repo.name}/{path}?signature=1", **named)


class CdnHandler(_Handler):
    """Where large files are."""

    def do_GET(self) -> None:
        owner, name, path = unquote(urlsplit(self.path).path).removeprefix("/cdn/").split("/", 2)
        file = self.hub.repos[f"{owner}/{name}"].files[path]
        etag = self.hub.cdn_etag % file.blob[:8] if "%s" in self.hub.cdn_etag else self.hub.cdn_etag
        self.send_file(file, etag)

    def do_HEAD(self) -> None:
        self.do_GET()
