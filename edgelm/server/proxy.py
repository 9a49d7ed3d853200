"""From the front to an engine process: one request there, its answer back, event by event.

Owns what a client sees when the engine dies on the way. Knows nothing of the requests themselves.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import httpx2
from starlette.requests import Request
from starlette.responses import Response

from edgelm.errors import EngineError
from edgelm.server.api_error import RETRY_AFTER, as_api_error
from edgelm.server.engine_link import EngineLink
from edgelm.server.engine_slot import EngineSlot
from edgelm.server.sse import MEDIA_TYPE, EventStream, unless_client_leaves

HEADERS = {"content-type": "application/json"}
ENDING_S = 0.25  # a process that is killed takes connections until the last of its threads is gone
PASSED_HEADERS = ("content-type", RETRY_AFTER, "x-should-retry")


class NotTakenError(EngineError):
    """The engine was gone as the request came to it, which another may answer: once, lest one request kill many."""


async def forward(request: Request, body: bytes, slot: EngineSlot, link: EngineLink, stack: AsyncExitStack) -> Response:
    """Return the engine's answer to a POST; a streamed one takes over what is on the stack.

    Raises NotTakenError where the engine had ended or was ending, EngineError where it dies later and before the
    answer begins, ClientLeftError.
    """

    async def send() -> httpx2.Response:
        upstream = link.client.build_request("POST", request.url.path, content=body, headers=HEADERS)
        answer = await link.client.send(upstream, stream=True)
        stack.push_async_callback(answer.aclose)  # closing it cancels the request in the engine
        return answer

    sent = time.monotonic()
    try:
        answer = await unless_client_leaves(request, send())
        if answer.headers.get("content-type", "").startswith(MEDIA_TYPE):
            return EventStream(_relay(answer, slot, link), stack.pop_all())
        data = await unless_client_leaves(request, answer.aread())
    except httpx2.ConnectError:
        death = await slot.unreachable(link)
        raise NotTakenError(death.message, death.hint) from None
    except httpx2.TransportError:
        ending = time.monotonic() - sent < ENDING_S
        death = await slot.death(link)
        raise (NotTakenError(death.message, death.hint) if ending else death) from None
    slot.answered()
    passed = {name: answer.headers[name] for name in PASSED_HEADERS if name in answer.headers}
    return Response(data, answer.status_code, passed)


async def _relay(answer: httpx2.Response, slot: EngineSlot, link: EngineLink) -> AsyncIterator[bytes]:
    """Yield whole events as they come; where the engine dies, the last one is the error."""
    rest = b""
    try:
        async for piece in answer.aiter_raw():
            events, end, rest = (rest + piece).rpartition(b"\n\n")
            if end:
                yield events + end
        slot.answered()
    except httpx2.TransportError:
        yield as_api_error(await slot.death(link)).event()
