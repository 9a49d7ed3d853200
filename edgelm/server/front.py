"""The front's routes: each request goes to the engine process of its model, or to another server that runs it.

Owns routing, and what clients see of models and engines. Runs no model and imports no native code.
"""

from __future__ import annotations

import hashlib
from contextlib import AsyncExitStack
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from edgelm import __version__
from edgelm.base.errors import StillLoadingError
from edgelm.server.access import Guard, Rules, permitted_keep_alive
from edgelm.server.api.dialect import Routed
from edgelm.server.api.dialects import COUNTS, DIALECTS, POOLED, TEXTS, dialect_of, parse_routed
from edgelm.server.api.errors import RETRY_AFTER, ApiError
from edgelm.server.api.handlers import EXCEPTION_HANDLERS, error_response
from edgelm.server.api.json_body import read_json
from edgelm.server.api.ollama import OllamaRequest
from edgelm.server.bodies import Bodies
from edgelm.server.engines.table import EngineTable
from edgelm.server.models import ModelNames
from edgelm.server.proxy import forward
from edgelm.server.remotes.answering import answer_remotely, answers_remotely, not_remote
from edgelm.server.request_log import RequestLog
from edgelm.server.routes.admin import admin_routes, wait_limit_s
from edgelm.server.routes.events import watch_routes
from edgelm.server.routes.llama_server import Aliases, find_or_default, llama_routes
from edgelm.server.routes.metrics import Metrics
from edgelm.server.routes.ollama import load_or_unload, ollama_routes
from edgelm.server.routes.stored import STORED_ROUTES, namespace_of, read_turn, stored_routes
from edgelm.server.stored import ResponseStore

RETRY_S = (1, 30)  # least and greatest Retry-After
UNKNOWN_S = 3  # Retry-After without known progress, as during the first check of this machine
# That are the same in all requests of a program.
LIBRARY_HEADERS = frozenset(
    {"accept", "accept-charset", "accept-encoding", "accept-language", "cache-control", "connection", "content-type"}
    | {"http-referer", "origin", "referer", "te", "x-title"}
)


@dataclass(frozen=True, slots=True)
class Front:
    """The parts that the routes use."""

    address: str
    table: EngineTable
    models: ModelNames
    responses: ResponseStore
    num_slots: int = 1  # answers that a model writes at the same time
    logs_requests: bool = False  # a line of JSON for each


def front_app(front: Front, rules: Rules) -> ASGIApp:
    """Return the ASGI application of a front."""
    bodies = Bodies(rules.max_body_bytes, owner=client_of)
    metrics = Metrics(front.address, front.table, front.models.remotes)

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok", "version": __version__})

    async def answer(request: Request) -> Response:
        async with AsyncExitStack() as stack:
            room = await stack.enter_async_context(AsyncExitStack())
            body = await room.enter_async_context(bodies.read(request))
            path = request.url.path
            api_request = await bodies.parse(body, lambda body: parse_routed(path, read_json(body)))
            is_here = front.models.remotes.find(api_request.model) is None
            if is_here and isinstance(api_request, OllamaRequest) and api_request.only_loads:
                return await load_or_unload(request, api_request, front.table, front.models)
            return await pass_on(request, body, api_request, stack, room)

    async def responses(request: Request) -> Response:
        async with AsyncExitStack() as stack:
            room = await stack.enter_async_context(AsyncExitStack())
            body = await room.enter_async_context(bodies.read(request))
            turn = await read_turn(front.responses, namespace_of(request), request.url.path, body, bodies)
            return await turn.stored(await pass_on(request, turn.body, turn, stack, room))

    async def pass_on(
        request: Request, body: bytes, asked: Routed, stack: AsyncExitStack, room: AsyncExitStack
    ) -> Response:
        if (remote := front.models.remotes.find(asked.model)) is not None:
            if not answers_remotely(request.url.path):
                raise not_remote(remote, request.url.path)
            return await answer_remotely(request, body, remote, bodies, client_of(request), room.aclose)
        wait_s = wait_limit_s(request)
        dialect = dialect_of(request.url.path)
        model = await find_or_default(request, front.table, front.models, asked.model)
        await front.models.require_engine(model)
        keep_alive_s = permitted_keep_alive(request, asked.keep_alive)
        slot = await stack.enter_async_context(front.table.lease(model, keep_alive_s))
        return await forward(
            request,
            body,
            slot,
            stack,
            namespace=namespace_of(request),
            client=client_of(request),
            wait_s=wait_s,
            streamed=asked.streamed and request.url.path not in COUNTS,
            error_event=dialect.error_event,
            ping=dialect.ping,
            forwarded=room.aclose,
            not_seen=front.models.not_seen,
            media_type=dialect.media_type,
        )

    app = Starlette(
        routes=[
            Route("/health", health),
            *(Route(path, answer, methods=["POST"]) for path in (*DIALECTS, *COUNTS) if path not in STORED_ROUTES),
            *(Route(path, responses, methods=["POST"]) for path in STORED_ROUTES),
            *(Route(path, answer, methods=["POST"]) for path in (*TEXTS, *POOLED)),
            *stored_routes(front.responses),
            *ollama_routes(front.table, front.models, bodies),
            *llama_routes(front.table, front.models, front.num_slots),
            *metrics.routes(),
            *watch_routes(front.table, front.models),
            *admin_routes(front.address, front.table, front.models, bodies),
        ],
        exception_handlers={**EXCEPTION_HANDLERS, StillLoadingError: _on_still_loading},
    )
    return RequestLog(Guard(Aliases(app), rules), metrics, client_of, writes=front.logs_requests)


def client_of(request: Request) -> str:
    """Return who sent a request, for the order of the queue: its key, or else its address and program.

    Not its connection: a program with 100 requests at a time opens 100 of them. A program that sends no User-Agent is
    known by the headers that its library writes, and in which order.
    """
    if namespace := namespace_of(request):
        return namespace
    host = request.client.host if request.client else ""
    agent = request.headers.get("user-agent")
    written = [f"{name}: {value}" for name, value in request.headers.items() if name in LIBRARY_HEADERS]
    program = "\n".join(written) if agent is None else agent
    return hashlib.sha256(f"{host} {program}".encode()).hexdigest()[:32]


async def _on_still_loading(request: Request, error: Exception) -> Response:
    assert isinstance(error, StillLoadingError)
    least, most = RETRY_S
    retry_s = UNKNOWN_S if error.retry_after_s is None else min(max(least, round(error.retry_after_s)), most)
    headers = {RETRY_AFTER: str(retry_s)}
    loading = ApiError(503, "model_loading", str(error), headers=headers, progress=error.progress)
    return error_response(request.url.path, loading)
