"""Who is let in: hosts, origins, keys, content types and sizes, on an application that would answer anybody."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edgelm.server.access import Guard, Rules, is_allowed_origin, is_loopback, may_administer, may_name_paths
from edgelm.server.api.handlers import EXCEPTION_HANDLERS
from edgelm.server.bodies import Bodies
from edgelm.server.keys import Key, Keys

KEYS = Keys(
    [Key("editor", "a secret"), Key("me", "my own secret", admin=True), Key("api-key", "of --api-key", admin=None)]
)
LOCAL = Rules(loopback=True, max_body_bytes=1000)
OPEN = Rules(loopback=False, keys=KEYS, max_body_bytes=1000)
HOST = "127.0.0.1:11500"
PAGE = "https://chat.example.org"
WITH_PAGE = replace(OPEN, origins=frozenset({PAGE}))
LOCAL_PAGES = replace(LOCAL, origins=frozenset({"local"}))


async def ask(
    rules: Rules, method: str = "POST", path: str = "/echo", client: str = "127.0.0.1", **request: Any
) -> httpx2.Response:
    bodies = Bodies(rules.max_body_bytes)

    async def echo(request: Request) -> Response:
        async with bodies.read(request) as body:
            return JSONResponse({"bytes": len(body)})

    async def who(request: Request) -> Response:
        key: Key | None = request.state.key
        return JSONResponse({"key": key and key.name, "admin": may_administer(request)})

    async def bug(_: Request) -> Response:
        raise AssertionError

    app = Starlette(
        routes=[
            Route("/echo", echo, methods=["GET", "POST"]),
            Route("/health", echo),
            Route("/who", who),
            Route("/bug", bug),
            Route("/v1/messages", echo, methods=["POST"]),
        ],
        exception_handlers=EXCEPTION_HANDLERS,
    )
    transport = httpx2.ASGITransport(app=Guard(app, rules), client=(client, 1), raise_app_exceptions=False)
    request["headers"] = {"host": HOST} | request.get("headers", {})
    if method == "POST" and "content" not in request:
        request["json"] = {"hello": 1}
    async with httpx2.AsyncClient(transport=transport, base_url="http://x") as http:
        return await http.request(method, path, **request)


@pytest.mark.parametrize("host", ["127.0.0.1:11500", "localhost:11500", "LOCALHOST", "[::1]:11500", "127.0.0.2"])
async def test_names_of_this_machine(host: str) -> None:
    assert (await ask(LOCAL, headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example:11500", "", "127.0.0.1.evil.example", "10.0.0.1", "localhost.evil", "[::2]"]
)
async def test_other_names_are_refused(host: str) -> None:
    answer = await ask(LOCAL, headers={"host": host})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")


@pytest.mark.parametrize(
    ("host", "status"),
    [("10.0.0.1", 200), ("[fe80::1]:11500", 200), ("box.lan:11500", 200), ("BOX.lan.", 200), ("evil.example", 403)],
)
async def test_an_open_port_answers_to_its_addresses_and_names(host: str, status: int) -> None:
    rules = replace(OPEN, allowed_hosts=frozenset({"box.lan"}))
    headers = {"host": host, "authorization": "Bearer a secret"}
    answer = await ask(rules, headers=headers)
    assert answer.status_code == status
    if status == 403:
        assert "--allowed-host" in answer.json()["error"]["message"]
    for loopback_rules in (LOCAL, replace(LOCAL, allowed_hosts=frozenset({"box.lan"}))):
        allowed = "box" in host.lower() and bool(loopback_rules.allowed_hosts)
        assert (await ask(loopback_rules, headers=headers)).status_code == (200 if allowed else 403)


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
    ("headers", "name"),
    [
        ({"authorization": "Bearer a secret"}, "editor"),
        ({"x-api-key": "my own secret"}, "me"),
        ({"authorization": "Bearer none"}, None),
        ({}, None),
    ],
)
async def test_routes_know_the_key(headers: dict[str, str], name: str | None) -> None:
    answer = await ask(OPEN, "GET", "/who", headers=headers)
    if name is None:
        assert answer.status_code == 401
    else:
        assert answer.json()["key"] == name
    assert (await ask(LOCAL, "GET", "/who", headers=headers)).json()["key"] is None, "without keys, any key is fine"


@pytest.mark.parametrize(
    ("rules", "client", "headers", "admin"),
    [
        (LOCAL, "127.0.0.1", {}, True),
        (LOCAL, "::ffff:127.0.0.1", {"host": "localhost"}, True),
        (LOCAL, "127.0.0.1", {"origin": f"http://{HOST}"}, False),
        (LOCAL, "127.0.0.1", {"x-forwarded-for": "10.0.0.7"}, False),
        (LOCAL, "127.0.0.1", {"forwarded": "for=10.0.0.7"}, False),
        (LOCAL, "127.0.0.1", {"x-forwarded-proto": "https"}, False),
        (LOCAL, "127.0.0.1", {"cf-connecting-ip": "10.0.0.7"}, False),
        (replace(LOCAL, allowed_hosts=frozenset({"box.lan"})), "127.0.0.1", {"host": "box.lan"}, False),
        (LOCAL, "127.0.0.1", {"x-api-key": "of no use here"}, True),
        (OPEN, "127.0.0.1", {"x-api-key": "a secret"}, False),
        (OPEN, "127.0.0.1", {"x-api-key": "my own secret"}, True),
        (OPEN, "127.0.0.1", {"x-api-key": "of --api-key"}, True),
        (OPEN, "10.0.0.7", {"x-api-key": "of --api-key"}, False),
        (OPEN, "10.0.0.7", {"x-api-key": "a secret"}, False),
        (OPEN, "10.0.0.7", {"x-api-key": "my own secret"}, True),
        (WITH_PAGE, "127.0.0.1", {"x-api-key": "a secret", "origin": PAGE}, False),
    ],
)
async def test_who_may_change_the_server(rules: Rules, client: str, headers: dict[str, str], admin: bool) -> None:
    answer = await ask(rules, "GET", "/who", client=client, headers=headers)
    assert answer.json()["admin"] is admin


@pytest.mark.parametrize(("version", "local"), [("1.0", False), ("1.1", True)])
def test_a_proxy_that_adds_no_header_is_not_this_machine(version: str, local: bool) -> None:
    """nginx speaks HTTP/1.0 unless it is told otherwise."""
    scope = {"type": "http", "http_version": version, "client": ("127.0.0.1", 1), "state": {"key": None}}
    request = Request(scope | {"headers": [(b"host", HOST.encode())]})
    assert may_administer(request) is local
    assert may_name_paths(request) is local


@pytest.mark.parametrize(("path", "form"), [("/v1/messages", "anthropic"), ("/echo", "openai")])
async def test_a_refusal_has_the_form_of_the_api(path: str, form: str) -> None:
    body = (await ask(OPEN, path=path)).json()
    assert body["error"]["type"] == "authentication_error"
    assert ("type" in body) == (form == "anthropic")
    assert ("code" in body["error"]) == (form == "openai")


ASKED = "Authorization, content-type, x-stainless-os, anthropic-version, openai-beta, x-title, x-edgelm-client, a b"


async def test_a_browser_learns_what_an_allowed_page_may_send() -> None:
    headers = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": ASKED}
    answer = await ask(WITH_PAGE, "OPTIONS", headers=headers)
    assert answer.status_code == 204, "without a key: browsers send none"
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["access-control-allow-methods"] == "GET, POST, DELETE"
    allowed = answer.headers["access-control-allow-headers"].split(", ")
    assert allowed == ["authorization", "content-type", "x-stainless-os", "anthropic-version", "openai-beta", "x-title"]
    assert "Origin" in answer.headers["vary"]
    assert "access-control-allow-credentials" not in answer.headers
    for refused in ({"origin": "https://evil.example"}, {"origin": "null"}, {"host": "evil.example"}):
        answer = await ask(WITH_PAGE, "OPTIONS", headers=headers | refused)
        assert answer.status_code == 403
        assert not answer.headers.get("access-control-allow-methods")


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/echo", {"authorization": "Bearer a secret"}, 200),
        ("POST", "/echo", {}, 401),
        ("POST", "/echo", {"authorization": "Bearer a secret", "content-type": "text/plain"}, 415),
        ("GET", "/missing", {"authorization": "Bearer a secret"}, 404),
        ("GET", "/bug", {"authorization": "Bearer a secret"}, 500),
    ],
)
async def test_an_allowed_page_can_read_all_answers(
    method: str, path: str, headers: dict[str, str], status: int
) -> None:
    answer = await ask(WITH_PAGE, method, path, headers=headers | {"origin": PAGE})
    assert answer.status_code == status
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["vary"] == "Origin"
    assert (await ask(WITH_PAGE, method, path, headers=headers)).headers["vary"] == "Origin", "for caches"
    assert json.loads(answer.content)


@pytest.mark.parametrize(
    "origin",
    [
        *(
            "http://localhost:3000",
            "https://localhost",
            "http://127.0.0.1:8080",
            "http://[::1]:5173",
            "app://obsidian.md",
        ),
        *(
            "file://",
            "tauri://localhost",
            "http://tauri.localhost",
            "vscode-webview://1abc",
            "vscode-file://vscode-app",
        ),
        *("chrome-extension://abc", "moz-extension://1-2", "VSCODE-WEBVIEW://1abc"),
    ],
)
async def test_local_pages_are_let_in_where_it_was_asked_for(origin: str) -> None:
    answer = await ask(LOCAL_PAGES, headers={"origin": origin})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)
    assert (await ask(LOCAL, headers={"origin": origin})).status_code == 403
    assert (await ask(WITH_PAGE, headers={"origin": origin, "x-api-key": "a secret"})).status_code == 403


@pytest.mark.parametrize(
    "origin",
    [
        *("null", "http://localhost.evil.example", "http://evil.example", "https://127.0.0.1.evil.example", ""),
        *("http://evil.example#localhost", "http://localhost@evil.example", "javascript://localhost", "http://[::1"),
        *("http://10.0.0.1", "*", "local", "ftp://localhost"),
    ],
)
def test_no_other_page_counts_as_local(origin: str) -> None:
    assert not is_allowed_origin(frozenset({"local"}), origin)
    assert not is_allowed_origin(frozenset(), origin)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("Application/JSON", 200),
        ("application/x-www-form-urlencoded", 200),  # of `curl -d`
        ("", 200),
        ("text/plain", 415),
        ("text/plain;application/json", 415),
        ("multipart/form-data; boundary=x", 415),
    ],
)
async def test_json_only(kind: str, status: int) -> None:
    answer = await ask(LOCAL, content=b"{}", headers={"content-type": kind})
    assert answer.status_code == status
    with_key = {"content-type": kind, "host": "10.0.0.1", "x-api-key": "a secret", "x-forwarded-for": "10.0.0.9"}
    assert (await ask(OPEN, content=b"{}", client="10.0.0.9", headers=with_key)).status_code == status


def sent_by_browsers() -> list[dict[str, str]]:
    """Return the headers of requests that no preflight precedes.

    Chromium 147 sends these combinations, and no others, from a page, a sandboxed frame, a data: URL and a file: fetch
    (no-cors and cors) and XMLHttpRequest of a text, parameters, a form, a buffer and a blob, with and without a
    referrer; sendBeacon of the same; forms of all three types in a frame and in a window.
    """
    url, text = "application/x-www-form-urlencoded", "text/plain"
    parts = "multipart/form-data; boundary=----WebKitFormBoundaryNOmIGY0xJtuA80Bh"
    forms = [(kind, "navigate", dest) for kind in (url, text, parts) for dest in ("iframe", "document")]
    fetches = [(kind, "no-cors", "empty") for kind in ("", f"{url};charset=UTF-8", f"{text};charset=UTF-8", parts)]
    return [
        {"origin": origin, "sec-fetch-site": "cross-site", "sec-fetch-mode": mode, "sec-fetch-dest": dest}
        | ({"content-type": kind} if kind else {})
        for origin in ("http://evil.example:19101", "null")
        for kind, mode, dest in (*forms, *fetches, ("", "cors", "empty"))
    ]


@pytest.mark.parametrize("headers", sent_by_browsers(), ids=lambda headers: " ".join(headers.values()))
async def test_no_page_can_send_what_curl_sends(headers: dict[str, str]) -> None:
    """Also where an old browser, or a proxy, leaves out one of the marks of a page, or the page is our own."""
    without_origin = {name: value for name, value in headers.items() if name != "origin"}
    of_old_browsers = {name: value for name, value in headers.items() if not name.startswith("sec-")}
    own = headers | {"origin": f"http://{HOST}"}
    for sent in (headers, without_origin, of_old_browsers, own):
        answer = await ask(LOCAL, content=b"{}", headers=sent)
        assert answer.status_code in (403, 415), sent
        answer = await ask(LOCAL_PAGES, content=b"{}", headers=sent | {"origin": "http://localhost:3000"})
        assert answer.status_code == 415, "a page that is allowed must send JSON, too"


@pytest.mark.parametrize(
    ("client", "headers"),
    [
        ("10.0.0.9", {}),
        ("127.0.0.1", {"host": "box.lan"}),
        *(("127.0.0.1", {name: "10.0.0.9"}) for name in ("forwarded", "via", "x-forwarded-for", "x-real-ip")),
    ],
)
async def test_without_a_key_only_this_machine_leaves_out_the_type(client: str, headers: dict[str, str]) -> None:
    rules = replace(LOCAL, allowed_hosts=frozenset({"box.lan"}))
    answer = await ask(rules, content=b"{}", client=client, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")


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
