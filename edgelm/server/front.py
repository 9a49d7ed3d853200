"""The front: which requests there are, and which engine process answers each.

Owns routing, and what a client is told of models and engines. Runs no model and imports no native code.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx2
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edgelm import __version__
from edgelm.library.local import printable
from edgelm.server.api_error import EXCEPTION_HANDLERS, RETRY_AFTER, ApiError
from edgelm.server.chat_request import parse_chat
from edgelm.server.engine_slot import EngineSlot, StillLoadingError
from edgelm.server.engine_table import EngineTable
from edgelm.server.guard import Guard, Rules, read_body
from edgelm.server.models import ModelNames
from edgelm.server.proxy import NotTakenError, forward
from edgelm.server.sse import ClientLeftError, unless_client_leaves

START_LIMIT_S = 600.0  # that `Prefer: wait` waits for an engine
DEFAULT_WAIT_S = 2.0  # what a small model takes; a client that cannot wait longer is told to come back
RETRY_S = (1, 30)  # least and most
UNKNOWN_S = 3  # where there is no progress to tell from, as in the first check of this machine
STATS_LIMIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Front:
    """The parts that the routes use."""

    address: str
    table: EngineTable
    models: ModelNames


def front_app(front: Front, rules: Rules) -> Starlette:
    """Return the ASGI application of a front."""

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok", "version": __version__})

    async def list_models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": await _models(front)})

    async def one_model(request: Request) -> Response:
        name = request.path_params["name"]
        for model in await _models(front):
            if model["id"] == name:
                return JSONResponse(model)
        raise ApiError(404, "model_not_found", f"there is no model {name}", param="model")

    async def chat(request: Request) -> Response:
        body = await read_body(request, rules.max_body_bytes)
        wanted = parse_chat(body)
        model = await front.models.find(wanted.model)
        wait_s = _wait_s(request.headers.getlist("prefer"))
        async with AsyncExitStack() as stack:
            slot = await stack.enter_async_context(front.table.lease(model))
            link = await unless_client_leaves(request, slot.ready(wait_s))
            try:
                return await forward(request, body, slot, link, stack)
            except NotTakenError:
                link = await unless_client_leaves(request, slot.ready(wait_s))
                return await forward(request, body, slot, link, stack)

    async def ps(_: Request) -> Response:
        models = await asyncio.gather(*(_process(slot) for slot in front.table.slots.values()))
        return JSONResponse({"pid": os.getpid(), "version": __version__, "address": front.address, "models": models})

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", list_models),
            Route("/v1/models/{name:path}", one_model),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/edgelm/ps", ps),
        ],
        middleware=[Middleware(Guard, rules=rules)],
        exception_handlers={
            **EXCEPTION_HANDLERS,
            StillLoadingError: _on_still_loading,
            ClientLeftError: _on_client_left,
        },
    )


async def _models(front: Front) -> list[dict[str, Any]]:
    """Return the list of /v1/models."""
    loaded = {path for path, slot in front.table.slots.items() if slot.state == "ready"}
    return [
        {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "edgelm",
            "edgelm": {"path": printable(str(model.path)), **model.known, "loaded": model.path in loaded},
        }
        for model in await front.models.list()
    ]


async def _process(slot: EngineSlot) -> dict[str, Any]:
    """Return what /edgelm/ps shows of one engine process."""
    link, info = slot.link, slot.link.info if slot.link else None
    stats: dict[str, Any] = {"requests": slot.leases, "rss_bytes": None}
    if link is not None and slot.state == "ready":
        with contextlib.suppress(httpx2.HTTPError, ValueError):  # dying: what we know ourselves is shown
            stats = (await link.client.get("/stats", timeout=STATS_LIMIT_S)).json()
    return {
        "model": slot.model.name,
        "path": printable(str(slot.model.path)),
        "state": slot.state,
        "progress": slot.progress,
        "pid": link.pid if link else None,
        "context": info.context if info else None,
        "engine": info.engine if info else None,
        "device": info.device if info else None,
        "requests": stats["requests"],
        "rss_bytes": stats["rss_bytes"],
        "idle_s": round(slot.idle_s, 3),
        "error": None if slot.error is None else str(slot.error),
    }


def _wait_s(prefer: list[str]) -> float:
    """Return how long a request waits for its engine's start: `Prefer: wait` or `wait=SECONDS` (RFC 7240)."""
    found = re.search(r"(?:^|[,;\s])wait(?:\s*=\s*\"?(\d{1,9})\"?)?\s*(?:$|[,;])", ", ".join(prefer), re.IGNORECASE)
    if found is None:
        return DEFAULT_WAIT_S
    return min(float(found[1]), START_LIMIT_S) if found[1] else START_LIMIT_S


async def _on_still_loading(_: Request, error: Exception) -> Response:
    assert isinstance(error, StillLoadingError)
    least, most = RETRY_S
    again_s = UNKNOWN_S if error.remaining_s is None else min(max(least, round(error.remaining_s)), most)
    headers = {RETRY_AFTER: str(again_s)}
    return ApiError(503, "model_loading", str(error), headers=headers, progress=error.progress).response()


async def _on_client_left(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it
