"""Streams that end, and clients that leave in the middle, on a server that a test plays."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from edgelm.server.listener import Server, bind_tcp
from edgelm.server.sse import ClientLeftError, EventStream, json_pieces, unless_client_leaves

LIMIT_S = 30
SCOPE = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "headers": []}


class Client:
    """One end of a connection: reads so many messages, then no more; leaves when it is told to."""

    def __init__(self, reads: int = 1000) -> None:
        self.sent: list[Message] = []
        self.left = asyncio.Event()
        self.full = asyncio.Event()
        self._reads = reads

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if len(self.sent) >= self._reads:
            self.full.set()
            await asyncio.Event().wait()
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def forever() -> AsyncIterator[bytes]:
    while True:
        yield b"data: x\n\n"
        await asyncio.sleep(0)


def recording(calls: list[str]) -> AsyncExitStack:
    async def call() -> None:
        await asyncio.sleep(0)  # a cleanup that waits is not cut short
        calls.append("cleaned")

    stack = AsyncExitStack()
    stack.push_async_callback(call)
    return stack


async def test_events_that_are_all_ready_stop_with_the_client() -> None:
    """asyncio logs a warning for every write to a connection that it knows to be broken."""

    async def ready() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield b"data: x\n\n"

    class Leaving(Client):
        async def send(self, message: Message) -> None:
            await super().send(message)
            if len(self.sent) == 3:
                self.left.set()

    client = Leaving()
    async with asyncio.timeout(LIMIT_S):
        await EventStream(ready(), recording([]))(SCOPE, client.receive, client.send)
    assert len(client.sent) < 10


async def test_a_client_that_resets_its_connection_is_no_line_of_asyncio(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio logs the sixth write to a socket that failed. The loop has no turn between the reset and the events."""
    client, ended = socket.socket(), asyncio.Event()
    client.setblocking(False)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async def events() -> AsyncIterator[bytes]:
        client.close()
        for _ in range(1000):
            yield b"data: x\n\n"

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await EventStream(events(), AsyncExitStack())(scope, receive, send)
        ended.set()

    server, listener, loop = Server(app), bind_tcp("127.0.0.1", 0), asyncio.get_running_loop()
    serving = asyncio.create_task(server.serve([listener]))
    async with asyncio.timeout(LIMIT_S):
        await loop.sock_connect(client, listener.getsockname())
        await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await ended.wait()
        server.should_exit = True
        await serving
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


async def test_a_stream_that_ends() -> None:
    async def two() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        yield b"data: 2\n\n"

    calls: list[str] = []
    client = Client()
    async with asyncio.timeout(LIMIT_S):
        await EventStream(two(), recording(calls))(SCOPE, client.receive, client.send)
    assert client.body == b"data: 1\n\ndata: 2\n\n"
    assert (b"cache-control", b"no-store") in client.sent[0]["headers"]
    assert calls == ["cleaned"]


@pytest.mark.parametrize("reads", [3, 1000], ids=["a client that stopped reading", "one that reads"])
async def test_a_client_that_leaves(reads: int) -> None:
    calls: list[str] = []
    client = Client(reads)
    async with asyncio.timeout(LIMIT_S):
        asking = asyncio.create_task(EventStream(forever(), recording(calls))(SCOPE, client.receive, client.send))
        await (client.full.wait() if reads == 3 else asyncio.sleep(0.01))
        assert calls == []
        client.left.set()
        await asking
    assert calls == ["cleaned"]


async def test_a_stream_that_is_cancelled() -> None:
    calls: list[str] = []
    client = Client(3)
    async with asyncio.timeout(LIMIT_S):
        asking = asyncio.create_task(EventStream(forever(), recording(calls))(SCOPE, client.receive, client.send))
        await client.full.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    assert calls == ["cleaned"]


async def test_work_for_a_client() -> None:
    async def work(then: Callable[[], int]) -> int:
        await asyncio.sleep(0.01)
        return then()

    client = Client()
    request = Request(SCOPE, client.receive)
    async with asyncio.timeout(LIMIT_S):
        assert await unless_client_leaves(request, work(lambda: 7)) == 7
        with pytest.raises(ZeroDivisionError):
            await unless_client_leaves(request, work(lambda: 1 // 0))
        cancelled = asyncio.Event()

        async def endless() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        asking = asyncio.create_task(unless_client_leaves(request, endless()))
        await asyncio.sleep(0.01)
        client.left.set()
        with pytest.raises(ClientLeftError):
            await asking
        assert cancelled.is_set()


VECTOR = [0.25, -1e-9, 3.0]


@pytest.mark.parametrize(
    "document",
    [
        {
            "data": [{"index": index, "embedding": VECTOR} for index in range(3)],
            "model": 'a "b" \u00e9',
            "usage": {"n": 1},
        },
        {"embeddings": [VECTOR, VECTOR], "total": 1},
        [{"index": 0, "score": 0.5, "text": "x"}, {"index": 1, "score": 0.25}],
        {"embedding": []},
        {},
    ],
)
def test_pieces_are_the_document_and_none_has_two_vectors(document: Any) -> None:
    pieces = list(json_pieces(document))
    assert json.loads(b"".join(pieces)) == document
    assert max(piece.count(b"-1e-09") for piece in pieces) <= 1
