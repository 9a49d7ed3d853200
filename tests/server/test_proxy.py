"""Requests that wait for their engine, and connections to engines that break: what clients get, and who is closed."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from edgelm.base.errors import ModelError
from edgelm.base.workers.messages import Footprint
from edgelm.library.scan import LocalModel
from edgelm.server import bodies, proxy
from edgelm.server.access import Rules
from edgelm.server.api.dialect import COMMENT
from edgelm.server.engines import slots
from edgelm.server.engines.table import EngineTable
from edgelm.server.front import Front, front_app
from edgelm.server.listener import Server, bind_tcp
from edgelm.server.models import ModelNames
from edgelm.server.proxy import Answer
from edgelm.server.stored import ResponseStore
from edgelm.server.transport import Transport
from tests.server.fake_engines import FakeHost, FakeProcess, Launches, until
from tests.server.test_front import CHUNKS, LIMIT_S, Fakes, body, chat, fronted

EVENTS = b"".join(CHUNKS) + b"3}\n\n"  # of a streamed answer of Fakes
EVENTS_HEADER = {"content-type": "text/event-stream; charset=utf-8"}
REPLY = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "m.gguf").write_bytes(b"")
    return tmp_path / "m.gguf"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "PATIENCE_S", 0.01)
    monkeypatch.setattr(proxy, "PING_S", 0.01)


def later(action: Any, *arguments: Any) -> None:
    """Act when a waiting client is far out of patience, also where this process hardly runs."""
    asyncio.get_running_loop().call_later(0.4, action, *arguments)


def error_in(events: bytes) -> Any:
    """Return the error of a stream that has comments and one event."""
    *comments, last, end = events.split(b"\n\n")
    assert len(comments) > 1
    assert set(comments) == {COMMENT.strip()}
    assert end == b""
    return json.loads(last.removeprefix(b"data: "))["error"]


@pytest.mark.usefixtures("impatient")
async def test_a_stream_is_opened_while_the_model_loads(model: Path) -> None:
    launches = Fakes()
    async with fronted(launches, model) as http:
        asking = asyncio.create_task(chat(http, "", stream=True))
        later((await launches.number(1)).load)
        answer = await asking
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        comments, events = answer.content[: -len(EVENTS)], answer.content[-len(EVENTS) :]
        assert events == EVENTS
        assert comments == COMMENT * (len(comments) // len(COMMENT))
        assert len(comments) > len(COMMENT)
        assert (await chat(http, "", stream=True)).content == EVENTS, "it is ready now"
        assert launches.upstream.closed == 2


@pytest.mark.usefixtures("impatient")
async def test_a_load_that_fails_after_the_stream_began_is_an_event(model: Path) -> None:
    launches = Fakes()
    async with fronted(launches, model) as http:
        asking = asyncio.create_task(chat(http, "", stream=True))
        later((await launches.number(1)).fail, ModelError("it needs 9 GiB", "take a smaller one"))
        error = error_in((await asking).content)
        assert (error["code"], error["message"]) == ("model_failed", "it needs 9 GiB; take a smaller one")


@pytest.mark.usefixtures("impatient")
async def test_a_stream_that_no_longer_waits_is_told_so(model: Path) -> None:
    launches = Fakes()
    async with fronted(launches, model) as http:
        answer = await chat(http, "wait=1", stream=True)
        assert error_in(answer.content)["code"] == "model_loading"
        answer = await chat(http, "wait=0", stream=True)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_loading"), "no stream for that"


@pytest.mark.usefixtures("impatient")
async def test_a_request_without_a_stream_waits_for_its_status(model: Path) -> None:
    launches = Fakes()
    async with fronted(launches, model) as http:
        asking = asyncio.create_task(chat(http, ""))
        later((await launches.number(1)).load)
        assert (await asking).status_code == 400, "what the engine says"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_the_model_loads(model: Path, stream: bool) -> None:
    launches = Fakes()
    async with asyncio.timeout(LIMIT_S), EngineTable(launches, FakeHost(), idle_timeout_s=0) as table:
        app = front_app(
            Front(
                "http://127.0.0.1:1", table, ModelNames(None, [model]), ResponseStore(model.parent / "responses.sqlite")
            ),
            Rules(loopback=True),
        )
        sock = bind_tcp("127.0.0.1", 0)
        server = Server(app, grace_s=1)
        task = asyncio.create_task(server.serve(sockets=[sock]))
        _, writer = await asyncio.open_connection(*sock.getsockname())
        sent = json.dumps(body(stream=stream)).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(sent)}\r\n\r\n".encode() + sent)
        await launches.number(1)
        [slot] = table.slots.values()
        await until(lambda: slot.leases == 1)
        await asyncio.sleep(0.2)
        writer.close()
        await until(lambda: slot.leases == 0)
        await writer.wait_closed()
        server.should_exit = True
        await task


class Refusing(httpx2.AsyncBaseTransport):
    """No connection, for a reason of the system."""

    def __init__(self, number: int) -> None:
        self.number = number

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("no connection") from OSError(self.number, os.strerror(self.number))


class Linked(Launches):
    """Engines that are ready, reached by this client."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        super().__init__()
        self.client = client
        self.ready_at_once = True

    async def __call__(self, model: LocalModel, footprint: Footprint | None) -> FakeProcess:
        process = await super().__call__(model, footprint)
        process.client = self.client
        if self.ready_at_once:
            process.load()
        return process


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOBUFS])
async def test_an_engine_is_not_ended_because_the_system_has_no_room(model: Path, number: int) -> None:
    launches = Linked(httpx2.AsyncClient(transport=Refusing(number), base_url="http://engine"))
    async with fronted(launches, model) as http:
        for _ in range(3):
            answer = await chat(http)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
            assert answer.headers["retry-after"] == "1"
        assert [process.closed for process in launches.processes] == [False]


@pytest.mark.parametrize("number", [errno.ECONNREFUSED, errno.ENOENT])
async def test_an_engine_where_nobody_listens_is_replaced(model: Path, number: int) -> None:
    launches = Linked(httpx2.AsyncClient(transport=Refusing(number), base_url="http://engine"))
    async with fronted(launches, model) as http:
        answer = await chat(http)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_died")
        assert launches.processes[0].closed


@contextmanager
def no_more_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as lowest_free:
        number = lowest_free.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_the_reasons_are_those_of_real_connections(tmp_path: Path, kind: str) -> None:
    uds = str(tmp_path / "s") if kind == "unix" else None
    async with httpx2.AsyncClient(transport=Transport(8, LIMIT_S, uds=uds), base_url="http://127.0.0.1:9") as http:
        with pytest.raises(httpx2.ConnectError) as gone:
            await http.get("/")
        assert proxy._errno(gone.value) == (errno.ENOENT if uds else errno.ECONNREFUSED)
        with no_more_files(), pytest.raises(httpx2.ConnectError) as full:
            await http.get("/")
        assert proxy._errno(full.value) == errno.EMFILE


@asynccontextmanager
async def engine(path: Path, replies: list[int]) -> AsyncIterator[httpx2.AsyncClient]:
    """Listen as an engine; each connection answers that many requests, then closes at the next one."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = replies.pop(0)
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().partition(b"content-length:")[2].split()[0])
            await reader.readexactly(length)
            if number == 0:
                break
            writer.write(REPLY)
            number -= 1
        writer.close()

    async with await asyncio.start_unix_server(serve, path):
        transport = Transport(8, LIMIT_S, uds=str(path))
        async with httpx2.AsyncClient(transport=transport, base_url="http://engine") as client:
            yield client


async def test_a_kept_connection_that_breaks_is_tried_again_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "EXIT_LIMIT_S", 0.1)
    replies = [1, 1, 0]
    async with engine(tmp_path / "s", replies) as client:
        launches = Linked(client)
        async with fronted(launches, model) as http:
            assert (await chat(http)).status_code == 200
            assert len(replies) == 2
            assert (await chat(http)).status_code == 200, "on another connection"
            assert len(replies) == 1, "the first was kept, and broke"
            answer = await chat(http)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_died"), "only once"
            assert not launches.processes[0].closed


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/v1/responses/input_tokens"])
async def test_a_count_of_tokens_is_no_stream(model: Path, path: str) -> None:
    launches = Linked(httpx2.AsyncClient(transport=httpx2.MockTransport(counted), base_url="http://engine"))
    launches.ready_at_once = False
    async with fronted(launches, model) as http:
        asking = asyncio.create_task(http.post(path, json=body(input="hi", stream=True)))
        later((await launches.number(1)).load)
        assert (await asking).json() == {"input_tokens": 3}


def counted(_: httpx2.Request) -> httpx2.Response:
    return httpx2.Response(200, json={"input_tokens": 3})


class Parts(httpx2.AsyncByteStream):
    def __init__(self, parts: list[bytes]) -> None:
        self._parts = parts
        self.rest = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part
        await self.rest.wait()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
async def test_events_are_whole_however_they_are_cut(size: int) -> None:
    events = b"data: a\n\nevent: b\ndata: b\n\n" + b"data: " + b"c" * 20 + b"\n\n: ping\n\n"
    upstream = Parts([events[at : at + size] for at in range(0, len(events), size)])
    upstream.rest.set()
    answer = Answer(httpx2.Response(200, headers=EVENTS_HEADER, stream=upstream), FakeProcess(1), None)
    slot: Any = SimpleNamespace(answered=lambda: None)
    shown = [some async for some in proxy._events(answer, slot, lambda _: b"")]
    assert b"".join(shown) == events
    assert all(some.endswith(b"\n\n") for some in shown)


async def test_a_long_event_is_not_copied_for_every_piece_of_it() -> None:
    pieces = [b"x" * 2**16] * 2000
    upstream = Parts([*pieces, b"\n", b"\n"])
    upstream.rest.set()
    answer = Answer(httpx2.Response(200, headers=EVENTS_HEADER, stream=upstream), FakeProcess(1), None)
    slot: Any = SimpleNamespace(answered=lambda: None)
    begin = time.process_time()
    (shown,) = [some async for some in proxy._events(answer, slot, lambda _: b"")]
    assert len(shown) == 2000 * 2**16 + 2
    assert time.process_time() - begin < 10, "128 GB would be copied"


async def test_a_body_leaves_its_room_when_its_answer_begins(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "ROOM_LIMIT_S", LIMIT_S / 2)
    streams: list[Parts] = []

    def answer(_: httpx2.Request) -> httpx2.Response:
        streams.append(Parts([b"data: 1\n\n"]))
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, stream=streams[-1])

    launches = Linked(httpx2.AsyncClient(transport=httpx2.MockTransport(answer), base_url="http://engine"))
    large = "x" * (12 * 2**20)
    async with fronted(launches, model) as http:
        asking = [asyncio.create_task(chat(http, stream=True, user=large)) for _ in range(4)]
        await until(lambda: len(streams) == 4 or any(task.done() for task in asking))
        for stream in streams:
            stream.rest.set()
        assert [(await task).status_code for task in asking] == [200] * 4


class KeepingTransport(httpx2.AsyncBaseTransport):
    """A connection, which keeps its request as long as the answer."""

    def __init__(self) -> None:
        self.requests: list[httpx2.Request] = []
        self.answer = Parts([b"data: 1\n\n"])

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/stats":
            return httpx2.Response(200, json={})
        self.requests.append(request)
        assert isinstance(request.stream, httpx2.AsyncByteStream)
        async for _ in request.stream:
            pass
        return httpx2.Response(200, headers=EVENTS_HEADER, stream=self.answer)


class Tracked(bytes):
    """A body that tells when the last reference to it is gone."""

    gone = 0

    def __del__(self) -> None:
        Tracked.gone += 1


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("late", [False, True])
async def test_a_stream_does_not_keep_the_body_of_its_request(
    model: Path, monkeypatch: pytest.MonkeyPatch, path: str, late: bool
) -> None:
    connection = KeepingTransport()

    async def read(_: Any, request: Any, share: Any) -> Tracked:
        return Tracked(b"".join([piece async for piece in request.stream()]))

    monkeypatch.setattr(bodies.Bodies, "_read", read)
    monkeypatch.setattr(Tracked, "gone", 0)
    launches = Linked(httpx2.AsyncClient(transport=connection, base_url="http://engine"))
    launches.ready_at_once = not late
    async with fronted(launches, model) as http:
        asking = asyncio.create_task(http.post(path, json=body(input="hi", stream=True)))
        process = await launches.number(1)
        if late:
            later(process.load)
        await until(lambda: Tracked.gone > 0)
        assert connection.requests
        assert not asking.done()
        connection.answer.rest.set()
        assert (await asking).content.endswith(b"data: 1\n\n")
