"""An answer's deltas as the response to its request: whole, or as a stream of events.

Owns what a client sees while nothing comes, and of a failure in the middle. Does not know where the deltas come from.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgelm.base.errors import EdgeLMError
from edgelm.jobs.request import AnswerDelta
from edgelm.server.api.dialect import Reply
from edgelm.server.api.dialects import dialect_of
from edgelm.server.api.errors import ApiError, as_api_error
from edgelm.server.api.logprobs import FEW_TOKENS
from edgelm.server.sse import EventStream, cancel, json_pieces, unless_client_leaves

PATIENCE_S = 5.0  # for the first token; then the stream is opened without it
PING_S = 10.0  # without any event, before a ping


async def answer_response(
    request: Request, reply: Reply, deltas: AsyncGenerator[AnswerDelta, None], stack: AsyncExitStack, *, streamed: bool
) -> Response:
    """Return the response; a streamed one takes over the contents of the stack. The deltas are closed with it.

    Raises the failure of an answer that has not begun, ClientLeftError.
    """
    stack.push_async_callback(deltas.aclose)
    if not streamed:
        all_deltas = await unless_client_leaves(request, _collected(deltas))
        if sum(len(delta.sampled) for delta in all_deltas) <= FEW_TOKENS:
            return JSONResponse(reply.whole(all_deltas))
        content = await asyncio.to_thread(lambda: b"".join(json_pieces(reply.whole(all_deltas))))
        return Response(content, media_type="application/json")
    # Wait for the first token: a failure until then is an HTTP status and not an event.
    coming = _Coming(deltas)
    stack.push_async_callback(coming.cancel)
    await unless_client_leaves(request, coming.arrived(PATIENCE_S))
    coming.check()
    media_type = dialect_of(request.url.path).media_type
    return EventStream(_events(reply, coming), stack.pop_all(), media_type=media_type)


async def _collected(deltas: AsyncIterator[AnswerDelta]) -> list[AnswerDelta]:
    return [delta async for delta in deltas]


class _Coming:
    """The deltas of an answer, as they come. Cancelling a wait does not stop the answer."""

    def __init__(self, deltas: AsyncGenerator[AnswerDelta, None]) -> None:
        self._deltas = deltas
        self._ready: list[AnswerDelta] = []
        self._arrival = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None  # one for many waits: a timer costs as much as a delta

    async def arrived(self, limit_s: float) -> bool:
        """Wait for deltas, the end or a failure; return whether one came. The wait may end early without."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._read())
            self._reading.add_done_callback(lambda _: self._arrival.set())
        if not (self._ready or self._reading.done()):
            self._arrival.clear()
            self._wake_by(limit_s)
            await self._arrival.wait()
        return bool(self._ready) or self._reading.done()

    def _wake_by(self, limit_s: float) -> None:
        """End the wait after this time, or sooner."""
        loop = asyncio.get_running_loop()
        if self._alarm is not None and self._alarm.when() > loop.time() + limit_s:
            self._alarm.cancel()
            self._alarm = None
        if self._alarm is None:
            self._alarm = loop.call_later(limit_s, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._arrival.set()

    def take(self) -> list[AnswerDelta]:
        """Return the deltas that arrived; none: the end. Raises the answer's failure, behind its last delta."""
        taken, self._ready = self._ready, []
        if not taken:
            self.check()
        return taken

    def check(self) -> None:
        """Raise the answer's failure, if that arrived and no delta before it."""
        if self._reading is not None and self._reading.done() and not self._ready:
            self._reading.result()

    async def cancel(self) -> None:
        """End the wait for the next delta."""
        if self._alarm is not None:
            self._alarm.cancel()
        if self._reading is not None:
            await cancel(self._reading)

    async def _read(self) -> None:
        async for delta in self._deltas:
            self._ready.append(delta)
            self._arrival.set()


async def _events(reply: Reply, coming: _Coming) -> AsyncIterator[bytes]:
    """Yield the events of a stream, and pings while there are none; a failure is the last event."""
    if opening := reply.opening():
        yield opening
    written = time.monotonic()
    try:
        while True:
            events = b""
            if await coming.arrived(written + PING_S - time.monotonic()):
                deltas = coming.take()
                if not deltas:
                    break
                events = b"".join(map(reply.delta, deltas))
            if not events and time.monotonic() >= written + PING_S:
                events = reply.ping()
            if events:
                yield events
                written = time.monotonic()
    except (ApiError, EdgeLMError) as error:
        yield reply.error(error if isinstance(error, ApiError) else as_api_error(error))
        return
    if closing := reply.closing():
        yield closing
