"""One answer of a server with bytes of a file: redirects, ranges and what servers get wrong about them.

Owns the request, and the rule that the login goes to the hub's own address and nowhere else. Knows nothing of what is
done with the bytes, and tries nothing twice.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import httpcore2
import httpx2
from socksio import SOCKSError

from edgelm.library.hub import RETRIED, Hub, HubFile, Listing, reason
from edgelm.library.patience import Patience, retry_after_s

READ_BYTES = 2**19
DIRECT_BYTES = 2**20  # shorter bodies go through the HTTP library to the end, and the connection is used again
TICK_S = 0.5  # how soon a cancelled transfer ends
MAX_RANGE = 32 * 2**30  # the hub's network gives no answer above 50 GB
MAX_REDIRECTS = 10
MAX_REDIRECT_BYTES = 2**16
CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")


class InterruptedTransferError(Exception):
    """The bytes stopped coming, or never came: it may go on in the next try."""

    def __init__(self, why: str, asked_s: float | None = None) -> None:
        super().__init__(why)
        self.why = why
        self.asked_s = asked_s  # the server's wish, in seconds


class CancelledTransferError(Exception):
    """Whoever wanted the bytes does no longer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Bytes of a file from `start` on."""

    start: int
    end: int  # behind the last byte that this answer brings
    etag: str | None  # the sender's name for this version, strong enough for If-Range
    pieces: Iterator[bytes]


class Source:
    """Where the files of one listing come from. May be used by several threads, each has one connection."""

    def __init__(self, hub: Hub, listing: Listing, cancelled: threading.Event) -> None:
        from huggingface_hub import get_session

        self.hub = hub
        self.listing = listing
        self.cancelled = cancelled
        self._login = hub.headers()
        self._plain = {"accept-encoding": "identity", "user-agent": self._login.pop("user-agent", "edgelm")}
        self._hub_origin = _origin(httpx2.URL(hub.endpoint))
        self._timeout = httpx2.Timeout(hub.patience.stall_s, connect=hub.patience.connect_s, pool=None)
        self._client = get_session()  # the hub client's, with its proxies, certificates and open connections

    @contextmanager
    def open(self, file: HubFile, start: int, etag: str | None = None, end: int | None = None) -> Iterator[Answer]:
        """Ask for the bytes of a file from `start` on; those from 0 on may come instead.

        Raises InterruptedTransferError where another try may help, RefusedError where it would not.
        """
        end = min(file.size if end is None else end, start + MAX_RANGE)
        headers = {}
        if start or end < file.size:
            headers["range"] = f"bytes={start}-{end - 1}"
            if etag is not None:
                headers["if-range"] = etag
        try:
            response = self._send(file, headers)
            try:
                start, end = _checked(response, file, start, end)
                found = response.headers.get("etag")
                strong = found if found and found.startswith('"') and found.isprintable() else None
                yield Answer(start, end, strong, self._pieces(response, end - start))
            finally:
                response.close()
        except (httpx2.HTTPError, httpx2.InvalidURL, SOCKSError) as error:
            why = "a redirect leads nowhere" if isinstance(error, httpx2.InvalidURL) else reason(error)
            raise InterruptedTransferError(why) from None
        except (
            httpcore2.TimeoutException,
            httpcore2.NetworkError,
            httpcore2.ProtocolError,
        ) as error:  # of direct reads
            raise InterruptedTransferError(reason(error)) from None

    def _send(self, file: HubFile, headers: Mapping[str, str]) -> httpx2.Response:
        """Send the request along the redirects; return the answer that has the bytes, unread."""
        url = httpx2.URL(self.hub.url(self.listing, file.path))
        for _ in range(MAX_REDIRECTS):
            own = _origin(url) == self._hub_origin
            sent = {**self._plain, **headers, **(self._login if own else {})}
            request = self._client.build_request("GET", url, headers=sent, timeout=self._timeout)
            response = self._client.send(request, stream=True, follow_redirects=False)
            linked = response.headers.get("x-linked-etag", "").removeprefix("W/").strip('"')
            if own and linked and linked != file.blob:
                response.close()
                raise InterruptedTransferError("the hub names another version of the file than before")
            if not response.has_redirect_location:
                if response.status_code not in (200, 206):
                    self._refuse(response, own)
                return response
            url = url.join(response.headers["location"])
            if int(response.headers.get("content-length", MAX_REDIRECT_BYTES)) < MAX_REDIRECT_BYTES:
                response.read()  # then the connection is used again
            response.close()
        raise InterruptedTransferError("too many redirects")

    def _refuse(self, response: httpx2.Response, own: bool) -> None:
        status, headers = response.status_code, response.headers
        response.close()
        if status in RETRIED or status == 416 or not own:  # elsewhere: a link that expired, made anew by the hub
            raise InterruptedTransferError(f"HTTP {status}", retry_after_s(headers))
        raise self.hub.refusal(status, headers, self.listing.repository, self.listing.revision)

    def _pieces(self, response: httpx2.Response, length: int) -> Iterator[bytes]:
        """Yield `length` bytes of a body, and no more."""
        left = length
        is_plain = "content-length" in response.headers and "transfer-encoding" not in response.headers
        direct = left > DIRECT_BYTES and is_plain
        body = response.iter_raw()  # a name of its own: the connection closes when it goes
        for piece in body:
            if len(piece) > left:
                raise InterruptedTransferError("more bytes come than were announced")
            left -= len(piece)
            yield piece
            if self.cancelled.is_set():
                raise CancelledTransferError
            if direct:
                break
        if left and not direct:
            raise InterruptedTransferError("the connection was closed too early")
        # What the HTTP library had read with the headers is out; the rest of a plain body is the connection's next
        # bytes. Read in big pieces without it: at 64 KiB each, its parsing costs more than hashing does.
        while left:
            piece = self._read(response, left)
            left -= len(piece)
            yield piece

    def _read(self, response: httpx2.Response, left: int) -> bytes:
        """Return the next bytes of the connection; give up a connection that stands still."""
        stream: httpcore2.NetworkStream = response.extensions["network_stream"]
        deadline = time.monotonic() + self.hub.patience.stall_s
        while True:
            if self.cancelled.is_set():
                raise CancelledTransferError
            try:
                piece: bytes = stream.read(min(READ_BYTES, left), timeout=min(TICK_S, self.hub.patience.stall_s))
            except httpcore2.ReadTimeout:
                if time.monotonic() >= deadline:
                    raise InterruptedTransferError("nothing came for a while") from None
                continue
            if not piece:
                raise InterruptedTransferError("the connection was closed too early")
            return piece


class SlownessWatch:
    """Notices a connection that gives a few bytes now and then."""

    def __init__(self, patience: Patience) -> None:
        self.patience = patience
        self._came = 0
        self._until = time.monotonic() + patience.stall_s

    def count(self, nbytes: int) -> None:
        """Count what came. Raises InterruptedTransferError where it is too little for too long."""
        self._came += nbytes
        if time.monotonic() < self._until:
            return
        if self._came < self.patience.least_bytes:
            raise InterruptedTransferError("almost nothing comes")
        self._came = 0
        self._until = time.monotonic() + self.patience.stall_s


def _checked(response: httpx2.Response, file: HubFile, start: int, end: int) -> tuple[int, int]:
    """Return where the bytes of an answer begin and end in the file, if that is possible at all."""
    headers = response.headers
    if headers.get("content-encoding", "identity") != "identity":
        raise InterruptedTransferError("the server compresses what must come as it is")
    if response.status_code == 206:
        match = CONTENT_RANGE.fullmatch(headers.get("content-range", "").strip())
        if match is None or int(match[1]) != start or not start < int(match[2]) + 1 <= end:
            raise InterruptedTransferError("the server answers another range than was asked for")
        if match[3] not in ("*", str(file.size)):
            raise InterruptedTransferError(f"the server's file has {int(match[3]):,} bytes, the hub's {file.size:,}")
        end = int(match[2]) + 1
    else:
        start, end = 0, file.size
    announced = headers.get("content-length")
    if announced is not None and announced != str(end - start):
        raise InterruptedTransferError(f"the server offers {announced} bytes where {end - start:,} belong")
    return start, end


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host.lower(), url.port or {"http": 80, "https": 443}.get(url.scheme)
