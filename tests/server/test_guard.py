"""Who is let in: hosts, origins, keys, content types and sizes, on an application that would answer anybody."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edgelm.server.api_error import EXCEPTION_HANDLERS
from edgelm.server.guard import Guard, Rules, is_loopback, read_body

LOCAL = Rules(loopback=True, max_body_bytes=1000)
OPEN = Rules(loopback=False, api_key="a secret", max_body_bytes=1000)
HOST = "127.0.0.1:11500"


async def ask(rules: Rules, method: str = "POST", path: str = "/echo", **request: Any) -> httpx2.Response:
    async def echo(request: Request) -> Response:
        return JSONResponse({"bytes": len(await read_body(request, rules.max_body_bytes))})

    app = Starlette(
        routes=[Route("/echo", echo, methods=["GET", "POST"]), Route("/health", echo)],
        middleware=[Middleware(Guard, rules=rules)],
        exception_handlers=EXCEPTION_HANDLERS,  # type: ignore[arg-type]
    )
    request["headers"] = {"host": HOST} | request.get("headers", {})
    if method == "POST" and "content" not in request:
        request["json"] = {"hello": 1}
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://x") as client:
        return await client.request(method, path, **request)


@pytest.mark.parametrize("host", ["127.0.0.1:11500", "localhost:11500", "LOCALHOST", "[::1]:11500", "127.0.0.2"])
async def test_names_of_this_machine(host: str) -> None:
    assert (await ask(LOCAL, headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example:11500", "", "127.0.0.1.evil.example", "10.0.0.1", "localhost.evil", "[::2]"]
)
async def test_other_names_are_refused_on_loopback_alone(host: str) -> None:
    answer = await ask(LOCAL, headers={"host": host})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")
    assert (await ask(OPEN, headers={"host": host, "authorization": "Bearer a secret"})).status_code != 403


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:3000", "http://127.0.0.1"])
async def test_web_pages_are_refused(origin: str) -> None:
    answer = await ask(LOCAL, headers={"origin": origin})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert (await ask(LOCAL, "GET", headers={"origin": origin})).status_code == 403


async def test_our_own_origin_is_let_in() -> None:
    assert (await ask(LOCAL, headers={"origin": f"http://{HOST}"})).status_code == 200


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Basic a secret", 401),
        ("a secret", 401),
        ("Bearer a sécret", 401),
        ("Bearer ", 401),
        ("Bearer a secret", 200),
        ("bearer  a secret ", 200),
    ],
)
async def test_the_key(given: str | None, status: int) -> None:
    headers = {} if given is None else {"authorization": given.encode()}
    answer = await ask(OPEN, headers=headers)
    assert answer.status_code == status
    if status == 401:
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "secret" not in answer.text
    assert (await ask(OPEN, "GET", "/health", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("Application/JSON", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("text/plain;application/json", 415),
        ("", 415),
    ],
)
async def test_json_only(kind: str, status: int) -> None:
    answer = await ask(LOCAL, content=b"{}", headers={"content-type": kind})
    assert answer.status_code == status


async def pieces(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b"x" * 100


async def test_the_size_of_a_body() -> None:
    kind = {"content-type": "application/json"}
    assert (await ask(LOCAL, content=b"x" * 1000, headers=kind)).json() == {"bytes": 1000}
    assert (await ask(LOCAL, content=b"x" * 1001, headers=kind)).json()["error"]["code"] == "request_too_large"
    assert (await ask(LOCAL, content=b"x", headers=kind | {"content-length": "-1"})).status_code == 413
    assert (await ask(LOCAL, content=pieces(10), headers=kind)).status_code == 200
    assert (await ask(LOCAL, content=pieces(11), headers=kind)).status_code == 413, "without a length, in pieces"


def test_loopback() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.8.9.1", "::1", "localhost", "Localhost."]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "10.0.0.1", "example.org", "", "localhost.evil"]))
