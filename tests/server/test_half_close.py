"""Clients that close their sending side: those that wait for the answer get it, those that have left end it."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

import pytest
from starlette.types import Receive, Scope, Send

from edgelm.server import half_close
from edgelm.server.half_close import HalfCloseProtocol
from edgelm.server.listener import Server, bind_tcp
from edgelm.server.sse import MEDIA_TYPE, NDJSON, EventStream
from tests.server.harness import ENDLESS, LIMIT_S, Front, body, until


def connect(front: Front, content: bytes, *, declared: int | None = None, version: str = "1.1") -> socket.socket:
    """Send a request and close the sending side."""
    address = urlsplit(front.address)
    connection = socket.create_connection((address.hostname, address.port or 0), LIMIT_S)
    length = len(content) if declared is None else declared
    head = f"POST /v1/chat/completions HTTP/{version}\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}prefer: wait\r\ncontent-length: {length}\r\n\r\n".encode() + content)
    connection.shutdown(socket.SHUT_WR)
    return connection


def read(connection: socket.socket) -> bytes:
    received = b""
    while piece := connection.recv(65_536):
        received += piece
    return received


def last_response(received: bytes) -> tuple[bytes, bytes]:
    """Return status line and body of the response after the interim ones."""
    while received.startswith(b"HTTP/1.1 100 "):
        received = received.partition(b"\r\n\r\n")[2]
    head, _, rest = received.partition(b"\r\n\r\n")
    return head.partition(b"\r\n")[0], rest


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_an_answer_after_a_half_close(front: Front, version: str) -> None:
    with connect(front, json.dumps(body("tiny", "hello")).encode(), version=version) as connection:
        begin = time.monotonic()
        line, answer = last_response(read(connection))
        assert line == b"HTTP/1.1 200 OK"
        assert json.loads(answer)["usage"]["completion_tokens"] > 0
        assert time.monotonic() - begin < LIMIT_S / 2, "the connection is closed after the answer, not kept"


def test_a_long_answer_after_a_half_close(front: Front) -> None:
    """It takes long enough for interim responses."""
    content = json.dumps(body("long", "hello", **ENDLESS | {"max_tokens": 2000})).encode()
    with connect(front, content) as connection:
        line, answer = last_response(read(connection))
    assert line == b"HTTP/1.1 200 OK"
    assert json.loads(answer)["usage"]["completion_tokens"] == 2000


def test_a_stream_after_a_half_close(front: Front) -> None:
    with connect(front, json.dumps(body("tiny", "hello", stream=True)).encode()) as connection:
        assert b"data: [DONE]" in read(connection)


def test_half_a_request_gets_nothing(front: Front) -> None:
    with connect(front, b'{"model":', declared=1000) as connection:
        assert b"200 OK" not in read(connection)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_left_ends_its_request(front: Front, stream: bool) -> None:
    content = json.dumps(body("long", "hello", **ENDLESS | {"max_tokens": 30_000, "stream": stream})).encode()
    with connect(front, content):
        until("the request is at work", lambda: (front.ps("long") or {}).get("requests") == 1)
    begin = time.monotonic()
    until("the request is over", lambda: front.ps("long")["requests"] == 0)
    assert time.monotonic() - begin < LIMIT_S / 2


async def test_a_client_that_leaves_a_silent_stream_ends_it() -> None:
    """Its answer has begun, and no token comes for long, as while a long prompt is computed."""
    begun, left = asyncio.Event(), asyncio.Event()

    async def events() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        begun.set()
        await asyncio.Event().wait()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as stack:
            stack.callback(left.set)
            await EventStream(events(), stack.pop_all())(scope, receive, send)

    listener = bind_tcp("127.0.0.1", 0)
    server = Server(app, grace_s=1, protocol=HalfCloseProtocol)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    async with asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b"200 OK" in await reader.readline()
        await begun.wait()
        writer.close()
        await left.wait()
        await writer.wait_closed()
        server.should_exit = True
        await serving


@pytest.mark.parametrize(
    ("media_type", "first", "last"),
    [(MEDIA_TYPE, b"data: 1\n\n", b"data: 2\n\n"), (NDJSON, b'{"a": 1}\n', b'{"b": 2}\n')],
)
async def test_what_finds_out_is_no_event(
    monkeypatch: pytest.MonkeyPatch, media_type: str, first: bytes, last: bytes
) -> None:
    monkeypatch.setattr(half_close, "PROBES_S", (0.0,) * 3)
    probed = asyncio.Event()
    send_probe = HalfCloseProtocol._send_probe

    def note(protocol: HalfCloseProtocol, num_sent: int) -> None:
        send_probe(protocol, num_sent)
        if num_sent == 2:
            probed.set()

    monkeypatch.setattr(HalfCloseProtocol, "_send_probe", note)

    async def events() -> AsyncIterator[bytes]:
        yield first
        await probed.wait()
        yield last

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await EventStream(events(), AsyncExitStack(), media_type)(scope, receive, send)

    listener = bind_tcp("127.0.0.1", 0)
    server = Server(app, grace_s=1, protocol=HalfCloseProtocol)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    async with asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"GET / HTTP/1.0\r\nhost: localhost\r\n\r\n")
        await reader.readuntil(first)
        writer.write_eof()
        rest = (await reader.read()).decode()
        writer.close()
        server.should_exit = True
        await serving
    if media_type == NDJSON:
        assert [json.loads(line) for line in rest.splitlines()] == [{"b": 2}]
        assert rest.startswith(" "), "it has found out"
    else:
        assert [line for line in rest.splitlines() if line.strip(":")] == ["data: 2"]
        assert rest.startswith(":\n"), "it has found out"


async def test_two_requests_in_one_piece(front: Front) -> None:
    address = urlsplit(front.address)
    async with asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 2)
        writer.write_eof()
        assert (await reader.read()).count(b"200 OK") == 2
        writer.close()
        await writer.wait_closed()
