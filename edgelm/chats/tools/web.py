"""A server of tools over HTTP: its connection, with the headers of the settings.

Owns the limit of what it may answer at once. Knows nothing of the messages.
"""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx2

from edgelm.chats.tools.listing import mend_result
from edgelm.chats.tools.settings import ToolServer

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectSendStream

SESSION = "mcp-session-id"
CONNECT_S = 10.0
MAX_BODY = 4 * 2**20  # bytes of an answer, and of one event of a stream


class _Limited(httpx2.AsyncByteStream):
    """The body of an answer, which fails behind MAX_BODY."""

    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for part in self._stream:
            num_bytes += len(part)
            if num_bytes > MAX_BODY:
                raise httpx2.ReadError(f"it sent an answer of more than {MAX_BODY // 2**20} MiB")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


async def _limit(response: httpx2.Response) -> None:
    """Limit a body. mcp limits the events of a stream itself, and a stream may be long."""
    if response.headers.get("content-encoding", "identity") != "identity":
        raise httpx2.DecodingError("it compresses its answers, which was not asked for")
    if not response.headers.get("content-type", "").lower().startswith("text/event-stream"):
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _Limited(response.stream)


@asynccontextmanager
async def web_streams(server: ToolServer, answered: Callable[[int, bool], None]) -> AsyncGenerator[Any]:
    """Yield the streams of messages from and to a server.

    `answered` is told the status of each answer, and whether the request was one of a session.
    """
    import anyio
    from mcp.client.streamable_http import streamable_http_client

    async def note(response: httpx2.Response) -> None:
        if response.request.method == "POST":  # a server may have no stream of its own messages
            answered(response.status_code, SESSION in response.request.headers)

    client = httpx2.AsyncClient(
        headers={"Accept-Encoding": "identity", **server.headers},
        timeout=httpx2.Timeout(server.timeout_s, connect=CONNECT_S),
        trust_env=not _is_loopback(server.url),  # a proxy cannot reach this machine's own ports
        event_hooks={"response": [note, _limit]},
    )
    async with (
        client,
        streamable_http_client(server.url, http_client=client, max_sse_event_size=MAX_BODY) as (received, sent),
        anyio.create_task_group() as group,
    ):
        give, take = anyio.create_memory_object_stream[Any](0)
        group.start_soon(_pass_on, received, give)
        yield take, sent
        group.cancel_scope.cancel()


async def _pass_on(received: AsyncIterator[Any], give: MemoryObjectSendStream[Any]) -> None:
    """Pass on a server's messages, mended."""
    import anyio

    with give, suppress(anyio.BrokenResourceError):
        async for message in received:
            if not isinstance(message, Exception):
                mend_result(getattr(message.message, "result", None))
            await give.send(message)


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name
        return False
