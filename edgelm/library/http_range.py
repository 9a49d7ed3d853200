"""The bytes of hub files over HTTP: one ranged request with its redirects, and the headers of remote GGUFs.

Owns the checks of what servers get wrong about ranges, and the rule that the login goes to the hub's own address only.
A request is not retried here, except by `fetch_headers`. Stores nothing but the headers.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpcore2
import httpx2
from socksio import SOCKSError

from edgelm.base.errors import EdgeLMError, ModelError
from edgelm.library.hub import (
    RETRIED,
    TICK_S,
    Backoff,
    Hub,
    HubFile,
    Listing,
    RetryPolicy,
    failure_reason,
    names_error,
    parse_retry_after,
    within,
)

READ_BYTES = 2**19
DIRECT_BYTES = 2**20  # shorter bodies go through the HTTP library to the end, so that the connection is reused
MAX_RANGE = 32 * 2**30  # the hub's network sends no answer above 50 GB
MAX_REDIRECTS = 10
MAX_REDIRECT_BYTES = 2**16
CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")
FIRST_HEADER_BYTES = 2**20
MAX_SMALL_BYTES = 2**22
MAX_HEADER_BYTES = 2**28  # the largest vocabularies take about 30 MB


class InterruptedTransferError(Exception):
    """The bytes stopped coming, or never came; a retry may help."""

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_s = retry_after_s  # the wait that the server asks for


class CancelledTransferError(Exception):
    """The caller cancelled the transfer."""


@dataclass(frozen=True, slots=True)
class RangeResponse:
    """The bytes `start` to `end` (exclusive) of a file, in pieces."""

    start: int
    end: int
    etag: str | None  # the server's name for this version, strong enough for If-Range
    pieces: Iterator[bytes]


class RangeClient:
    """Requests files of one listing. Threads may share it; each has its own connection."""

    def __init__(self, hub: Hub, listing: Listing, cancelled: threading.Event) -> None:
        from huggingface_hub import get_session

        self.hub = hub
        self.listing = listing
        self.cancelled = cancelled
        self._login = hub.headers()
        self._plain = {"accept-encoding": "identity", "user-agent": self._login.pop("user-agent", "edgelm")}
        self._hub_origin = _origin(httpx2.URL(hub.endpoint))
        self._timeout = httpx2.Timeout(hub.retry.stall_s, connect=hub.retry.connect_s, pool=None)
        self._links: dict[str, httpx2.URL] = {}  # of files, behind the hub's redirects
        self._client = get_session()  # the hub client's, with its proxies, certificates and open connections

    @contextmanager
    def open(
        self, file: HubFile, start: int, etag: str | None = None, end: int | None = None
    ) -> Iterator[RangeResponse]:
        """Request the bytes of a file from `start` on. The server may send the whole file instead.

        Raises InterruptedTransferError if a retry may help, RefusedError if it would not.
        """
        end = min(file.size if end is None else end, start + MAX_RANGE)
        headers = {}
        if start or end < file.size:
            headers["range"] = f"bytes={start}-{end - 1}"
            if etag is not None:
                headers["if-range"] = etag
        try:
            response = within(
                self.hub.retry.answer_s, self.cancelled, lambda: self._send(file, headers), httpx2.Response.close
            )
            try:
                start, end = _checked(response, file, start, end)
                tag = response.headers.get("etag")
                strong = tag if tag and tag.startswith('"') and tag.isprintable() else None
                yield RangeResponse(start, end, strong, self._pieces(response, end - start))
            finally:
                response.close()
        except InterruptedTransferError:
            self._links.pop(file.path, None)
            raise
        except (httpx2.HTTPError, httpx2.InvalidURL, SOCKSError) as error:
            self._links.pop(file.path, None)
            is_bad_url = isinstance(error, httpx2.InvalidURL)
            reason = "the server redirects to an invalid address" if is_bad_url else failure_reason(error)
            raise InterruptedTransferError(reason) from None
        # Direct reads of the connection raise these.
        except (httpcore2.TimeoutException, httpcore2.NetworkError, httpcore2.ProtocolError) as error:
            self._links.pop(file.path, None)
            raise InterruptedTransferError(failure_reason(error)) from None

    def _send(self, file: HubFile, headers: Mapping[str, str]) -> httpx2.Response:
        """Send the request and follow redirects; return the response with the bytes, unread."""
        url = self._links.get(file.path) or httpx2.URL(self.hub.url(self.listing, file.path))
        for _ in range(MAX_REDIRECTS):
            is_hub = _origin(url) == self._hub_origin
            all_headers = {**self._plain, **headers, **(self._login if is_hub else {})}
            request = self._client.build_request("GET", url, headers=all_headers, timeout=self._timeout)
            response = self._client.send(request, stream=True, follow_redirects=False)
            linked = response.headers.get("x-linked-etag", "").removeprefix("W/").strip('"')
            if is_hub and linked and linked != file.blob:
                response.close()
                raise InterruptedTransferError("the hub now has another version of the file")
            if not response.has_redirect_location:
                if response.status_code not in (200, 206):
                    self._refuse(response, url, is_hub=is_hub)
                if not is_hub:  # the next segment needs no redirect
                    self._links[file.path] = url
                return response
            url = url.join(response.headers["location"])
            if int(response.headers.get("content-length", MAX_REDIRECT_BYTES)) < MAX_REDIRECT_BYTES:
                response.read()  # so that the connection is reused
            response.close()
        raise InterruptedTransferError("too many redirects")

    def _refuse(self, response: httpx2.Response, url: httpx2.URL, *, is_hub: bool) -> None:
        status, headers = response.status_code, response.headers
        response.close()
        # On another host a signed link may have expired; a retry gets a new one from the hub. A mirror may redirect to
        # a hub, which refuses in its own words, or by a status that a signed link does not have.
        of_a_hub = status == 401 or (status == 403 and (names_error(headers) or not url.query))
        if status in RETRIED or status == 416 or not (is_hub or of_a_hub):
            raise InterruptedTransferError(f"HTTP {status}", parse_retry_after(headers))
        if not is_hub:
            origin = f"{url.scheme}://{url.netloc.decode()}"
            raise self.hub.refusal_elsewhere(status, headers, self.listing.repository, origin)
        raise self.hub.refusal(status, headers, self.listing.repository, self.listing.revision)

    def _pieces(self, response: httpx2.Response, length: int) -> Iterator[bytes]:
        """Yield `length` bytes of a body, and no more."""
        left = length
        is_plain = "content-length" in response.headers and "transfer-encoding" not in response.headers
        is_direct = left > DIRECT_BYTES and is_plain
        body = response.iter_raw()  # must stay referenced: the connection closes when it is collected
        for piece in body:
            if len(piece) > left:
                raise InterruptedTransferError("the server sent more bytes than it announced")
            left -= len(piece)
            yield piece
            if self.cancelled.is_set():
                raise CancelledTransferError
            if is_direct:
                break
        if left and not is_direct:
            raise InterruptedTransferError("the connection was closed too early")
        # The bytes that the HTTP library read with the headers are used up; the next bytes of the connection are the
        # plain body. Large direct reads: at 64 KiB a read, the library's parsing costs more than the checksum.
        while left:
            piece = self._read(response, left)
            left -= len(piece)
            yield piece

    def _read(self, response: httpx2.Response, left: int) -> bytes:
        """Return the next bytes of the connection. Raises InterruptedTransferError if it stalls."""
        stream: httpcore2.NetworkStream = response.extensions["network_stream"]
        deadline = time.monotonic() + self.hub.retry.stall_s
        while True:
            if self.cancelled.is_set():
                raise CancelledTransferError
            try:
                piece: bytes = stream.read(min(READ_BYTES, left), timeout=min(TICK_S, self.hub.retry.stall_s))
            except httpcore2.ReadTimeout:
                if time.monotonic() >= deadline:
                    raise InterruptedTransferError("the transfer stalled") from None
                continue
            if not piece:
                raise InterruptedTransferError("the connection was closed too early")
            return piece


class SlownessWatch:
    """Detects a connection that delivers only a few bytes now and then."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._nbytes = 0
        self._until = time.monotonic() + policy.stall_s

    def count(self, nbytes: int) -> None:
        """Count received bytes. Raises InterruptedTransferError if they are too few for too long."""
        self._nbytes += nbytes
        if time.monotonic() < self._until:
            return
        if self._nbytes < self._policy.min_bytes:
            raise InterruptedTransferError("the transfer is too slow")
        self._nbytes = 0
        self._until = time.monotonic() + self._policy.stall_s


def fetch_small(hub: Hub, listing: Listing, file: HubFile, cancelled: threading.Event) -> bytes:
    """Return the bytes of a small file. Raises EdgeLMError if the hub does not send them."""
    client = RangeClient(hub, listing, cancelled)
    backoff = Backoff(hub.retry, cancelled)
    while True:
        try:
            with client.open(file, 0, end=min(file.size, MAX_SMALL_BYTES)) as response:
                return b"".join(response.pieces)
        except InterruptedTransferError as error:
            if not backoff.wait(error.retry_after_s):
                if cancelled.is_set():
                    raise CancelledTransferError from None
                message = f"{file.path} cannot be fetched from {hub.host}: {error.reason}"
                raise EdgeLMError(message, "run it again later") from None


def fetch_headers(hub: Hub, listing: Listing, shards: Sequence[HubFile], folder: Path) -> Path:
    """Fetch the headers of a GGUF's shards into a folder, no byte twice; return the path of the first.

    Each file has its full length; the rest of it is a hole, which takes no disk space. Raises EdgeLMError if the hub
    does not send them, ModelError if they cannot be read.
    """
    from edgelm.checkpoints.gguf import open_gguf  # a pull needs no numpy

    cancelled = threading.Event()
    client = RangeClient(hub, listing, cancelled)
    headers = [_RemoteHeader(client, file, folder) for file in shards]
    first = headers[0].path
    while True:
        for header in headers:
            header.grow()
        try:
            with open_gguf(first) as gguf:
                start = min((tensor.offset for tensor in gguf.tensors.values()), default=0)
        except ModelError:
            if all(header.is_complete for header in headers):
                raise
            continue
        if start <= headers[0].length or headers[0].is_complete:
            return first


class _RemoteHeader:
    """The first bytes of one remote file, in a local file of the full length."""

    def __init__(self, client: RangeClient, file: HubFile, folder: Path) -> None:
        self.path = folder / Path(file.path).name
        self.length = 0
        self._client = client
        self._file = file
        self._backoff = Backoff(client.hub.retry, client.cancelled)
        with self.path.open("wb") as whole:
            whole.truncate(file.size)

    @property
    def is_complete(self) -> bool:
        return self.length >= min(self._file.size, MAX_HEADER_BYTES)

    def grow(self) -> None:
        """Double the number of fetched bytes."""
        goal = min(self._file.size, max(FIRST_HEADER_BYTES, 2 * self.length), MAX_HEADER_BYTES)
        with self.path.open("r+b") as whole:
            while self.length < goal:
                try:
                    with self._client.open(self._file, self.length, end=goal) as response:
                        self._write(whole.fileno(), response.start, goal, response.pieces)
                except InterruptedTransferError as error:
                    if not self._backoff.wait(error.retry_after_s):
                        message = f"{self._file.path} cannot be fetched from {self._client.hub.host}: {error.reason}"
                        raise EdgeLMError(message, "run it again later") from None

    def _write(self, descriptor: int, at: int, goal: int, pieces: Iterator[bytes]) -> None:
        for piece in pieces:
            os.pwrite(descriptor, piece, at)
            at += len(piece)
            self.length = max(self.length, min(at, goal))
            if self.length == goal:
                return  # a server without range support would send the rest too


def _checked(response: httpx2.Response, file: HubFile, start: int, end: int) -> tuple[int, int]:
    """Return the range of the file that a response holds. Raises InterruptedTransferError if it is impossible."""
    headers = response.headers
    if headers.get("content-encoding", "identity") != "identity":
        raise InterruptedTransferError("the server compressed the file")
    if response.status_code == 206:
        match = CONTENT_RANGE.fullmatch(headers.get("content-range", "").strip())
        if match is None or int(match[1]) != start or not start < int(match[2]) + 1 <= end:
            raise InterruptedTransferError("the server sent another range than requested")
        if match[3] not in ("*", str(file.size)):
            raise InterruptedTransferError(f"the server's file has {int(match[3]):,} bytes, the hub's {file.size:,}")
        end = int(match[2]) + 1
    else:
        start, end = 0, file.size
    announced = headers.get("content-length")
    is_page = headers.get("content-type", "").startswith("text/html") and not file.path.endswith((".html", ".htm"))
    if announced is not None and announced != str(end - start):
        if is_page:
            raise InterruptedTransferError("a web page came in place of the file: perhaps the network asks for a login")
        raise InterruptedTransferError(f"the server sends {announced} bytes instead of {end - start:,}")
    return start, end


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host.lower(), url.port or {"http": 80, "https": 443}.get(url.scheme)
