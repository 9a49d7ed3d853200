"""Forward a request from the front to an engine process, and its answer back, event by event.

Owns what a client sees while the engine starts, and if it ends during its request. Knows nothing of the content.
"""

from __future__ import annotations

import asyncio
import errno
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx2
from starlette.requests import Request
from starlette.responses import Response

from edgelm.base.errors import EdgeLMError, EngineError, StillLoadingError
from edgelm.server.api.errors import NOT_SEEN, RETRY_AFTER, ApiError, as_api_error
from edgelm.server.engines.process import EngineProcess
from edgelm.server.engines.slots import EngineSlot
from edgelm.server.keys import CLIENT, NAMESPACE, USAGE
from edgelm.server.request_id import REQUEST_ID
from edgelm.server.request_log import record_of
from edgelm.server.sse import EVENT_ENDS, MEDIA_TYPE, EventStream, cancel, unless_client_leaves

HEADERS = {"content-type": "application/json"}
ENDING_S = 0.25  # a killed process accepts connections until its last thread is gone
PATIENCE_S = 5.0  # for an engine that is being started; then a stream is opened without it
PIECE_BYTES = 2**18  # of a body that is sent
PING_S = 15.0  # between comments in such a stream
PASSED_HEADERS = ("content-type", RETRY_AFTER, "x-should-retry")
GONE = frozenset({errno.ECONNREFUSED, errno.ENOENT})  # of a connection: nobody listens there any more

ErrorEvent = Callable[[ApiError], bytes]


class _SentBody(httpx2.AsyncByteStream):
    """A body that can be sent again until it is forgotten: a connection keeps its request as long as the answer."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for at in range(0, len(self._body), PIECE_BYTES):  # other tasks of the event loop run between two pieces
            yield self._body[at : at + PIECE_BYTES]

    def forget(self) -> None:
        self._body = b""


class NotTakenError(EngineError):
    """The engine was gone before it took the request. Retry once: a request may crash every engine."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An engine's answer: its headers, and the whole body unless it is a stream."""

    upstream: httpx2.Response
    process: EngineProcess
    data: bytes | None  # None: a stream of events

    @property
    def media_type(self) -> str:
        return _media_type(self.upstream)


async def forward(
    request: Request,
    body: bytes,
    slot: EngineSlot,
    stack: AsyncExitStack,
    *,
    namespace: str,
    client: str,
    wait_s: float,
    streamed: bool,
    error_event: ErrorEvent,
    ping: bytes,
    forwarded: Callable[[], Awaitable[None]],
    not_seen: Callable[[], Awaitable[EdgeLMError]],
    media_type: str = MEDIA_TYPE,
) -> Response:
    """Return the engine's answer to a POST; a streamed answer takes over the contents of the stack.

    The engine keeps the request and its answer for requests of the same `namespace`; each `client` has its turn. It has
    `wait_s` to start. A stream whose engine takes longer than PATIENCE_S is opened at once; a later failure is its last
    event, of `media_type` as the others. `forwarded` is called when the answer begins: the body is not sent again.
    `not_seen` returns the error for a model that does not read pictures.
    Raises the EdgeLMError of an engine that does not start or ends before the answer begins, ApiError if the system has
    no room for a connection, ClientLeftError.
    """
    closing = await stack.enter_async_context(AsyncExitStack())
    starting = asyncio.ensure_future(slot.ready(wait_s))
    stack.push_async_callback(cancel, starting)
    record = record_of(request)
    sent = _SentBody(body)
    own = {NAMESPACE: namespace, CLIENT: client, REQUEST_ID: record.request_id, "content-length": str(len(body))}
    headers = HEADERS | own | ({USAGE: record.usage_name} if record.usage_name else {})

    def build(process: EngineProcess) -> httpx2.Request:
        record.sent_to(slot, process)
        return process.client.build_request("POST", request.url.path, content=sent, headers=headers)

    async def answer() -> Answer:
        process = await starting
        try:
            taken = await _ask(build, slot, process, closing)
        except NotTakenError:
            taken = await _ask(build, slot, await slot.ready(wait_s), closing)
        sent.forget()
        await forwarded()
        if NOT_SEEN in taken.upstream.headers:
            raise await not_seen()
        return taken

    await unless_client_leaves(request, asyncio.wait({starting}, timeout=PATIENCE_S if streamed else None))
    if not starting.done():
        late = _late_events(starting, answer, slot, error_event, ping)
        return EventStream(late, stack.pop_all(), media_type=media_type)
    taken = await unless_client_leaves(request, answer())
    if taken.data is None:
        return EventStream(_events(taken, slot, error_event), stack.pop_all(), media_type=taken.media_type)
    passed = {name: taken.upstream.headers[name] for name in PASSED_HEADERS if name in taken.upstream.headers}
    return Response(taken.data, taken.upstream.status_code, passed)


async def _ask(
    build: Callable[[EngineProcess], httpx2.Request], slot: EngineSlot, process: EngineProcess, closing: AsyncExitStack
) -> Answer:
    """Send the request, and return the answer. Raises NotTakenError if the engine had ended or was ending."""
    sent = time.monotonic()
    try:
        upstream = await process.client.send(build(process), stream=True)
        closing.push_async_callback(upstream.aclose)  # closing it cancels the request in the engine
        if _media_type(upstream) in EVENT_ENDS:
            return Answer(upstream, process, None)
        data = await upstream.aread()
    except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
        if not (process.exited or _errno(error) in GONE):
            raise _no_room(error) from None
        end = await slot.unreachable(process)
        raise NotTakenError(end.message, end.hint) from None
    except httpx2.TransportError:
        ending = time.monotonic() - sent < ENDING_S
        end = await slot.exit_error(process)
        # An engine that lives has closed a connection that was kept from an earlier request.
        if ending or not process.exited:
            raise NotTakenError(end.message, end.hint) from None
        raise end from None
    slot.answered()
    return Answer(upstream, process, data)


async def _late_events(
    starting: asyncio.Future[EngineProcess],
    answer: Callable[[], Any],
    slot: EngineSlot,
    error_event: ErrorEvent,
    ping: bytes,
) -> AsyncIterator[bytes]:
    """Yield pings until the engine is ready, then its events; a failure is the last event."""
    while not starting.done():
        yield ping
        await asyncio.wait({starting}, timeout=PING_S)
    try:
        taken: Answer = await answer()
    except StillLoadingError as error:
        yield error_event(ApiError(503, "model_loading", str(error), progress=error.progress))
    except EdgeLMError as error:
        yield error_event(as_api_error(error))
    except ApiError as error:
        yield error_event(error)
    else:
        if taken.data is not None:
            yield error_event(_refusal(taken.upstream.status_code, taken.data))
        else:
            async for events in _events(taken, slot, error_event):
                yield events


def _refusal(status: int, body: bytes) -> ApiError:
    """Return the error of a request that the engine refuses, in the dialect of the request."""
    error = json.loads(body)["error"]
    if isinstance(error, str):  # Ollama's form
        return ApiError(status, "refused", error)
    return ApiError(status, error.get("code") or error["type"], error["message"], param=error.get("param"))


async def _events(answer: Answer, slot: EngineSlot, error_event: ErrorEvent) -> AsyncIterator[bytes]:
    """Yield complete events as they arrive. If the engine ends, the last event is the error."""
    mark = EVENT_ENDS[answer.media_type]
    held: list[bytes] = []  # of an event that is not complete
    try:
        async for piece in answer.upstream.aiter_raw():
            if held and held[-1].endswith(b"\n"):  # perhaps half of the mark between two events
                held[-1], piece = held[-1][:-1], b"\n" + piece
            events, end, rest = piece.rpartition(mark)
            if end:
                yield b"".join((*held, events, end))
                held = []
            held.append(rest)
        slot.answered()
    except httpx2.TransportError:
        yield error_event(as_api_error(await slot.exit_error(answer.process)))


def _media_type(answer: httpx2.Response) -> str:
    return answer.headers.get("content-type", "").partition(";")[0].strip()


def _errno(error: BaseException | None) -> int | None:
    """Return the system's error number behind an error of httpx2."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        error = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__ or error.__context__
    return None


def _no_room(error: httpx2.TransportError) -> ApiError:
    """Return the response if the system, and not the engine, refuses a connection."""
    message = f"the server is overloaded: {str(error) or 'no connection to the engine'}; try again later"
    return ApiError(503, "overloaded", message, headers={RETRY_AFTER: "1"})
