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

import h11
import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    client: ssl.SSLContext | None
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
        return Trust(None, None, over_unix=request.param == "unix")
    own = request.getfixturevalue("certificates")
    return Trust(shown(own), ssl.create_default_context(cafile=own.authority))


class Server:
    """A server of the test, and a client of it. `num_connections` counts those that it got."""

    def __init__(self, url: str, http: httpx2.AsyncClient, transport: Transport) -> None:
        self.url, self.http, self._transport = url, http, transport
        self.num_connections = 0

    @property
    def connection(self) -> _Connection:
        """The one that is open."""
        (connection,) = self._transport._open
        return connection


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
    timeout, transport = httpx2.Timeout(LIMIT_S, **limits), Transport(8, LIMIT_S, trust.client, uds)
    async with httpx2.AsyncClient(transport=transport, timeout=timeout) as http:
        server = Server(f"{scheme}://{host}:{port}/", http, transport)
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
        await server.http.get(server.url)
        connection = server.connection
        assert not connection.has_ended()
        if rest:
            writers[0].write(rest)
            assert connection.has_ended(), "before the loop has read it"
            await until_true(lambda: connection._is_over)
        else:
            writers[0].close()
            await until_true(lambda: connection._is_over)
        assert connection.has_ended()
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
            await server.http.post(server.url, content=pieces(), headers={"content-length": str(2**60)})


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
        connection = _Connection(("http", "box", 80))
        connection.connection_made(FakeTransport())
        connection._begin()
        connection.data_received(CHUNKED)
        for at in (6, 12, 18, 24, 124):
            loop.call_at(at, connection.data_received, b"%x\r\n%d\r\n" % (len(str(at)), at))
        parts = [(loop.time(), await connection.part(limit_s)) for limit_s in (10.0, 10.0, 10.0, 60.0)]
        for limit_s in (10.0, 2.0, 5.0):
            with pytest.raises(httpx2.ReadTimeout):
                await connection.part(limit_s)
            parts.append((loop.time(), b""))
        parts.append((0, await connection.part(None)))
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
        connection = server.connection
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


async def test_an_early_answer_of_a_server_that_reads_on(trust: Trust) -> None:
    """It says all, and reads the rest of the request, as nginx does: else its answer might be lost."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HELLO.replace(b"content", b"connection: close\r\ncontent"))
        if writer.can_write_eof():  # not over TLS
            writer.write_eof()
        while await reader.read(2**16):
            pass

    async with serving(handler, trust) as server:
        for _ in range(3):
            assert (await server.http.post(server.url, content=PIECE * 20)).text == "hello"


@pytest.mark.parametrize(
    "sent",
    [
        CHUNKED + b"5 \r\nhello\r\n0\r\n\r\n",
        HELLO.replace(b"\r\n", b"\n"),
        CHUNKED.replace(b"transfer", b"content-length: 99\r\ntransfer") + b"5\r\nhello\r\n0\r\n\r\n",
    ],
)
async def test_answers_of_careless_servers_are_read(sent: bytes) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(sent)
        await never()

    async with serving(handler, Trust(None, None)) as server:
        assert (await server.http.get(server.url)).text == "hello"


@pytest.mark.parametrize("name", ["straße.example", "xn--strae-oqa.example"])
async def test_a_name_is_looked_up_as_the_head_spells_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By IDNA 2008; Python's own codec would ask for strasse.example, another domain."""
    asked = []

    async def named(host: str, port: int, **_: object) -> list[Any]:
        asked.append(host)
        raise socket.gaierror

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", named)
    async with httpx2.AsyncClient(transport=Transport(8, LIMIT_S)) as http:
        request = http.build_request("GET", f"http://{name}/")
        with pytest.raises(httpx2.ConnectError):
            await http.send(request)
    assert asked == [request.headers["host"]] == ["xn--strae-oqa.example"]


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
        connection = server.connection
        await until_true(lambda: connection._is_paused)
        received, most = bytearray(), 0
        async for part in answer.aiter_raw():
            received += part
            for _ in range(3):  # the server could send more meanwhile
                await asyncio.sleep(0)
                most = max(most, connection._num_held)
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

    async with serving(handler, Trust(None, None), "box") as server:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", named)
        assert (await server.http.get(server.url)).text == "hello"
        addresses[1] = "127.0.0.3"
        with pytest.raises(httpx2.ConnectError):
            await server.http.get(server.url)


@pytest.mark.parametrize("name", ["a" * 64, "a..b"])
async def test_what_is_no_name_cannot_be_reached(name: str) -> None:
    async with httpx2.AsyncClient(transport=Transport(8, LIMIT_S)) as http:
        with pytest.raises(httpx2.ConnectError):
            await http.get(f"http://{name}.invalid/")


async def test_a_port_without_a_server_refuses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with httpx2.AsyncClient(transport=Transport(8, LIMIT_S)) as http:
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


async def test_a_full_queue_of_an_engine_is_waited_for(tmp_path: Path) -> None:
    path = f"/tmp/edgelm-test-{os.getpid()}-{secrets.token_hex(4)}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)
        listener.setblocking(False)
        loop, taken = asyncio.get_running_loop(), []
        async with httpx2.AsyncClient(transport=Transport(8, LIMIT_S, uds=path), timeout=LIMIT_S) as http:
            asking = [asyncio.create_task(http.get("http://engine/")) for _ in range(6)]
            await asyncio.sleep(SHORT_S)  # the engine stands still, and its queue is full
            for _ in asking:
                accepted, _ = await asyncio.wait_for(loop.sock_accept(listener), LIMIT_S)
                taken.append(accepted)
                await loop.sock_sendall(accepted, HELLO)
            assert [answer.text for answer in await asyncio.wait_for(asyncio.gather(*asking), LIMIT_S)] == ["hello"] * 6
        for accepted in taken:
            accepted.close()
    os.unlink(path)  # noqa: PTH108


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"hello\r\n\r\n", "no answer of HTTP/1.1"),
        (CHUNKED + b"z\r\nhello\r\n", "no answer of HTTP/1.1"),
        (b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n", "no answer of HTTP/1.1"),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 40_000, "head without end"),
        (CHUNKED + b"5;" + b"x" * 200_000, "head without end"),
        (CHUNKED + b"0\r\n" + b"x: y\r\n" * 40_000, "head without end"),
        (b"", "ended before the answer"),
    ],
)
async def test_an_answer_that_is_none(sent: bytes, words: str) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(sent)
        await writer.drain()
        if words in ("head without end", "no answer of HTTP/1.1"):
            await never()

    async with serving(handler, Trust(None, None)) as server:
        with pytest.raises(httpx2.RemoteProtocolError, match=words):
            await server.http.get(server.url)


async def test_interim_answers_are_passed_over(trust: Trust) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await request_of(reader)
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + HELLO)

    async with serving(handler, trust) as server:
        for _ in range(2):
            answer = await server.http.get(server.url)
            assert (answer.status_code, answer.text, "link" in answer.headers) == (200, "hello", False)
        assert server.num_connections == 1


@pytest.mark.parametrize("value", ["a\r\nb: c", "a\nb", "a\0b"])
async def test_no_header_gets_a_second_line(value: str) -> None:
    async with serving(never, Trust(None, None)) as server:
        with pytest.raises(httpx2.LocalProtocolError):
            await server.http.get(server.url, headers=[(b"x", value.encode())])


async def test_two_answers_to_one_request_are_one(trust: Trust) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(HELLO + HELLO.replace(b"hello", b"lying"))
        await never()

    async with serving(handler, trust) as server:
        for _ in range(2):
            assert (await server.http.get(server.url)).text == "hello"
        assert server.num_connections == 2


async def test_few_connections_are_kept_and_not_for_long() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await request_of(reader)
            await all_asked.wait()
            writer.write(HELLO)

    all_asked = asyncio.Event()
    async with serving(handler, Trust(None, None)) as server:
        transport = server._transport
        transport._kept = 2
        asking = [asyncio.create_task(server.http.get(server.url)) for _ in range(5)]
        await until_true(lambda: server.num_connections == 5)
        all_asked.set()
        await asyncio.gather(*asking)
        assert len(transport._open) == 2
        transport._kept_s = 0.0
        await asyncio.sleep(0.001)
        await server.http.get(server.url)
        assert server.num_connections == 6


async def test_closing_ends_an_answer_in_its_middle(trust: Trust) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(CHUNKED + b"5\r\nhello\r\n")
        await never()

    async with serving(handler, trust) as server, server.http.stream("GET", server.url) as answer:
        parts = answer.aiter_raw()
        assert await anext(parts) == b"hello"
        await server._transport.aclose()
        with pytest.raises(httpx2.ReadError):
            await anext(parts)


@given(st.data())
def test_answers_in_any_pieces_are_what_h11_reads(data: st.DataObject) -> None:
    bodies = data.draw(st.lists(st.binary(max_size=40), max_size=6))
    form = data.draw(st.sampled_from(["chunks", "length", "end"]))
    status = data.draw(st.sampled_from([200, 404, 500, 204]))
    extra = data.draw(st.sampled_from([b"", b"connection: close\r\n", b"x-y:  z \r\n"]))
    interim = data.draw(st.sampled_from([b"", b"HTTP/1.1 100 Continue\r\n\r\n"]))
    raw = interim + b"HTTP/1.1 %d OK\r\n%b" % (status, extra)
    body = b"" if status == 204 else b"".join(bodies)
    if status == 204 or form == "end":
        raw += b"\r\n" + body
    elif form == "length":
        raw += b"Content-Length: %d\r\n\r\n" % len(body) + body
    else:
        chunks = b"".join(b"%x;a=b\r\n%b\r\n" % (len(part), part) for part in bodies if part)
        raw += b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\nx-trailer: 1\r\n\r\n"
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw)))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    pieces = [raw[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True) if begin < end]
    assert asyncio.run(_read_by_us(pieces)) == _read_by_h11(raw)


Read = tuple[int, list[tuple[bytes, bytes]], bytes, bool] | None  # whether the body is complete; None: no head


async def _read_by_us(pieces: list[bytes]) -> Read:
    class Quiet(asyncio.Transport):
        def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...
        def abort(self) -> None: ...

    connection = _Connection(("http", "box", 80))
    connection.connection_made(Quiet())
    connection._begin()
    for piece in pieces:
        connection.data_received(piece)
    connection.eof_received()
    try:
        status, headers = await connection.head(LIMIT_S)
    except httpx2.RemoteProtocolError:
        return None
    body = b""
    try:
        while part := await connection.part(LIMIT_S):
            body += part
    except httpx2.RemoteProtocolError:
        return status, headers, body, False
    return status, headers, body, True


def _read_by_h11(raw: bytes) -> Read:
    reader = h11.Connection(h11.CLIENT)
    reader.send(h11.Request(method="GET", target="/", headers=[("host", "box")]))
    reader.send(h11.EndOfMessage())
    reader.receive_data(raw)
    reader.receive_data(b"")
    head, body = None, b""
    while True:
        try:
            event = reader.next_event()
        except h11.RemoteProtocolError:
            event = None
        match event:
            case h11.Response():
                head = event.status_code, [(name, value) for name, value in event.headers.raw_items()]
            case h11.Data():
                body += event.data
            case h11.EndOfMessage():
                assert head
                return *head, body, True
            case None | h11.ConnectionClosed():
                return None if head is None else (*head, body, False)
