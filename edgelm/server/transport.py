"""Connections to other servers and to engine processes, for httpx2: a lone token costs less than through anyio.

Owns connecting, reading and writing, and their limits of time and memory. Knows no HTTP: that is httpcore2's.
"""

from __future__ import annotations

import asyncio
import math
import os
import select
import socket
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, cast

import httpcore2
import httpx2

HELD_BYTES = 64 * 2**10  # received and not read; then the server waits
NEXT_ADDRESS_S = 0.25  # before the next address of a name is tried too


class Transport(httpx2.AsyncHTTPTransport):
    """httpx2's transport, over connections of ours: to the Unix socket `uds`, where it is given."""

    def __init__(self, limits: httpx2.Limits, verify: ssl.SSLContext | bool, uds: str | None = None) -> None:
        super().__init__(verify=verify, trust_env=False, limits=limits, uds=uds)
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=verify if isinstance(verify, ssl.SSLContext) else None,
            max_connections=limits.max_connections,
            max_keepalive_connections=limits.max_keepalive_connections,
            keepalive_expiry=limits.keepalive_expiry,
            uds=uds,
            network_backend=_Network(),
        )


class _Network(httpcore2.AsyncNetworkBackend):
    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        assert local_address is None
        assert socket_options is None
        loop = asyncio.get_running_loop()
        async with _connecting(timeout):
            made = await loop.create_connection(_Connection, host, port, happy_eyeballs_delay=NEXT_ADDRESS_S)
        return made[1]

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        assert socket_options is None
        async with _connecting(timeout):
            made = await asyncio.get_running_loop().create_unix_connection(_Connection, path)
        return made[1]


@asynccontextmanager
async def _connecting(limit_s: float | None) -> AsyncIterator[None]:
    """Limit the time of the block, and tell what went wrong as httpcore2 does."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError as error:
        raise httpcore2.ConnectTimeout from error
    except (ssl.SSLError, socket.gaierror, UnicodeError) as error:  # the last: a part of the name is too long
        raise httpcore2.ConnectError(str(error)) from error
    except OSError as error:  # without a number: one of several addresses
        raise httpcore2.ConnectError(os.strerror(error.errno) if error.errno else "") from error


class _Connection(asyncio.Protocol, httpcore2.AsyncNetworkStream):
    """One connection, which is read all the time: to stop and start it for each read costs as much as the read."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._received = b""
        self._is_paused = False
        self._is_over = False  # nothing more comes
        self._is_closed = False
        self._is_tls = False
        self._failure: Exception | None = None  # that ended it
        self._arrival: asyncio.Future[None] | None = None  # of anything, while a read waits
        self._deadline = math.inf  # of that read
        self._alarm: asyncio.TimerHandle | None = None  # one for many reads: a timer costs as much as a read
        self._room: asyncio.Future[None] | None = None  # until all is sent

    # -- what asyncio calls ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(0)

    def data_received(self, data: bytes) -> None:
        self._received = self._received + data if self._received else data
        if len(self._received) >= HELD_BYTES:
            self._transport.pause_reading()
            self._is_paused = True
        self._wake()

    def eof_received(self) -> bool:
        self._is_over = True
        self._wake()
        return not self._is_tls  # the server may still read the rest of the request

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_over = True
        self._failure = exc
        self._wake()
        self.resume_writing()

    def pause_writing(self) -> None:
        self._room = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        self._room = None

    # -- what httpcore2 calls ----------------------------------------------------------------------------------------

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        if self._received:
            await asyncio.sleep(0)  # a fast server must not stop the other tasks
        elif not self._is_over:
            await self._arrived(timeout)
        data = self._received
        self._received = data[max_bytes:]
        if self._is_paused and not self._received:
            self._is_paused = False
            self._transport.resume_reading()
        if not data and (self._failure is not None or self._is_closed):
            raise httpcore2.ReadError(str(self._failure or "closed")) from self._failure
        return data[:max_bytes]

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        if self._transport.is_closing():
            raise httpcore2.WriteError(str(self._failure or "closed")) from self._failure
        self._transport.write(buffer)
        if self._room is not None:
            try:
                async with asyncio.timeout(timeout):
                    await self._room
            except TimeoutError as error:
                raise httpcore2.WriteTimeout from error
            if self._transport.is_closing():
                raise httpcore2.WriteError(str(self._failure or "closed")) from self._failure

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> httpcore2.AsyncNetworkStream:
        self._is_tls = True
        async with _connecting(timeout):  # asyncio closes the connection where it fails
            secret = await self._loop.start_tls(self._transport, self, ssl_context, server_hostname=server_hostname)
        assert secret
        self._transport = secret  # with limits of its own: asyncio's TLS never resumes a writer whose limit is 0
        return self

    async def aclose(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        self._is_closed = True
        self._transport.abort()
        await asyncio.sleep(0)  # the socket is closed in the next turn of the loop

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable":  # of a kept connection: it has ended, or answers what was not asked
            return bool(self._received) or self._transport.is_closing() or self._has_more()
        return self._transport.get_extra_info(info)  # ssl_object, whose protocol httpcore2 reads

    def _has_more(self) -> bool:
        """Return whether the loop will find something to read."""
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket"), select.POLLIN)
        return bool(poll.poll(0))

    # -- waiting -----------------------------------------------------------------------------------------------------

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
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._loop.call_at(self._deadline, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        if self._arrival is None or self._arrival.done() or self._deadline == math.inf:
            return
        if self._loop.time() >= self._deadline:
            self._arrival.set_exception(httpcore2.ReadTimeout())
        else:
            self._set_alarm()
