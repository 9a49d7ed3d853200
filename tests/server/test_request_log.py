"""The id of every answer, and the lines of a JSON log: with what a request cost, without what it said."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from edgelm.server.access import Rules
from edgelm.server.engines.table import EngineTable
from edgelm.server.front import Front, front_app
from edgelm.server.keys import Key, Keys
from edgelm.server.models import ModelNames
from edgelm.server.request_log import JsonLines
from edgelm.server.stored import ResponseStore
from tests.server.fake_engines import FakeHost, until
from tests.server.test_front import LIMIT_S, Upstream, body
from tests.server.test_proxy import Linked

CHAT = "/v1/chat/completions"
USAGE = {
    "prompt_tokens": 12,
    "cached_tokens": 8,
    "generated_tokens": 5,
    "time_to_first_token_s": 0.25,
    "finish_reason": "length",
}


class Engine(Upstream):
    """An engine that tells what its requests cost."""

    def __init__(self) -> None:
        super().__init__()
        self.headers: list[httpx2.Headers] = []
        self.tells = True

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path.startswith("/usage/"):
            names = [headers.get("x-edgelm-usage") for headers in self.headers]
            assert request.url.path.removeprefix("/usage/") in names
            return httpx2.Response(200, json=USAGE) if self.tells else httpx2.Response(404, json={})
        if request.url.path != "/stats":
            self.headers.append(request.headers)
        return await super().handle_async_request(request)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonLines())
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))

    async def take(self, count: int = 1) -> list[dict[str, Any]]:
        """Return so many lines once they are written."""
        await until(lambda: len(self.texts) >= count)
        taken, self.texts = self.texts, []
        return [json.loads(text) for text in taken]


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, log = Lines(), logging.getLogger("edgelm.requests")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler
    log.removeHandler(handler)
    log.setLevel(logging.NOTSET)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "m.gguf").write_bytes(b"")
    return tmp_path / "m.gguf"


@asynccontextmanager
async def fronted(engine: Engine, model: Path, *keys: Key, logs: bool = True) -> AsyncIterator[httpx2.AsyncClient]:
    launches = Linked(httpx2.AsyncClient(transport=engine, base_url="http://engine"))
    async with asyncio.timeout(LIMIT_S), EngineTable(launches, FakeHost(), idle_timeout_s=0) as table:
        names, store = ModelNames(None, [model]), ResponseStore(model.parent / "responses.sqlite")
        front = Front("http://127.0.0.1:1", table, names, store, logs_requests=logs)
        app = front_app(front, Rules(loopback=True, keys=Keys(keys), origins=frozenset({"https://a.example"})))
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            yield http


# -- ids ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_clients_id_is_returned_and_reaches_the_engine(model: Path, stream: bool) -> None:
    engine = Engine()
    async with fronted(engine, model) as http:
        answer = await http.post(CHAT, json=body(stream=stream), headers={"x-request-id": "trace-1/a:b"})
        assert answer.headers["x-request-id"] == "trace-1/a:b"
        assert engine.headers[0]["x-request-id"] == "trace-1/a:b"


@pytest.mark.parametrize("sent", ["", "a" * 129, "two words", 'quote"', "ä", "new\\nline", "{json}", "<b>"])
async def test_an_odd_id_is_replaced(model: Path, sent: str) -> None:
    engine = Engine()
    async with fronted(engine, model) as http:
        answer = await http.get("/health", headers={"x-request-id": sent.encode()})
        own = answer.headers["x-request-id"]
        assert own.startswith("req_")
        assert (await http.get("/health")).headers["x-request-id"] != own


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200),
        ("GET", "/nothing", 404),
        ("POST", CHAT, 400),
        ("DELETE", CHAT, 405),
        ("POST", "/v1/messages", 400),
        ("GET", "/metrics", 200),
    ],
)
async def test_every_answer_has_an_id(model: Path, method: str, path: str, status: int) -> None:
    async with fronted(Engine(), model) as http:
        answer = await http.request(method, path, json={} if method == "POST" else None)
        assert answer.status_code == status
        assert answer.headers["x-request-id"].startswith("req_")


async def test_an_answer_without_a_key_has_an_id_too(model: Path) -> None:
    async with fronted(Engine(), model, Key("a", "the-right-key")) as http:
        for path in (CHAT, "/metrics", "/edgelm/top"):
            answer = await http.request("POST" if path == CHAT else "GET", path)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["x-request-id"].startswith("req_")
        answer = await http.get("/metrics", headers={"x-api-key": "the-right-key"})
        assert answer.status_code == 200


async def test_anthropics_clients_find_the_id_where_they_look(model: Path) -> None:
    async with fronted(Engine(), model) as http:
        answer = await http.post("/v1/messages", json={}, headers={"x-request-id": "mine"})
        assert answer.headers["request-id"] == answer.json()["request_id"] == "mine"


async def test_web_pages_may_send_and_read_the_id(model: Path) -> None:
    async with fronted(Engine(), model) as http:
        page = {"origin": "https://a.example"}
        asked = page | {"access-control-request-method": "POST", "access-control-request-headers": "x-request-id"}
        preflight = await http.options(CHAT, headers=asked)
        assert preflight.headers["access-control-allow-headers"] == "x-request-id"
        answer = await http.get("/health", headers=page)
        assert "x-request-id" in answer.headers["access-control-expose-headers"]


# -- lines -------------------------------------------------------------------------------------------------------------


async def test_a_line_tells_what_a_request_cost_and_nothing_that_it_said(model: Path, lines: Lines) -> None:
    key = Key("team", "the-secret-key")
    async with fronted(Engine(), model, key) as http:
        headers = {"authorization": "Bearer the-secret-key", "x-request-id": "mine"}
        request = body(stream=True, messages=[{"role": "user", "content": "a private thing"}], user="private user")
        await http.post(CHAT + "?a=private", json=request, headers=headers)
        (line,) = await lines.take()
        assert line.pop("time").endswith("Z")
        assert 0 < line.pop("duration_s") < LIMIT_S
        assert 0.25 <= line.pop("time_to_first_token_s") < LIMIT_S
        assert line == {
            "level": "info",
            "message": "request",
            "request_id": "mine",
            "client": key.cache_namespace,
            "model": "m",
            "method": "POST",
            "route": CHAT,
            "status": 200,
            "prompt_tokens": 12,
            "cached_tokens": 8,
            "generated_tokens": 5,
            "finish_reason": "length",
        }
        assert "secret" not in json.dumps(line)


async def test_a_refused_request_has_a_line_without_numbers(model: Path, lines: Lines) -> None:
    async with fronted(Engine(), model, Key("team", "the-secret-key")) as http:
        await http.post(CHAT, json=body(), headers={"authorization": "Bearer another-private-key"})
        (line,) = await lines.take()
        assert (line["status"], line["route"]) == (401, CHAT)
        assert "model" not in line
        assert "prompt_tokens" not in line
        assert "private" not in json.dumps(line)


async def test_an_engine_that_tells_nothing_costs_no_line(model: Path, lines: Lines) -> None:
    engine = Engine()
    engine.tells = False
    async with fronted(engine, model) as http:
        await http.post(CHAT, json=body(stream=True))
        (line,) = await lines.take()
        assert (line["model"], line["status"]) == ("m", 200)
        assert "generated_tokens" not in line


async def test_requests_of_one_id_are_told_apart(model: Path, lines: Lines) -> None:
    engine = Engine()
    async with fronted(engine, model) as http:
        same = {"x-request-id": "same"}
        await asyncio.gather(*(http.post(CHAT, json=body(stream=True), headers=same) for _ in range(3)))
        assert [line["generated_tokens"] for line in await lines.take(3)] == [5, 5, 5]
        assert len({headers["x-edgelm-usage"] for headers in engine.headers}) == 3


async def test_without_the_setting_nothing_is_written_and_no_engine_is_asked(model: Path, lines: Lines) -> None:
    engine = Engine()
    async with fronted(engine, model, logs=False) as http:
        await http.post(CHAT, json=body(stream=True))
        assert "x-edgelm-usage" not in engine.headers[0]
        await asyncio.sleep(0.05)
        assert not lines.texts


async def test_other_lines_of_the_log_are_json_too(lines: Lines) -> None:
    log = logging.getLogger("edgelm.requests")
    try:
        raise ValueError("a\nb")
    except ValueError:
        log.exception("it failed: %s", "why")
    (line,) = await lines.take()
    assert (line["level"], line["message"]) == ("error", "it failed: why")
    assert "ValueError" in line["exception"]


# -- metrics of the front ----------------------------------------------------------------------------------------------


async def test_requests_are_counted_by_route_and_status_and_a_scrape_wakes_no_model(model: Path) -> None:
    engine = Engine()
    async with fronted(engine, model) as http:
        for path in ("/health", "/v1/models/m", "/v1/models/n", "/a", "/b"):
            await http.get(path)
        text = (await http.get("/metrics")).text
        for labels in (
            'method="GET",handler="/health",status="200"',
            'method="GET",handler="/v1/models/{name:path}",status="200"',
            'method="GET",handler="/v1/models/{name:path}",status="404"',
        ):
            assert f"edgelm:http_requests_total{{{labels}}} 1.0\n" in text
        assert 'edgelm:http_requests_total{method="GET",handler="other",status="404"} 2.0\n' in text
        assert (await http.get("/edgelm/top")).json()["models"] == []
        assert (await http.get("/edgelm/ps")).json()["models"] == []
