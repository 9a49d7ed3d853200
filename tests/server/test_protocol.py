"""Connections that never become a request: they end, and they take no place from others. Answers are not cut."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import logging
import resource
import socket
import struct
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from edgelm.server import listener, protocol
from edgelm.server.listener import AcceptNotices, Server, bind_tcp
from edgelm.server.protocol import max_connections, raise_file_limit

LIMIT_S = 30
SHORT_S = 0.3
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST /chat HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n"

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def pieces() -> AsyncIterator[bytes]:
    for _ in range(5):
        yield b"piece"
        await asyncio.sleep(SHORT_S / 2)
    await APP.state.may_end.wait()


async def health(_: Request) -> Response:
    return PlainTextResponse("well")


async def chat(request: Request) -> Response:
    await request.body()
    return StreamingResponse(pieces())


APP = Starlette(routes=[Route("/health", health, methods=["GET", "POST"]), Route("/chat", chat, methods=["POST"])])
APP.state.may_end = asyncio.Event()  # the answers of /chat; a test may set another one
APP.state.may_end.set()


class Port:
    """A server in this process."""

    def __init__(self, server: Server, number: int) -> None:
        self.server = server
        self.number = number
        self.writers: list[asyncio.StreamWriter] = []

    async def connect(self, sent: bytes = b"") -> Streams:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.number)
        self.writers.append(writer)
        writer.write(sent)
        return reader, writer

    async def close(self) -> None:
        for writer in self.writers:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


@asynccontextmanager
async def serving(max_open: int | None = None) -> AsyncIterator[Port]:
    sock = bind_tcp("127.0.0.1", 0)
    server = Server(APP, grace_s=1)
    if max_open is not None:
        server.config.limit_concurrency = max_open
    task = asyncio.create_task(server.serve(sockets=[sock]))
    number = sock.getsockname()[1]
    async with asyncio.timeout(LIMIT_S):
        while not server.started:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)
        port = Port(server, number)
        try:
            yield port
        finally:
            await port.close()
            server.should_exit = True
            await task


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_LIMIT_S", SHORT_S)
    monkeypatch.setattr(protocol, "KEEP_ALIVE_S", SHORT_S)
    monkeypatch.setattr(listener, "KEEP_ALIVE_S", SHORT_S)
    monkeypatch.setattr(protocol, "LINGER_S", SHORT_S)


async def drip(writer: asyncio.StreamWriter, piece: bytes) -> None:
    """Send a little again and again, until the connection is closed."""
    with suppress(ConnectionError):
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(SHORT_S / 10)


@pytest.mark.parametrize(("version", "body"), [("1.1", b"5\r\npiece\r\n" * 5 + b"0\r\n\r\n"), ("1.0", b"piece" * 5)])
async def test_only_those_who_know_chunks_get_them(version: str, body: bytes) -> None:
    async with serving() as port:
        sent = POST.replace(b"1.1", version.encode()).replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
        reader, _ = await port.connect(sent + b"x" * 9)
        head, _, rest = (await asyncio.wait_for(reader.read(), LIMIT_S)).partition(b"\r\n\r\n")
    assert rest == body
    assert (b"transfer-encoding: chunked" in head.lower()) is (version == "1.1")


async def test_a_wish_for_http_2_is_no_matter(caplog: pytest.LogCaptureFixture) -> None:
    """Java's client has it in each request."""
    wish = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n\r\n"
    async with serving() as port:
        reader, _ = await port.connect(GET.replace(b"\r\n\r\n", b"\r\n" + wish))
        assert b"200 OK" in await asyncio.wait_for(reader.readline(), LIMIT_S)
    assert not caplog.records


@pytest.mark.usefixtures("short")
async def test_a_connection_without_a_request_ends() -> None:
    async with serving() as port:
        reader, _ = await port.connect()
        assert await reader.read() == b""


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("before", [b"", GET])
async def test_a_head_that_never_ends_is_told_so(before: bytes) -> None:
    """Also as the second request of a connection, and however often a byte comes."""
    async with serving() as port:
        reader, writer = await port.connect(before)
        if before:
            await reader.readuntil(b"well")
        writer.write(b"POST /chat HTTP/1.1\r\n")
        dripping = asyncio.create_task(drip(writer, b"x-more: x\r\n"))
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408")
        assert b"connection: close" in head.lower()
        assert json.loads(body)["error"]["code"] == "request_timeout"
        await dripping
        assert not port.server.server_state.connections


@pytest.mark.usefixtures("short")
async def test_the_rest_of_a_body_after_its_answer_ends() -> None:
    async with serving() as port:
        reader, writer = await port.connect(POST.replace(b"/chat", b"/health").replace(b": 9", b": 99999"))
        await reader.readuntil(b"well")
        await drip(writer, b"x")


@pytest.mark.usefixtures("short")
async def test_nothing_is_answered_after_the_rest_of_a_body() -> None:
    async with serving() as port:
        reader, writer = await port.connect(POST.replace(b"/chat", b"/health"))
        await reader.readuntil(b"well")
        writer.write(b"the body.")
        assert await reader.read() == b""


@pytest.mark.usefixtures("short")
async def test_an_answer_may_take_longer_than_every_limit() -> None:
    async with serving() as port:
        reader, writer = await port.connect(POST + b"the body.")
        text = await reader.readuntil(b"0\r\n\r\n")
        assert text.count(b"piece") == 5
        writer.write(GET)
        assert b"well" in await reader.readuntil(b"well"), "the connection is kept"


async def test_nothing_stays_of_a_connection_that_is_reset() -> None:
    """Proxies end idle connections so: each would keep its last request in memory for two minutes."""
    async with serving() as port:
        reader, writer = await port.connect(GET)
        await reader.readuntil(b"well")
        [connection] = port.server.server_state.connections
        left = weakref.ref(connection)
        del connection
        assert left() is not None
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        for _ in range(int(LIMIT_S / 2 / 0.01)):
            gc.collect()
            if left() is None:
                break
            await asyncio.sleep(0.01)
        assert left() is None


async def test_two_requests_sent_at_once_are_both_answered() -> None:
    async with serving() as port:
        reader, _ = await port.connect(GET + GET)
        for _ in range(2):
            await reader.readuntil(b"well")


async def test_the_longest_idle_connection_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "EVICTION_S", 0.05)
    async with serving(max_open=3) as port:
        busy, _ = await port.connect(POST + b"the body.")
        await busy.readuntil(b"piece")
        oldest, _ = await port.connect()
        await asyncio.sleep(0.1)
        await port.connect(b"GET")
        await asyncio.sleep(0.1)
        newest, _ = await port.connect(GET)
        assert b"well" in await newest.readuntil(b"well")
        assert await oldest.read() == b""
        assert (await busy.readuntil(b"0\r\n\r\n")).count(b"piece") == 4, "an answer is never cut"


async def test_what_does_not_fit_is_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = asyncio.Event()
    monkeypatch.setattr(APP.state, "may_end", may_end)
    async with serving(max_open=4) as port:
        streams = [await port.connect(POST + b"the body.") for _ in range(4)]
        for reader, _ in streams:
            await reader.readuntil(b"piece")
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port.number}", trust_env=False) as http:
            for _ in range(20):
                answer = await http.post("/chat", content=b"x" * 1000)
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
                assert answer.headers["retry-after"] == "1"
                assert answer.headers["x-request-id"].startswith("req_")
            may_end.set()
            for reader, writer in streams:
                await reader.readuntil(b"0\r\n\r\n")
                writer.close()
            await asyncio.sleep(0.1)
            assert (await http.get("/health")).status_code == 200


@pytest.fixture
def file_limit() -> Iterator[int]:
    """Give the hard limit on open files, with a low soft one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("the hard limit is too low")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_files_up_to_the_hard_limit(file_limit: int) -> None:
    before = max_connections()
    assert 250 < before < 512
    raise_file_limit()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard == file_limit
    assert 1024 < soft <= hard
    assert before < max_connections() <= soft // 2
    raise_file_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)


def test_a_full_table_of_files_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio reports every attempt to accept a connection, each with a traceback."""
    loop, notices = asyncio.new_event_loop(), AcceptNotices()
    context: dict[str, Any] = {"message": "out of system resource", "socket": None}
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            notices(loop, context | {"exception": OSError(errno.EMFILE, "Too many open files")})
        assert [record.getMessage() for record in caplog.records] == [
            "connections cannot be accepted: Too many open files; raise the limit with `ulimit -n`"
        ]
        notices(loop, {"message": "a bug", "exception": ZeroDivisionError()})
    assert caplog.records[-1].exc_info, "other failures are shown whole"
    loop.close()
