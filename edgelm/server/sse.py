"""Streams of events: a response that always cleans up, and work that stops when the client leaves; large answers.

Events are server-sent ones, or lines of JSON. Knows nothing of their content.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

MEDIA_TYPE = "text/event-stream"
NDJSON = "application/x-ndjson"
EVENT_ENDS = {MEDIA_TYPE: b"\n\n", NDJSON: b"\n"}  # of an event, by media type
STREAMS_EVENTS = "streams_events"  # in the state of a request: the media type of its answer, which is whole events
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}

# Events: a turn of the loop costs half of what an event does, and asyncio logs the sixth write to a closed connection.
TURN_EVERY = 4
PING_S = 10.0  # without an event
PING = b": ping\n\n"

PIECES_DEPTH = 6  # of a document that is encoded in pieces: that of a token's entry in every API

T = TypeVar("T")


class ClientLeftError(Exception):
    """The client closed the connection before its answer."""


class EventStream(StreamingResponse):
    """Streams events until they end or the client leaves, then closes `cleanup`."""

    def __init__(self, events: AsyncIterator[bytes], cleanup: AsyncExitStack, media_type: str = MEDIA_TYPE) -> None:
        super().__init__(self._in_turns(), headers=HEADERS, media_type=media_type)
        self._events = events
        self._cleanup = cleanup

    def pass_through(self, stage: Callable[[AsyncIterator[bytes]], AsyncIterator[bytes]]) -> None:
        """Send what a stage makes of the events. Call it before the first one is sent."""
        self._events = stage(self._events)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._cleanup:
            scope.setdefault("state", {})[STREAMS_EVENTS] = self.media_type
            await super().__call__(scope, receive, send)

    async def _in_turns(self) -> AsyncIterator[bytes]:
        """Let the event loop run now and then while events are ready: it notices that the client has left."""
        count = 0
        async for event in self._events:
            yield event
            count += 1
            if count % TURN_EVERY == 0:
                await asyncio.sleep(0)


def named_event(name: str, document: Mapping[str, Any]) -> bytes:
    """Return an event with a name, whose data is JSON."""
    data = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return f"event: {name}\ndata: {data}\n\n".encode()


def json_pieces(value: Any, depth: int = PIECES_DEPTH) -> Iterator[bytes]:
    """Yield a document as JSON, a vector or a token at a time; an iterator in it is a list.

    `json.dumps` of a million numbers would stop every other thread for a second.
    """
    if isinstance(value, dict) and depth:
        entries: Iterable[tuple[bytes, Any]] = [(_json(name) + b":", entry) for name, entry in value.items()]
        begin, end = b"{", b"}"
    elif isinstance(value, list) and depth and value and isinstance(value[0], dict | list):
        entries = [(b"", entry) for entry in value]
        begin, end = b"[", b"]"
    elif isinstance(value, Iterator):
        entries = ((b"", entry) for entry in value)
        begin, end = b"[", b"]"
    else:
        yield _json(value)
        return
    yield begin
    for index, (name, entry) in enumerate(entries):
        yield b"," * (index > 0) + name
        yield from json_pieces(entry, depth - 1)
    yield end


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


async def unless_client_leaves(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`; cancel it when the client leaves. Read the body first. Raises ClientLeftError."""
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


async def cancel(task: asyncio.Future[Any]) -> None:
    """Cancel a task, and wait until it has ended."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # retrieve it, or asyncio logs it


async def _until_left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
