"""The bodies of requests: how many bytes of them are in memory at one time, and where they are parsed.

The event loop parses small ones. A thread parses large ones, one at a time, so that the loop goes on meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from edgelm.base.errors import BusyError
from edgelm.server.access import MAX_BODY_BYTES, too_large
from edgelm.server.api.errors import ApiError

SMALL_BYTES = 64 * 2**10  # of a body that waits for nothing
QUICK_BYTES = 32 * 2**10  # parsing it takes 12 ms at most, whatever it is
ROOM_BYTES = 32 * 2**20  # for all larger ones together; parsing and forwarding take several times as much
BODY_LIMIT_S = 60.0
ROOM_LIMIT_S = 30.0

T = TypeVar("T")


class Bodies:
    """The bodies that one process reads. Those of one owner, as `owner` names it, take three quarters of the room."""

    def __init__(
        self,
        max_bytes: int = MAX_BODY_BYTES,
        room_bytes: int = ROOM_BYTES,
        *,
        owner: Callable[[Request], str] = lambda _: "",
    ) -> None:
        self._max_bytes = max_bytes
        self._room = _Room(max(room_bytes, max_bytes), max(room_bytes * 3 // 4, max_bytes))
        self._owner = owner
        self._parsing = asyncio.Lock()

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """Give the body of a request, which may be chunked; its length is accounted for until the block ends.

        Raises ApiError, BusyError.
        """
        share = self._room.enter(self._owner(request), _declared_bytes(request, self._max_bytes))
        try:
            try:
                async with asyncio.timeout(BODY_LIMIT_S):
                    body = await self._read(request, share)
            except TimeoutError:
                message = f"the body did not arrive within {BODY_LIMIT_S:.0f} seconds"
                raise ApiError(408, "request_timeout", message) from None
            except ClientDisconnect:
                raise ApiError(400, "client_left", "the client left before the body was complete") from None
            self._room.complete(share)
            yield body
        finally:
            self._room.leave(share)

    async def parse(self, body: bytes, parse: Callable[[bytes], T]) -> T:
        """Return the result of `parse`, which may raise."""
        if len(body) <= QUICK_BYTES:
            return parse(body)
        if len(body) <= SMALL_BYTES:
            return await asyncio.to_thread(parse, body)
        async with self._parsing:
            return await asyncio.to_thread(parse, body)

    async def _read(self, request: Request, share: _Share) -> bytes:
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._max_bytes:
                raise too_large(self._max_bytes)
            if len(body) > SMALL_BYTES:
                await self._grow(share, len(body))
        return bytes(body)

    async def _grow(self, share: _Share, nbytes: int) -> None:
        """Wait until there is memory for this many bytes; meanwhile the server stops reading from its connection."""
        try:
            async with asyncio.timeout(ROOM_LIMIT_S):
                await self._room.grow(share, nbytes)
        except TimeoutError:
            raise BusyError("other large requests fill the server's memory for them", "send it again later") from None


@dataclass(eq=False, slots=True)
class _Share:
    """The bytes of a room that a body has, and the most that it may become."""

    owner: str
    most: int
    held: int = 0


class _Room:
    """A number of bytes that bodies share while they arrive; those of one owner have only a part of it.

    A body gets bytes only where all bodies can still become complete, one after the other, as in Dijkstra's banker's
    algorithm: so none waits for another that waits too, and one that only declared its length keeps no room.
    """

    def __init__(self, nbytes: int, owner_bytes: int) -> None:
        self._nbytes = nbytes
        self._owner_bytes = owner_bytes
        self._shares: list[_Share] = []  # in the order of their arrival
        self._freed = asyncio.Event()

    def enter(self, owner: str, most: int) -> _Share:
        """Return the share of a body that becomes so long at most."""
        share = _Share(owner, most)
        self._shares.append(share)
        return share

    async def grow(self, share: _Share, nbytes: int) -> None:
        """Wait until there is memory for this many bytes of a body."""
        while not self._grown(share, nbytes):
            await self._freed.wait()

    def complete(self, share: _Share) -> None:
        """Expect no more bytes of a body."""
        share.most = share.held
        self._wake()

    def leave(self, share: _Share) -> None:
        self._shares.remove(share)
        self._wake()

    def _grown(self, share: _Share, nbytes: int) -> bool:
        before, share.held = share.held, nbytes
        of_owner = [other for other in self._shares if other.owner == share.owner]
        if _all_end(self._nbytes, self._shares) and _all_end(self._owner_bytes, of_owner):
            return True
        share.held = before
        return False

    def _wake(self) -> None:
        freed, self._freed = self._freed, asyncio.Event()
        freed.set()


def _all_end(nbytes: int, shares: Sequence[_Share]) -> bool:
    """Return whether these bodies can all be completed within a number of bytes, the smallest need first."""
    free = nbytes - sum(share.held for share in shares)
    for share in sorted(shares, key=lambda share: share.most - share.held):
        if share.most - share.held > free:
            return False
        free += share.held
    return True


def _declared_bytes(request: Request, max_bytes: int) -> int:
    """Return the length of the body as its header gives it, the greatest possible one for a chunked body."""
    length = request.headers.get("content-length", "")
    is_chunked = "transfer-encoding" in request.headers  # it counts, and not a length beside it
    return min(int(length), max_bytes) if length.isdecimal() and not is_chunked else max_bytes
