"""Server-sent events on their way out: a response that cleans up however it ends, and signs of life.

Knows nothing of what the events say.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import AsyncExitStack
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

MEDIA_TYPE = "text/event-stream"
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
DONE = b"data: [DONE]\n\n"

T = TypeVar("T")


class ClientLeftError(Exception):
    """Nobody waits for the answer any more."""


class EventStream(StreamingResponse):
    """Streams events until they end or the client leaves; then `cleanup` is closed, in either case."""

    def __init__(
        self, events: AsyncIterator[bytes], cleanup: AsyncExitStack, headers: Mapping[str, str] = HEADERS
    ) -> None:
        super().__init__(events, headers=headers, media_type=MEDIA_TYPE)
        self._cleanup = cleanup

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._cleanup:
            await super().__call__(scope, receive, send)


async def unless_client_leaves(request: Request, work: Awaitable[T]) -> T:
    """Return what `work` does; cancel it when the client goes. The body must have been read. Raises ClientLeftError."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_until_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeftError
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait({working, leaving})


async def _until_left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
