"""Stream: how an asyncio task waits for the events of its request.

Owns the way from the engine's thread into an event loop. The engine keeps only the mailbox: a stream without a
reference is therefore collected, and cancels its request. Knows nothing of scheduling.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from edgelm.engine.core import Event, FinishReason, Stats

MIN_GAP_S = 1 / 20  # between two times at which the reader of a stream is woken
FAST_GAP_S = 1 / 10  # where that brings MANY events
MANY = 4


class Mailbox:
    """A queue of events for one request. Events are posted on any thread; `on_end` runs in that of `loop`.

    Its reader is woken at once for the first and the last event, at most every MIN_GAP_S or FAST_GAP_S in between: a
    small model decodes faster than anybody reads, and what is done for each wake-up, by four processes, takes cores
    from its next steps. In between the loop sleeps, too.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_end: Callable[[Event], None] | None = None) -> None:
        self.loop = loop
        self._on_end = on_end
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._gap: asyncio.TimerHandle | None = None  # until the reader may be woken again

    def post(self, event: Event) -> bool:
        """Queue an event; return whether the loop has to `notice` it: it will not look for it by itself."""
        self._events.append(event)
        return self._gap is None or event.finish_reason is not None or self.loop.is_closed()

    def notice(self, event: Event) -> None:
        """Wake the reader for an event that was posted. For the thread of the loop, as the rest."""
        if event.finish_reason:
            self._end_gap()
            self._arrived.set()
            if self._on_end:
                self._on_end(event)
        elif self._gap is None:
            self._wake()

    async def take(self) -> Event:
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        return self._events.popleft()

    def _wake(self) -> None:
        self._arrived.set()
        self._gap = self.loop.call_later(FAST_GAP_S if len(self._events) >= MANY else MIN_GAP_S, self._look)

    def _look(self) -> None:
        self._end_gap()  # before the look: what is posted from now on is noticed
        if self._events and not self._events[-1].finish_reason:
            self._wake()

    def _end_gap(self) -> None:
        if self._gap is not None:
            self._gap.cancel()
            self._gap = None


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
