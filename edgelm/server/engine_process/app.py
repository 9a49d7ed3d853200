"""The routes of an engine process on its private socket: the answers of one model, in every dialect.

Owns the path of a request to the engine and back. The front has checked access and parsed the body already.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import resource
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
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
from edgelm.base.errors import RequestError
from edgelm.engine.usage import Usage
from edgelm.jobs.answer import Answerer, Prepared, merged
from edgelm.jobs.embed import Embeddings
from edgelm.jobs.embed_request import Embedded, EmbedRequest, Ranked
from edgelm.jobs.request import AnswerDelta, AnswerRequest, ContextError
from edgelm.server.answers import answer_response
from edgelm.server.api.dialect import AnswerContext, ApiRequest
from edgelm.server.api.dialects import (
    COUNTS,
    DIALECTS,
    POOLED,
    TEXTS,
    count_reply,
    dialect_of,
    parse_answers,
    parse_pooled,
    parse_request,
    reply_to,
)
from edgelm.server.api.errors import ApiError
from edgelm.server.api.handlers import EXCEPTION_HANDLERS, error_response
from edgelm.server.api.json_body import read_json
from edgelm.server.api.llama_texts import TextRequest
from edgelm.server.bodies import Bodies
from edgelm.server.engine_process.events import event_routes
from edgelm.server.engine_process.open_answers import OpenAnswers, counted
from edgelm.server.keys import CLIENT, NAMESPACE, USAGE
from edgelm.server.request_id import REQUEST_ID, set_request_id
from edgelm.server.sse import json_pieces, unless_client_leaves
from edgelm.text.encoding import TextEncoder
from edgelm.text.template import TooLongError


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
        return JSONResponse(count_reply(request.url.path, len(prepared.ids)))

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
            *_pooled_routes(parts.loaded, bodies, usage_of),
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


def _pooled_routes(loaded: LoadedModel, bodies: Bodies, usage_of: Callable[[Request], Usage]) -> list[Route]:
    """Return the routes for vectors and rankings. A request whose client leaves is cancelled."""
    embeddings = Embeddings(loaded)

    async def answer(request: Request) -> Response:
        usage, path = usage_of(request), request.url.path
        async with bodies.read(request) as body:
            parsed = await bodies.parse(body, lambda body: parse_pooled(path, read_json(body)))
        asked, client = parsed.pooled_request(), request.headers.get(CLIENT, "")
        loaded.require("embedding" if isinstance(asked, EmbedRequest) else "rerank", parsed.model)
        result: Embedded | Ranked
        try:
            if isinstance(asked, EmbedRequest):
                result = await unless_client_leaves(request, embeddings.embed(asked, client))
            else:
                result = await unless_client_leaves(request, embeddings.rank(asked, client))
        except ContextError as error:
            field = dialect_of(path).prompt_field
            raise ApiError(400, "context_length_exceeded", str(error), param=field) from error
        except RequestError as error:
            raise ApiError(400, "invalid_value", str(error)) from error

        usage.add_inputs(sum(result.num_tokens))

        def content() -> bytes:
            return b"".join(json_pieces(parsed.response(result, parsed.model)))

        # In a thread: millions of numbers take seconds.
        return Response(await asyncio.to_thread(content), media_type="application/json")

    return [Route(path, answer, methods=["POST"]) for path in POOLED]


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
        return await answer_response(request, reply, deltas, stack, streamed=api_request.streamed)


async def _prepare(
    parts: EngineParts, request: Request, api_request: ApiRequest, answers: Sequence[AnswerRequest]
) -> list[Prepared]:
    """Return the answers of a request, ready to run. Raises ApiError if a prompt is too long."""
    model, notes = api_request.model, api_request.notes
    return [await _prepare_one(parts, request, model, replace(answer, notes=notes)) for answer in answers]


async def _prepare_one(parts: EngineParts, request: Request, model: str, answer: AnswerRequest) -> Prepared:
    parts.loaded.require("text", model)
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
