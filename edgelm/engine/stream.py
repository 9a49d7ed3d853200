"""Stream: how an asyncio task waits for the events of its request.

Owns the way from the engine's thread into an event loop. The engine keeps only the mailbox: a stream without a
reference is therefore collected, and cancels its request. Knows nothing of scheduling.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from edgelm.engine.core import Event, FinishReason, Stats

MIN_GAP_S = 1 / 30  # between two times at which the reader of a stream is woken


class Mailbox:
    """A queue of events for one request; every method runs in the thread of `loop`, and so does `on_end`.

    Its reader is woken at once for the first and the last event, and at most every MIN_GAP_S in between: a small model
    decodes faster than anybody reads, and what is done for each wake-up takes cores from its next steps.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_end: Callable[[Event], None] | None = None) -> None:
        self.loop = loop
        self._on_end = on_end
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._wake_at = 0.0  # not before
        self._waking: asyncio.TimerHandle | None = None

    def post(self, event: Event) -> None:
        self._events.append(event)
        if event.finish_reason or self.loop.time() >= self._wake_at:
            self._wake()
        elif self._waking is None:
            self._waking = self.loop.call_at(self._wake_at, self._wake)
        if event.finish_reason and self._on_end:
            self._on_end(event)

    async def take(self) -> Event:
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        return self._events.popleft()

    def _wake(self) -> None:
        if self._waking is not None:
            self._waking.cancel()
            self._waking = None
        self._wake_at = self.loop.time() + MIN_GAP_S
        self._arrived.set()


class Stream:
    """An async iterator over the events of one request. Closing it, or dropping its last reference, cancels it."""

    def __init__(self, mailbox: Mailbox, cancel: Callable[[FinishReason], None]) -> None:
        self._mailbox = mailbox
        self._cancel = cancel
        self._done = False
        self._stats: Stats | None = None  # set by the last event

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
        """Cancel the request if it is not finished. May be called from any thread, and repeatedly."""
        self._end("abort")

    async def stop(self) -> Stats:
        """End the request, whose answer is complete; drop its remaining events, and return what it cost."""
        self._end("stop")
        while self._stats is None:
            self._stats = (await self._mailbox.take()).stats
        return self._stats

    async def aclose(self) -> None:
        """Do the same as `close`, for `contextlib.aclosing`."""
        self.close()

    def _end(self, reason: FinishReason) -> None:
        if not self._done:
            self._done = True
            self._cancel(reason)

    def __del__(self) -> None:
        self.close()
