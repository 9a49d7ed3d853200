"""The routes of an engine process on its private socket: the answers of one model, in every dialect.

Owns the path of a request to the engine and back. The front has checked access and parsed the body already.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import resource
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from edgelm.backends.model import LoadedModel
from edgelm.base.errors import EdgeLMError
from edgelm.engine.usage import Usage
from edgelm.jobs.answer import Answerer, Prepared, merged
from edgelm.jobs.request import AnswerDelta, AnswerRequest, ContextError, joined
from edgelm.server.api.dialect import AnswerContext, ApiRequest, Reply
from edgelm.server.api.dialects import COUNTS, DIALECTS, TEXTS, dialect_of, parse_answers, parse_request, reply_to
from edgelm.server.api.errors import ApiError, as_api_error
from edgelm.server.api.handlers import EXCEPTION_HANDLERS, error_response
from edgelm.server.api.json_body import read_json
from edgelm.server.api.llama_texts import TextRequest
from edgelm.server.api.logprobs import FEW_TOKENS
from edgelm.server.bodies import Bodies
from edgelm.server.engine_process.events import event_routes
from edgelm.server.engine_process.kind import require_kind
from edgelm.server.engine_process.open_answers import OpenAnswers, counted
from edgelm.server.engine_process.pooled import pooled_routes
from edgelm.server.keys import CLIENT, NAMESPACE, USAGE
from edgelm.server.request_id import REQUEST_ID, set_request_id
from edgelm.server.sse import EventStream, cancel, json_pieces, unless_client_leaves
from edgelm.text.encoding import TextEncoder
from edgelm.text.template import TooLongError

PATIENCE_S = 5.0  # for the first token; then the stream is opened without it
PING_S = 10.0  # without any event, before a ping


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts that the routes use."""

    loaded: LoadedModel
    answerer: Answerer
    open_answers: OpenAnswers = field(default_factory=OpenAnswers)


def engine_app(parts: EngineParts, key: str) -> Starlette:
    """Return the ASGI application of an engine process; requests need the key."""
    bodies = Bodies(owner=lambda request: request.headers.get(CLIENT, ""))
    usages: dict[str, Usage] = {}  # of requests for whose usage the front will ask

    async def read(request: Request) -> ApiRequest:
        path = request.url.path
        async with bodies.read(request) as body:
            return await bodies.parse(body, lambda body: parse_request(path, read_json(body)))

    async def read_answers(request: Request) -> tuple[ApiRequest, list[AnswerRequest]]:
        path = request.url.path
        async with bodies.read(request) as body:
            return await bodies.parse(body, lambda body: parse_answers(path, read_json(body)))

    def usage_of(request: Request) -> Usage:
        """Return the usage of a request that arrives now."""
        asked = Usage(request.headers.get(REQUEST_ID, ""))
        if name := request.headers.get(USAGE):
            usages[name] = asked
        return asked

    async def answer(request: Request) -> Response:
        asked = usage_of(request)
        return await _answer(parts, request, *await read_answers(request), asked)

    async def count_tokens(request: Request) -> Response:
        (prepared,) = await unless_client_leaves(request, _prepare(parts, request, *await read_answers(request)))
        kind = {} if request.url.path.startswith("/v1/messages") else {"object": "response.input_tokens"}
        return JSONResponse(kind | {"input_tokens": len(prepared.ids)})

    async def stats(_: Request) -> Response:
        engine = parts.loaded.engine
        running, requests = engine.num_running, engine.num_requests
        numbers = {
            "requests": requests,
            "running": running,
            "waiting": max(requests - running, 0),
            "kv_usage": engine.kv_usage,
            "rss_bytes": _rss_bytes(),
            "counters": engine.counters.copy(),
        }
        return JSONResponse(numbers)

    async def usage(request: Request) -> Response:
        """Answer once for each name, when the request has ended."""
        asked = usages.pop(request.path_params["name"], None)
        if asked is None:
            raise ApiError(404, "not_found", "there was no such request")
        return JSONResponse(await asked.report())

    return Starlette(
        routes=[
            *(Route(path, answer, methods=["POST"]) for path in DIALECTS),
            *(Route(path, count_tokens, methods=["POST"]) for path in COUNTS),
            *_text_routes(parts, read),
            *pooled_routes(parts.loaded, bodies, usage_of),
            *event_routes(parts.loaded),
            Route("/stats", stats),
            Route("/usage/{name}", usage),
        ],
        middleware=[Middleware(_KeyGuard, key=key)],
        exception_handlers=EXCEPTION_HANDLERS,
    )


def _text_routes(parts: EngineParts, read: Callable[[Request], Awaitable[Any]]) -> list[Route]:
    """Return the routes that need the tokenizer or the chat template, and no answer; and that of the open requests.

    `read` returns the checked body of a request. The modules of the APIs have the answers.
    """
    texts = TextEncoder(parts.loaded.tokenizer)

    async def text_answer(request: Request) -> Response:
        text_request: TextRequest = await read(request)
        prepare = partial(_prepare_one, parts, request, text_request.model)
        answer = await unless_client_leaves(request, text_request.text_answer(texts, prepare))
        return Response(answer, media_type="application/json")

    async def slots(request: Request) -> Response:
        return JSONResponse(parts.open_answers.entries(request.headers.get(NAMESPACE, "")))

    return [*(Route(path, text_answer, methods=["POST"]) for path in TEXTS), Route("/slots", slots)]


async def _answer(
    parts: EngineParts, request: Request, api_request: ApiRequest, answers: Sequence[AnswerRequest], usage: Usage
) -> Response:
    preparing = _prepare(parts, request, api_request, answers)
    prepared = [replace(one, usage=usage) for one in await unless_client_leaves(request, preparing)]
    loaded = parts.loaded
    name = api_request.model or loaded.name
    context = AnswerContext(name, loaded.tokenizer, loaded.engine.info, prepared[0].ids)
    reply = reply_to(request.url.path, api_request, context)
    async with AsyncExitStack() as stack:
        entry = stack.enter_context(parts.open_answers.entry(prepared, loaded.engine.info.context))
        deltas = counted(_deltas(parts.answerer, prepared), entry)
        stack.push_async_callback(deltas.aclose)
        if not api_request.streamed:
            all_deltas = await unless_client_leaves(request, _all(deltas))
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


async def _prepare(
    parts: EngineParts, request: Request, api_request: ApiRequest, answers: Sequence[AnswerRequest]
) -> list[Prepared]:
    """Return the answers of a request, ready to run. Raises ApiError if a prompt is too long."""
    model, notes = api_request.model, api_request.notes
    return [await _prepare_one(parts, request, model, replace(answer, notes=notes)) for answer in answers]


async def _prepare_one(parts: EngineParts, request: Request, model: str, answer: AnswerRequest) -> Prepared:
    require_kind(parts.loaded, "text", model)
    namespace, client = (request.headers.get(name, "") for name in (NAMESPACE, CLIENT))
    try:
        return await parts.answerer.prepare(answer, namespace, client)
    except (ContextError, TooLongError) as error:
        param = dialect_of(request.url.path).prompt_field
        raise ApiError(400, "context_length_exceeded", str(error), param=param) from error


def _deltas(answerer: Answerer, prepared: list[Prepared]) -> AsyncGenerator[AnswerDelta, None]:
    """Return the deltas of all prompts; their choices are numbered through."""

    async def numbered(one: Prepared, first: int) -> AsyncGenerator[AnswerDelta, None]:
        async with aclosing(answerer.answer(one)) as deltas:
            async for delta in deltas:
                yield replace(delta, choice=first + delta.choice)

    if len(prepared) == 1:
        return answerer.answer(prepared[0])
    return merged([numbered(one, index * one.request.num_choices) for index, one in enumerate(prepared)])


async def _all(deltas: AsyncIterator[AnswerDelta]) -> list[AnswerDelta]:
    return [delta async for delta in deltas]


class _Coming:
    """The deltas of an answer, as they come. Cancelling a wait does not stop the answer."""

    def __init__(self, deltas: AsyncGenerator[AnswerDelta, None]) -> None:
        self._deltas = deltas
        self._ready: list[AnswerDelta] = []
        self._news = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None

    async def arrived(self, limit_s: float) -> bool:
        """Return whether deltas, the end or a failure come within so many seconds."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._read())
            self._reading.add_done_callback(lambda _: self._news.set())
        if not (self._ready or self._reading.done()):
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._news.wait()
        return bool(self._ready) or self._reading.done()

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
        if self._reading is not None:
            await cancel(self._reading)

    async def _read(self) -> None:
        async for delta in self._deltas:
            self._ready.append(delta)
            self._news.set()


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
                events = b"".join(map(reply.delta, joined(deltas)))
            if not events and time.monotonic() >= written + PING_S:
                events = reply.ping()
            if events:
                yield events
                written = time.monotonic()
    except EdgeLMError as error:
        yield reply.error(as_api_error(error))
        return
    if closing := reply.closing():
        yield closing


class _KeyGuard:
    """ASGI middleware: only the front, which made the key, gets an answer."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = dict(scope.get("headers", ())).get(b"authorization", b"")
        if hmac.compare_digest(sent, self._expected):
            set_request_id(Headers(scope=scope).get(REQUEST_ID, ""))
            await self._app(scope, receive, send)
        else:
            error = ApiError(401, "invalid_api_key", "this socket is for edgelm's own front")
            await error_response(scope["path"], error)(scope, receive, send)


def _rss_bytes() -> int:
    """Return the resident memory of this process; on macOS, its peak."""
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    else:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
