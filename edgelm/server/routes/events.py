"""GET /edgelm/events: the steps of a model's engine as they happen, as server-sent events.

Owns the choice of the engine: the one that a request names, or the first that is loaded; when it ends, the next.
Watching loads no model, keeps none loaded, and takes no turn in the queue.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import httpx2
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edgelm.server.access import may_name_paths
from edgelm.server.engines.process import EngineProcess
from edgelm.server.engines.slots import EngineSlot
from edgelm.server.engines.table import EngineTable
from edgelm.server.keys import NAMESPACE
from edgelm.server.models import ModelNames
from edgelm.server.routes.stored import namespace_of
from edgelm.server.sse import PING, PING_S, EventStream, named_event

LOOK_S = 0.1  # between two looks for an engine while there is none
EVENT_END = b"\n\n"


def watch_routes(table: EngineTable, models: ModelNames) -> list[Route]:
    """Return the route; `?model=NAME` names a model."""

    async def events(request: Request) -> Response:
        name = request.query_params.get("model")
        model = await models.find(name, paths=may_name_paths(request)) if name else None
        return EventStream(_events(table, model.path if model else None, namespace_of(request)), AsyncExitStack())

    return [Route("/edgelm/events", events)]


async def _events(table: EngineTable, path: object, namespace: str) -> AsyncIterator[bytes]:
    written = 0.0
    while not table.is_closed:
        slot = _engine(table, path)
        if slot is None or slot.process is None:
            if not written:
                yield named_event("idle", {})
                written = time.monotonic()
            elif time.monotonic() >= written + PING_S:
                yield PING
                written = time.monotonic()
            await asyncio.sleep(LOOK_S)
            continue
        async for events in _of_engine(slot.process, slot.model.name, namespace):
            yield events
        written = 0.0


def _engine(table: EngineTable, path: object) -> EngineSlot | None:
    """Return the engine to watch; None: it is not loaded."""
    for slot in table.slots.values():
        if slot.state == "ready" and slot.process is not None and path in (None, slot.model.path):
            return slot
    return None


async def _of_engine(process: EngineProcess, name: str, namespace: str) -> AsyncIterator[bytes]:
    """Yield the events of one engine, by the name of its model, in whole ones until it ends."""
    held, query, headers = b"", {"model": name}, {NAMESPACE: namespace}
    try:
        async with process.client.stream("GET", "/events", params=query, headers=headers, timeout=2 * PING_S) as answer:
            async for piece in answer.aiter_raw():
                events, end, held = (held + piece).rpartition(EVENT_END)
                if end:
                    yield events + end
    except httpx2.HTTPError:
        await asyncio.sleep(LOOK_S)  # it ends, or has ended
