"""HTTP/1.1 to other servers and to engine processes, below httpx2: a token that comes alone costs little.

Owns connections, which are kept for later requests, and their limits of time and memory. llhttp reads the answers.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import select
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

import httptools
import httpx2

HELD_BYTES = 64 * 2**10  # received and not read; then the server waits
EMPTY_BYTES = 128 * 2**10  # received in a row without a byte of a body: no head is longer
NEXT_ADDRESS_S = 0.25  # before the next address of a name is tried too
FULL_S = 0.01  # between two tries to connect where others wait for the same engine
KEPT = "edgelm.kept"  # extension of a request: whether its connection had waited for it
NO_TEXT = re.compile(rb"[\0\r\n]")  # what would end a line of the head

Server = tuple[str, str, int | None]  # scheme, host, port


class Transport(httpx2.AsyncBaseTransport):
    """Sends each request on a connection of its own; up to `kept` of them wait `kept_s` for the next request.

    `context` is that of https. With `uds` all goes to this Unix socket. A request has a length, and is no HEAD.
    """

    def __init__(self, kept: int, kept_s: float, context: ssl.SSLContext | None = None, uds: str | None = None) -> None:
        self._kept, self._kept_s = kept, kept_s
        self._context, self._uds = context, uds
        if context is not None:
            context.set_alpn_protocols(["http/1.1"])
        self._open: set[_Connection] = set()
        self._idle: list[_Connection] = []  # the last one was used last

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Return the answer, whose body is not read yet. Raises TransportError."""
        limits = request.extensions.get("timeout", {})
        host = request.url.raw_host.decode("ascii")  # as httpx2 reads a name; asyncio reads ß as ss
        server = request.url.scheme, host, request.url.port
        kept = self._take(server)
        request.extensions[KEPT] = kept is not None
        connection = kept or await self._connect(server, limits.get("connect"))
        try:
            await connection.send(request, limits.get("write"))
            status, headers = await connection.head(limits.get("read"))
        except BaseException:
            self._end(connection)
            raise
        body = _Body(connection, limits.get("read"), self._give_back)
        return httpx2.Response(status, headers=headers, stream=body)

    async def aclose(self) -> None:
        """End all connections, also those of requests."""
        for connection in self._open:
            connection.end()
        self._open.clear()
        self._idle.clear()
        await asyncio.sleep(0)  # the sockets are closed in the next turn of the loop

    def _take(self, server: Server) -> _Connection | None:
        """Return a connection that waits for a request to this server."""
        oldest = asyncio.get_running_loop().time() - self._kept_s
        for connection in reversed(self._idle.copy()):
            if connection.used_at < oldest or connection.has_ended():
                self._idle.remove(connection)
                self._end(connection)
            elif connection.server == server:
                self._idle.remove(connection)
                return connection
        return None

    def _give_back(self, connection: _Connection) -> None:
        if not connection.can_be_kept or connection not in self._open:
            self._end(connection)
            return
        connection.used_at = asyncio.get_running_loop().time()
        self._idle.append(connection)
        if len(self._idle) > self._kept:
            self._end(self._idle.pop(0))

    def _end(self, connection: _Connection) -> None:
        self._open.discard(connection)
        connection.end()

    async def _connect(self, server: Server, limit_s: float | None) -> _Connection:
        """Return a new connection. Raises ConnectError, ConnectTimeout."""
        loop = asyncio.get_running_loop()
        scheme, host, port = server
        connection = _Connection(server)
        async with _connecting(limit_s):
            if self._uds is not None:
                await loop.create_unix_connection(lambda: connection, sock=await _unix_socket(self._uds))
            else:
                context = self._context if scheme == "https" else None
                await loop.create_connection(
                    lambda: connection,
                    host,
                    port or (443 if context else 80),
                    ssl=context,
                    ssl_handshake_timeout=limit_s if context else None,
                    happy_eyeballs_delay=NEXT_ADDRESS_S,
                )
        self._open.add(connection)
        return connection


@asynccontextmanager
async def _connecting(limit_s: float | None) -> AsyncIterator[None]:
    """Limit the time of the block, and tell what went wrong as httpx2 does."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError as error:
        raise httpx2.ConnectTimeout("no connection in time") from error
    except (ssl.SSLError, socket.gaierror, UnicodeError) as error:  # the last: a part of the name is too long
        raise httpx2.ConnectError(str(error)) from error
    except OSError as error:  # without a number: one of several addresses
        raise httpx2.ConnectError(os.strerror(error.errno) if error.errno else "") from error


async def _unix_socket(path: str) -> socket.socket:
    """Return a connected socket. asyncio takes a listener whose queue is full for one that has answered."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.setblocking(False)
        while True:
            try:
                made.connect(path)
            except BlockingIOError:
                await asyncio.sleep(FULL_S)
            else:
                return made
    except BaseException:
        made.close()
        raise


class _Body(httpx2.AsyncByteStream):
    """The body of an answer. Closing it gives the connection back."""

    def __init__(
        self, connection: _Connection, limit_s: float | None, give_back: Callable[[_Connection], None]
    ) -> None:
        self._connection = connection
        self._limit_s = limit_s  # for each part
        self._give_back = give_back
        self._is_closed = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._is_closed:
            raise httpx2.StreamClosed
        if part := await self._connection.part(self._limit_s):
            return part
        raise StopAsyncIteration

    async def aclose(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._give_back(self._connection)


class _Connection(asyncio.Protocol):
    """One connection, with one request at a time. It reads all the time: to stop and start costs as much as a read."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.used_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._parser.set_dangerous_leniencies(  # no answer stands behind another one that could hide it
            lenient_spaces_after_chunk_size=True, lenient_optional_cr_before_lf=True, lenient_chunked_length=True
        )
        self._failure: httpx2.TransportError | None = None  # that ended it
        self._is_over = False  # nothing more comes
        self._is_lost = False  # asyncio has closed it
        self._is_paused = False
        self._arrival: asyncio.Future[None] | None = None  # of anything, while a reader waits
        self._deadline = math.inf  # of that wait
        self._alarm: asyncio.TimerHandle | None = None  # one for many waits: a timer costs as much as a read
        self._room: asyncio.Future[None] | None = None  # until all is sent
        self._begin()
        self._is_complete = True  # nothing is asked yet

    def _begin(self) -> None:
        """Forget the last answer."""
        self._status = 0  # once the head is complete
        self._headers: list[tuple[bytes, bytes]] = []
        self._has_length = False  # or the body ends with the connection
        self._is_kept = False  # the server keeps the connection open
        self._parts: list[bytes] = []  # of the body, not read yet
        self._num_held = 0  # bytes of these
        self._num_empty = 0  # bytes since the last one of a body
        self._is_complete = False  # the whole answer is here

    # -- what asyncio calls ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._is_tls = transport.get_extra_info("ssl_object") is not None
        if not self._is_tls:  # asyncio's TLS never resumes a writer whose limit is 0
            self._transport.set_write_buffer_limits(0)

    def data_received(self, data: bytes) -> None:
        if self._is_complete or self._is_over:  # nobody asked
            self.end()
            return
        self._num_empty += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._is_complete:
                self._fail(httpx2.RemoteProtocolError(f"no answer of HTTP/1.1: {error}"))
            self._is_kept = False
        if self._num_empty > EMPTY_BYTES and not self._is_complete:
            self._fail(httpx2.RemoteProtocolError("a head without end"))
        if self._num_held >= HELD_BYTES and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        was_idle = self._is_complete and self._room is None
        self._at_end(None)
        return not (was_idle or self._is_tls)  # the server may still read the rest of the request

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._at_end(exc)
        self._stop_alarm()
        self.resume_writing()

    def pause_writing(self) -> None:
        self._room = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        self._room = None

    # -- what llhttp calls -------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._is_complete:
            raise ValueError("a second answer")
        self._headers, self._has_length = [], False  # those of an interim answer

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._status:  # behind the body
            return
        self._headers.append((name, value.rstrip(b" \t")))
        field = name.lower()
        if field == b"content-length" or (field == b"transfer-encoding" and value.lower().endswith(b"chunked")):
            self._has_length = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self._status = status
            self._has_length |= status in (204, 304)
            self._is_kept = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._num_held += len(body)
        self._num_empty = 0

    def on_message_complete(self) -> None:
        self._is_complete = self._status != 0  # else it was an interim answer, of which any number may come
        self._num_empty = 0

    # -- a request ---------------------------------------------------------------------------------------------------

    async def send(self, request: httpx2.Request, limit_s: float | None) -> None:
        """Send a request, with a limit for each wait. Raises LocalProtocolError, WriteTimeout."""
        assert "transfer-encoding" not in request.headers
        self._begin()
        lines = [b"%b %b HTTP/1.1\r\n" % (request.method.encode("ascii"), request.url.raw_path)]
        for name, value in request.headers.raw:
            if NO_TEXT.search(name) or NO_TEXT.search(value):
                raise httpx2.LocalProtocolError(f"the header {name!r} is no line of text")
            lines.append(b"%b: %b\r\n" % (name, value))
        unsent = b"".join((*lines, b"\r\n"))
        assert isinstance(request.stream, httpx2.AsyncByteStream)
        try:
            async for part in request.stream:
                await self._write(unsent + part, limit_s)
                unsent = b""
            if unsent:
                await self._write(unsent, limit_s)
        except httpx2.WriteError:
            pass  # it may have answered before

    async def head(self, limit_s: float | None) -> tuple[int, list[tuple[bytes, bytes]]]:
        """Return status and headers. Raises ReadTimeout, ReadError, RemoteProtocolError."""
        while not self._status and not self._is_over:
            await self._arrived(limit_s)
        if not self._status:
            assert self._failure
            raise self._failure
        return self._status, self._headers

    async def part(self, limit_s: float | None) -> bytes:
        """Return what has come of the body; nothing: it is complete. Raises as `head` does."""
        if self._parts:
            await asyncio.sleep(0)  # a fast server must not stop the other tasks
        while not (self._parts or self._is_complete or self._is_over):
            await self._arrived(limit_s)
        part = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._num_held = 0
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        if not part and not self._is_complete:
            assert self._failure
            raise self._failure
        return part

    @property
    def can_be_kept(self) -> bool:
        """Whether another request can be sent: the last one has its whole answer."""
        return self._is_complete and self._is_kept and not (self._is_over or self._is_paused or self._room)

    def has_ended(self) -> bool:
        """Return whether a kept connection has ended, or the loop will find in it what was not asked."""
        if self._is_over or self._transport.is_closing():
            return True
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket"), select.POLLIN)
        return bool(poll.poll(0))

    def end(self) -> None:
        """Close it at once."""
        self._fail(httpx2.ReadError("closed"))
        self._stop_alarm()
        if not self._is_lost:  # asyncio's transports fail at a second time
            self._transport.abort()

    def _at_end(self, reason: Exception | None) -> None:
        """Note that nothing more comes."""
        if self._status and not self._has_length and reason is None and not self._is_over:
            self._is_complete = True
        if reason is not None:
            self._fail(httpx2.ReadError(str(reason)))
        else:
            self._fail(httpx2.RemoteProtocolError("the connection ended before the answer did"))

    def _fail(self, error: httpx2.TransportError) -> None:
        """Note why nothing more comes; the first reason counts."""
        self._failure = self._failure or error
        self._is_over = True
        self._wake()

    # -- waiting -----------------------------------------------------------------------------------------------------

    async def _write(self, data: bytes, limit_s: float | None) -> None:
        """Send what the system takes, and wait until it has taken all. Raises WriteError, WriteTimeout."""
        if not self._transport.is_closing():
            self._transport.write(data)
        if self._room is not None:
            try:
                async with asyncio.timeout(limit_s):
                    await self._room
            except TimeoutError as error:
                raise httpx2.WriteTimeout("the server does not read") from error
        if self._transport.is_closing():
            raise httpx2.WriteError("closed")

    async def _arrived(self, limit_s: float | None) -> None:
        """Wait for data or the end. Raises ReadTimeout."""
        self._deadline = math.inf if limit_s is None else self._loop.time() + limit_s
        if limit_s is not None and (self._alarm is None or self._alarm.when() > self._deadline):
            self._set_alarm()
        self._arrival = self._loop.create_future()
        try:
            await self._arrival
        finally:
            self._arrival = None

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _set_alarm(self) -> None:
        self._stop_alarm()
        self._alarm = self._loop.call_at(self._deadline, self._ring)

    def _stop_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _ring(self) -> None:
        self._alarm = None
        if self._arrival is None or self._arrival.done() or self._deadline == math.inf:
            return
        if self._loop.time() >= self._deadline:
            self._arrival.set_exception(httpx2.ReadTimeout("the server is silent"))
        else:
            self._set_alarm()
