"""The bodies of requests: how many bytes of them are in memory at one time, and where they are parsed.

The event loop parses small ones. A thread parses large ones, one at a time, so that the loop goes on meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from edgelm.errors import BusyError
from edgelm.server.access import MAX_BODY_BYTES, too_large
from edgelm.server.api.errors import ApiError

SMALL_BYTES = 64 * 2**10  # of a body that waits for nothing
ROOM_BYTES = 32 * 2**20  # for all larger ones together; parsing and forwarding take several times as much
BODY_LIMIT_S = 60.0
ROOM_LIMIT_S = 30.0

T = TypeVar("T")


class Bodies:
    """The bodies that one process reads."""

    def __init__(self, max_bytes: int = MAX_BODY_BYTES, room_bytes: int = ROOM_BYTES) -> None:
        self._max_bytes = max_bytes
        self._room = _Room(max(room_bytes, max_bytes))
        self._parsing = asyncio.Lock()

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """Give the body of a request, which may be chunked; its length is accounted for until the block ends.

        Raises ApiError, BusyError.
        """
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(BODY_LIMIT_S):
                    body = await self._read(request, stack)
            except TimeoutError:
                message = f"the body did not arrive within {BODY_LIMIT_S:.0f} seconds"
                raise ApiError(408, "request_timeout", message) from None
            except ClientDisconnect:
                raise ApiError(400, "client_left", "the client left before the body was complete") from None
            yield body

    async def parse(self, body: bytes, parse: Callable[[bytes], T]) -> T:
        """Return the result of `parse`, which may raise."""
        if len(body) <= SMALL_BYTES:
            return parse(body)
        async with self._parsing:
            return await asyncio.to_thread(parse, body)

    async def _read(self, request: Request, stack: AsyncExitStack) -> bytes:
        body = bytearray()
        room: _Share | None = None
        async for piece in request.stream():
            body += piece
            if len(body) > self._max_bytes:
                raise too_large(self._max_bytes)
            if len(body) > SMALL_BYTES and room is None:  # meanwhile the server stops reading from the connection
                room = await self._take_room(_declared_bytes(request, self._max_bytes), stack)
        if room is not None:
            room.keep(len(body))
        return bytes(body)

    async def _take_room(self, nbytes: int, stack: AsyncExitStack) -> _Share:
        try:
            async with asyncio.timeout(ROOM_LIMIT_S):
                return await stack.enter_async_context(self._room.take(nbytes))
        except TimeoutError:
            raise BusyError("other large requests fill the server's memory for them", "send it again later") from None


class _Room:
    """A number of bytes that requests share."""

    def __init__(self, nbytes: int) -> None:
        self._free_bytes = nbytes
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def take(self, nbytes: int) -> AsyncIterator[_Share]:
        """Wait, in the order of arrival, until so many bytes are free, and take them while the block runs."""
        async with self._turn:
            while self._free_bytes < nbytes:
                self._freed.clear()
                await self._freed.wait()
            self._free_bytes -= nbytes
        share = _Share(self, nbytes)
        try:
            yield share
        finally:
            share.keep(0)

    def give_back(self, nbytes: int) -> None:
        self._free_bytes += nbytes
        self._freed.set()


class _Share:
    """The bytes of a room that one request has."""

    def __init__(self, room: _Room, nbytes: int) -> None:
        self._room = room
        self._nbytes = nbytes

    def keep(self, nbytes: int) -> None:
        """Give back all but so many bytes."""
        kept = min(nbytes, self._nbytes)
        self._room.give_back(self._nbytes - kept)
        self._nbytes = kept


def _declared_bytes(request: Request, max_bytes: int) -> int:
    """Return the length of the body as its header gives it, the greatest possible one for a chunked body."""
    length = request.headers.get("content-length", "")
    is_chunked = "transfer-encoding" in request.headers  # it counts, and not a length beside it
    return min(int(length), max_bytes) if length.isdecimal() and not is_chunked else max_bytes
