"""Streams: how an asyncio task waits for the events of its request.

Owns the way from the engine's thread into an event loop. The engine keeps only the mailbox, so that a stream which
nobody holds any more is collected, and cancels its request. Knows nothing of scheduling.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from edgelm.core import Event, Stats


class Mailbox:
    """Where the engine leaves events; everything here runs in the thread of `loop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()

    def post(self, event: Event) -> None:
        self._events.append(event)
        self._arrived.set()

    async def take(self) -> Event:
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        return self._events.popleft()


class Stream:
    """An async iterator over the events of one request. Closing it, or dropping its last reference, cancels it."""

    def __init__(self, mailbox: Mailbox, cancel: Callable[[], None]) -> None:
        self._mailbox = mailbox
        self._cancel = cancel
        self._done = False
        self._stats: Stats | None = None  # known at the end

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Event:
        """Return the next event. Raises the EdgeLMError with which the request failed."""
        if self._done:
            raise StopAsyncIteration
        event = await self._mailbox.take()
        if event.finish_reason:
            self._done = True
            self._stats = event.stats
        if event.error:
            raise event.error
        return event

    def close(self) -> None:
        """Cancel the request if it is not finished; from any thread, as often as you like."""
        if not self._done:
            self._done = True
            self._cancel()

    async def stop(self) -> Stats:
        """End the request, drop what it still sends, and return what it cost."""
        self.close()
        while self._stats is None:
            self._stats = (await self._mailbox.take()).stats
        return self._stats

    async def aclose(self) -> None:
        """Do as `close` does, for `contextlib.aclosing`."""
        self.close()

    def __del__(self) -> None:
        self.close()
