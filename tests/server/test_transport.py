"""Connections to other servers and engine processes, over real sockets: limits, TLS, ends in the middle, too much."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpcore2
import httpx2
import pytest

from edgelm.server.own_certificates import OwnCertificates
from edgelm.server.transport import HELD_BYTES, Transport, _Connection
from tests.server.harness import LIMIT_S
from tests.server.virtual_time import VirtualLoop

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
HELLO = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
UNTIL_END = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nhello"
SHORT_S = 0.05  # of servers that never do what is waited for
PIECE = bytes(range(256)) * 2**12  # 1 MiB


class Trust(NamedTuple):
    """What a server shows and what its clients trust; nothing: no TLS."""

    server: ssl.SSLContext | None
    client: ssl.SSLContext | bool
    over_unix: bool = False


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> OwnCertificates:
    if shutil.which("openssl") is None:
        pytest.skip("makes certificates with openssl")
    own = OwnCertificates(tmp_path_factory.mktemp("tls"))
    own.renew("box", ["127.0.0.1", "localhost"])
    return own


def shown(own: OwnCertificates) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(own.server, own.key)
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


@pytest.fixture(params=["plain", "tls", "unix"])
def trust(request: pytest.FixtureRequest) -> Trust:
    if request.param != "tls":
        return Trust(None, False, over_unix=request.param == "unix")
    own = request.getfixturevalue("certificates")
    return Trust(shown(own), ssl.create_default_context(cafile=own.authority))


class Server:
    """A server of the test, and a client of it. `num_connections` counts those that it got."""

    def __init__(self, url: str, http: httpx2.AsyncClient) -> None:
        self.url, self.http = url, http
        self.num_connections = 0


@asynccontextmanager
async def serving(
    handler: Handler, trust: Trust, host: str = "127.0.0.1", **limits: float | None
) -> AsyncIterator[Server]:
    given: list[asyncio.Task[Any]] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.num_connections += 1
        task = asyncio.current_task()
        assert task
        given.append(task)
        try:
            await handler(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client is gone, or the test is over
        finally:
            writer.transport.abort()

    scheme, port, uds = "http" if trust.server is None else "https", 80, None
    if trust.over_unix:
        uds = f"/tmp/edgelm-test-{os.getpid()}-{secrets.token_hex(4)}"  # a temporary folder may have a long path
        sockets = await asyncio.start_unix_server(handle, uds)
    else:
        sockets = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=trust.server)
        port = sockets.sockets[0].getsockname()[1]
    timeout, transport = httpx2.Timeout(LIMIT_S, **limits), Transport(httpx2.Limits(), trust.client, uds)
    async with httpx2.AsyncClient(transport=transport, timeout=timeout) as http:
        server = Server(f"{scheme}://{host}:{port}/", http)
        try:
            yield server
        finally:
            sockets.close()
            if uds is not None and os.path.exists(uds):  # noqa: ASYNC240, PTH110 # Python 3.13 removes it
                os.unlink(uds)  # noqa: PTH108
            for task in given:
                task.cancel()
            await asyncio.gather(*given, return_exceptions=True)


async def request_of(reader: asyncio.StreamReader) -> bytes:
    """Return the body of a request."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    size = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return await reader.readexactly(int(size or 0))


async def never(*_: object) -> None:
    await asyncio.Event().wait()


async def until_true(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0)


def stream_of(answer: httpx2.Response) -> _Connection:
    connection = answer.extensions["network_stream"]
    assert isinstance(connection, _Connection), "httpx2 uses connections of its own"
    return connection


async def test_a_connection_is_kept_for_later_requests(trust: Trust) -> None:
    bodies = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            bodies.append(await request_of(reader))
            writer.write(HELLO)

    async with serving(handler, trust) as server:
        for size in (10, 3 * len(PIECE), 20):
            answer = await server.http.post(server.url, content=(PIECE * 4)[:size])
            assert answer.text == "hello"
            stream_of(answer)
        assert server.num_connections == 1
    assert bodies == [PIECE[:10], PIECE * 3, PIECE[:20]]


@pytest.mark.parametrize("rest", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nlies"])
async def test_a_kept_connection_that_ended_or_says_more_is_not_used(trust: Trust, rest: bytes) -> None:
    writers = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await request_of(reader)
        writer.write(HELLO)
        await never()

    async with serving(handler, trust) as server:
        connection = stream_of(await server.http.get(server.url))
        assert not connection.get_extra_info("is_readable")
        if rest:
            writers[0].write(rest)
            assert connection.get_extra_info("is_readable"), "before the loop has read it"
            await until_true(lambda: connection._received)
        else:
            writers[0].close()
            await until_true(lambda: connection._is_over)
        assert connection.get_extra_info("is_readable")
        assert (await server.http.get(server.url)).text == "hello"
        assert server.num_connections == 2


async def test_a_server_that_is_silent_ends_the_read(trust: Trust) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(CHUNKED + b"5\r\nhello\r\n")
        await never()

    async with serving(handler, trust, read=SHORT_S) as server:
        with pytest.raises(httpx2.ReadTimeout):
            await server.http.get(server.url)


async def test_a_server_that_does_not_read_ends_the_write(trust: Trust) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        while True:
            yield PIECE

    async with serving(never, trust, write=SHORT_S) as server:
        with pytest.raises(httpx2.WriteTimeout):
            await server.http.post(server.url, content=pieces())


async def test_a_server_that_makes_no_handshake_ends_the_connecting(certificates: OwnCertificates) -> None:
    ended = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        ended.set()

    client = ssl.create_default_context(cafile=certificates.authority)
    async with serving(handler, Trust(None, client), connect=1.0) as server:
        with pytest.raises(httpx2.ConnectTimeout):
            await server.http.get(server.url.replace("http:", "https:"))
        await asyncio.wait_for(ended.wait(), LIMIT_S)


def test_a_limit_is_for_each_read_and_not_for_the_answer() -> None:
    class FakeTransport(asyncio.Transport):
        def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    loop = VirtualLoop()

    async def read() -> list[tuple[float, bytes]]:
        connection = _Connection()
        connection.connection_made(FakeTransport())
        for at in (6, 12, 18, 24, 124):
            loop.call_at(at, connection.data_received, b"%d" % at)
        parts = [(loop.time(), await connection.read(10, limit_s)) for limit_s in (10.0, 10.0, 10.0, 60.0)]
        for limit_s in (10.0, 2.0, 5.0):
            with pytest.raises(httpcore2.ReadTimeout):
                await connection.read(10, limit_s)
            parts.append((loop.time(), b""))
        parts.append((0, await connection.read(10)))  # without a limit
        return [*parts, (loop.time(), b"")]

    try:
        seen = loop.run_until_complete(read())
    finally:
        loop.close()
    assert [part for _, part in seen[:4]] == [b"6", b"12", b"18", b"24"]
    assert [pytest.approx(time) for time, _ in seen[4:7]] == [34, 36, 41]
    assert seen[7:] == [(0, b"124"), (pytest.approx(124), b"")]


async def test_a_read_that_is_cancelled_closes_the_connection(trust: Trust) -> None:
    ended = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(CHUNKED + b"5\r\nhello\r\n")
        try:
            assert not await reader.read()
        finally:
            ended.set()

    async with serving(handler, trust) as server:
        parts: asyncio.Queue[bytes] = asyncio.Queue()

        async def read() -> None:
            async with server.http.stream("GET", server.url) as answer:
                async for part in answer.aiter_raw():
                    parts.put_nowait(part)

        reading = asyncio.create_task(read())
        assert await asyncio.wait_for(parts.get(), LIMIT_S) == b"hello"
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await asyncio.wait_for(ended.wait(), LIMIT_S)


@pytest.mark.parametrize("how", ["end", "reset"])
async def test_a_server_that_ends_in_the_middle_of_a_chunk(trust: Trust, how: str) -> None:
    has_part = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(CHUNKED + b"a\r\nhello")
        await writer.drain()
        await has_part.wait()
        if how == "reset":
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    async with serving(handler, trust) as server, server.http.stream("GET", server.url) as answer:
        parts = answer.aiter_raw()
        assert await anext(parts) == b"hello"
        has_part.set()
        with pytest.raises(httpx2.RemoteProtocolError if how == "end" or trust.over_unix else httpx2.ReadError):
            await anext(parts)


async def test_an_answer_may_end_with_the_connection(trust: Trust, caplog: pytest.LogCaptureFixture) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(UNTIL_END)
        await writer.drain()

    async with serving(handler, trust) as server, server.http.stream("GET", server.url) as answer:
        connection = stream_of(answer)
        await until_true(lambda: connection._is_over)
        for _ in range(5):  # of the loop: TLS closes the socket
            await asyncio.sleep(0)
        assert await answer.aread() == b"hello"
    assert not [record for record in caplog.records if record.name == "asyncio"]


async def test_an_answer_before_the_end_of_the_request(trust: Trust) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(UNTIL_END)
        if writer.can_write_eof():  # not over TLS
            writer.write_eof()
        await reader.readexactly(20 * len(PIECE))

    async with serving(handler, trust) as server:
        assert (await server.http.post(server.url, content=PIECE * 20)).status_code == 200


async def test_a_server_waits_for_a_slow_reader(trust: Trust) -> None:
    num_pieces = 40

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (num_pieces * len(PIECE)))
        for _ in range(num_pieces):
            writer.write(PIECE)
            await writer.drain()
        await never()

    async with serving(handler, trust) as server, server.http.stream("GET", server.url) as answer:
        connection = stream_of(answer)
        await until_true(lambda: connection._is_paused)
        received, most = bytearray(), 0
        async for part in answer.aiter_raw():
            received += part
            for _ in range(3):  # the server could send more meanwhile
                await asyncio.sleep(0)
                most = max(most, len(connection._received))
        assert received == PIECE * num_pieces
        assert HELD_BYTES <= most < HELD_BYTES + 2**19


async def test_every_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = ["127.0.0.2", "127.0.0.1"]

    async def named(host: str, port: int, **_: object) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(UNTIL_END)
        await writer.drain()

    async with serving(handler, Trust(None, False), "box") as server:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", named)
        assert (await server.http.get(server.url)).text == "hello"
        addresses[1] = "127.0.0.3"
        with pytest.raises(httpx2.ConnectError):
            await server.http.get(server.url)


@pytest.mark.parametrize("name", ["a" * 64, "a..b"])
async def test_what_is_no_name_cannot_be_reached(name: str) -> None:
    async with httpx2.AsyncClient(transport=Transport(httpx2.Limits(), False)) as http:
        with pytest.raises(httpx2.ConnectError):
            await http.get(f"http://{name}.invalid/")


async def test_a_port_without_a_server_refuses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with httpx2.AsyncClient(transport=Transport(httpx2.Limits(), False)) as http:
        with pytest.raises(httpx2.ConnectError, match="Connection refused"):
            await http.get(f"http://127.0.0.1:{port}/")


async def test_tls_names_the_server_and_its_protocol(certificates: OwnCertificates) -> None:
    told = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        told.append(writer.get_extra_info("ssl_object").selected_alpn_protocol())
        await request_of(reader)
        writer.write(HELLO)
        await never()

    server_side = shown(certificates)
    server_side.sni_callback = lambda _, name, __: told.append(name)
    trust = Trust(server_side, ssl.create_default_context(cafile=certificates.authority))
    async with serving(handler, trust, "localhost") as server:
        assert (await server.http.get(server.url)).text == "hello"
    assert told == ["localhost", "http/1.1"]


async def test_another_certificate_is_refused(certificates: OwnCertificates, tmp_path: Path) -> None:
    other = OwnCertificates(tmp_path)
    other.renew("other", ["127.0.0.1"])
    for trust, words in (
        (ssl.create_default_context(cafile=other.authority), "certificate verify failed"),
        (ssl.create_default_context(), "certificate verify failed"),
    ):
        async with serving(never, Trust(shown(certificates), trust)) as server:
            with pytest.raises(httpx2.ConnectError, match=words):
                await server.http.get(server.url)
    by_address = Trust(shown(other), ssl.create_default_context(cafile=other.authority))
    async with serving(never, by_address, "localhost") as server:
        with pytest.raises(httpx2.ConnectError, match="Hostname mismatch"):
            await server.http.get(server.url)
