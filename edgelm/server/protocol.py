"""Limits of a connection: the time for a request's head, the time without a request, how many are open at once.

Owns connections that never become a request. The limits of a body are in bodies.py; an answer has none.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from contextlib import suppress
from typing import Any

import h11
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from edgelm.server.api.errors import ApiError
from edgelm.server.request_id import REQUEST_ID, new_request_id

HEAD_LIMIT_S = 20.0  # from the first byte of a request to the end of its head
# Between two requests of a connection, and before its first one. Proxies keep theirs for 60 to 90 s: one that closes
# first meets no request that is under way.
KEEP_ALIVE_S = 120
EVICTION_S = 1.0  # a connection without a request for so long is closed when another needs its place
FILES_WANTED = 65_536  # open files; the system may allow fewer
FILES_ON_MACOS = 10_240  # the kernel takes no more there, although it reports no limit
RESERVED_FILES = 192  # pipes of engines, folders and models that are being read, connections not yet counted
FILES_A_CONNECTION = 3  # its own, the one to an engine, and that of a connection which is refused meanwhile
RECEIVED_BYTES = 8 * 2**10  # in one turn of the loop: h11 takes 20 ms for as many chunks of one byte
LINGER_S = 2.0  # for the client to read a refusal and to close


def raise_file_limit() -> None:
    """Let this process and its children open as many files as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_ON_MACOS if sys.platform == "darwin" else FILES_WANTED
    wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # not allowed in some sandboxes: the connections are fewer then
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def max_connections() -> int:
    """Return how many connections may be open at once, each with one to an engine."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = FILES_WANTED if soft == resource.RLIM_INFINITY else soft
    return max((files - RESERVED_FILES) // FILES_A_CONNECTION, 8)


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, without connections that stay open for nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._whole_app, self.app = self.app, self._answer
        self._max_connections = self.limit_concurrency or max_connections()
        self.limit_concurrency = None  # uvicorn's own check counts idle connections, and comes after the head
        self._waiting_since: float | None = None  # for a request; None: one is being answered
        self._limit: asyncio.TimerHandle | None = None  # of the time for the head
        self._head_begun = False
        self._refused = False

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: Java's client asks for HTTP/2 with each request, and takes HTTP/1.1."""

    @property
    def idle_s(self) -> float:
        """Return how long there has been no request."""
        return 0.0 if self._waiting_since is None else self.loop.time() - self._waiting_since

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = RECEIVED_BYTES  # type: ignore[attr-defined] # of asyncio's own transports
        self._waiting_since = self.loop.time()
        self._limit = self.loop.call_later(KEEP_ALIVE_S, self.close)
        if len(self.connections) > 2 * self._max_connections:
            transport.abort()
        elif len(self.connections) > self._max_connections and not self._evict_another():
            self._refuse(ApiError(503, "overloaded", "too many connections are open", headers={"retry-after": "1"}))

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)
            self._follow()

    def on_response_complete(self) -> None:
        self._waiting_since = self.loop.time()
        self._head_begun = False
        super().on_response_complete()  # it may begin the next request, whose bytes are here already
        if self._answering:
            self._waiting_since = None

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application. What it sends of a body in chunks goes past h11, whose state that does not change."""
        cycle, has_chunks = self.cycle, False

        async def send_on(message: Message) -> None:
            nonlocal has_chunks
            if has_chunks and message.get("more_body") and not (cycle.flow.write_paused or cycle.disconnected):
                if body := message["body"]:
                    self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
                return
            await send(message)
            if message["type"] == "http.response.start":
                is_sized = any(name.lower() == b"content-length" for name, _ in message["headers"])
                has_chunks = scope["http_version"] == "1.1" and scope["method"] != "HEAD" and not is_sized

        await self._whole_app(scope, receive, send_on)

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_limit()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn leaves it where the client reset the connection

    def close(self) -> None:
        """Close the connection, which has no request."""
        self._clear_limit()
        self.connections.discard(self)  # closing takes another turn of the loop, and the place is free now
        self.transport.close()

    @property
    def _answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        return cycle is not None and not cycle.response_complete

    def _follow(self) -> None:
        """Limit the time for the head from its first byte on. More bytes give it no more time."""
        if self._answering:
            self._clear_limit()
            self._waiting_since = None
        elif not self._head_begun:
            self._clear_limit()
            self._head_begun = True
            self._limit = self.loop.call_later(HEAD_LIMIT_S, self._end_of_head_limit)

    def _clear_limit(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _end_of_head_limit(self) -> None:
        head, _ = self.conn.trailing_data
        if head and self.conn.our_state is h11.IDLE:
            message = f"the head of the request did not arrive within {HEAD_LIMIT_S:.0f} seconds"
            self._refuse(ApiError(408, "request_timeout", message))
        else:  # it was the rest of a body whose request is answered already
            self.close()

    def _evict_another(self) -> bool:
        """Close the connection that has had no request for the longest time; False: there is none."""
        others = [other for other in self.connections if isinstance(other, LimitedProtocol) and other is not self]
        oldest = max(others, key=lambda other: other.idle_s, default=None)
        if oldest is None or oldest.idle_s < EVICTION_S:
            return False
        oldest.close()
        return True

    def _refuse(self, error: ApiError) -> None:
        """Answer without a whole request, and close.

        What the client still sends is discarded: closing before it is read would reset the connection, and the client
        might lose the answer.
        """
        self._refused = True
        body = json.dumps(error.body).encode()
        fields = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        fields[REQUEST_ID] = new_request_id()
        head = h11.Response(status_code=error.status, headers=[*(fields | error.headers).items()])
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            if (output := self.conn.send(event)) is not None:
                self.transport.write(output)
        if self.transport.can_write_eof():  # not over TLS
            self.transport.write_eof()
        self._clear_limit()
        self._limit = self.loop.call_later(LINGER_S, self.close)
