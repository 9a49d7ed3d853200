"""Pictures from other hosts: only allowed ones are asked, at an address that may be asked, within limits."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from edgelm.base.config import load_config
from edgelm.base.errors import RequestError, UsageError
from edgelm.jobs import picture_fetch
from edgelm.jobs.picture_fetch import NUM_AT_ONCE, PictureFetcher
from tests.base.test_public_addresses import NOT_PUBLIC

PICTURE = b"\x89PNG and so on"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.hosts.append(self.headers["host"])  # type: ignore[attr-defined]
        redirects = self.path == "/moved"
        self.send_response(302 if redirects else 404 if self.path == "/missing" else 200)
        if redirects:
            self.send_header("location", "http://127.0.0.1/other")
        self.end_headers()
        self.wfile.write(PICTURE)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.hosts = []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


async def refused(url: str, *hosts: str) -> str:
    with pytest.raises(RequestError) as caught:
        await PictureFetcher(hosts).fetch(url)
    assert "\n" not in str(caught.value)
    return caught.value.message


async def test_a_host_is_asked_where_it_is_allowed(server: ThreadingHTTPServer) -> None:
    place = f"127.0.0.1:{server.server_port}"
    assert await PictureFetcher([place]).fetch(f"http://{place}/a.png?b=c#d") == PICTURE
    assert server.hosts == [place]  # type: ignore[attr-defined]
    for hosts in ([], ["127.0.0.1"], ["example.com"], [f"{place}0"]):
        assert "nothing is fetched from" in await refused(f"http://{place}/a.png", *hosts)
    for url in (f"http://me@{place}/", f"https://{place}@example.com/", "http://example.com:99999/", "http://[1/"):
        await refused(url, place, "127.0.0.1")
    assert len(server.hosts) == 1  # type: ignore[attr-defined]


async def test_a_name_of_a_private_address_needs_the_address(
    server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is resolved once: a second answer of a name server would come too late."""
    port, resolved, real = server.server_port, list[Any](), socket.getaddrinfo

    def resolve(host: Any, *more: Any, **options: Any) -> Any:
        resolved.append(host)
        return real("127.0.0.1" if host == "pictures.example" else host, *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    url, name = f"http://pictures.example:{port}/", f"pictures.example:{port}"
    assert "is at a private address" in await refused(url, name)
    assert server.hosts == []  # type: ignore[attr-defined]
    resolved.clear()
    assert "is at a private address" in await refused(url, name, "127.0.0.1")  # that is its port 80
    assert server.hosts == []  # type: ignore[attr-defined]
    resolved.clear()
    assert await PictureFetcher([name, f"127.0.0.1:{port}"]).fetch(url) == PICTURE
    assert resolved.count("pictures.example") == 1
    assert server.hosts == [name]  # type: ignore[attr-defined]


@pytest.mark.parametrize("address", NOT_PUBLIC)
async def test_private_addresses(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(family, 1, 6, "", (address, 80))])
    assert "is at a private address" in await refused("http://pictures.example/", "pictures.example")


async def test_answers_that_are_no_picture(server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    place = f"127.0.0.1:{server.server_port}"
    assert "answers 404" in await refused(f"http://{place}/missing", place)
    assert "answers 302, a redirect, which is not followed" in await refused(f"http://{place}/moved", place)
    assert "cannot be fetched" in await refused(f"https://{place}/", place)
    monkeypatch.setattr(picture_fetch, "MAX_FILE_BYTES", len(PICTURE) - 1)
    assert "larger than" in await refused(f"http://{place}/", place)


@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\n\r\n"])
async def test_a_server_that_drips_is_left_at_the_deadline(begin: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait for a part of its answer is ever long: the sum of them is."""
    monkeypatch.setattr(picture_fetch, "FETCH_S", 0.3)
    left = asyncio.Event()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(begin)
        with suppress(OSError):
            while not reader.at_eof():
                writer.write(b"X")
                await writer.drain()
                await asyncio.sleep(0.01)
        writer.close()
        left.set()

    async with await asyncio.start_server(drip, "127.0.0.1", 0) as server:
        place = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert "take longer than" in await refused(f"http://{place}/", place)
        await left.wait()


async def test_a_name_that_is_looked_up_for_long_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    found = threading.Event()
    before = threading.active_count()
    monkeypatch.setattr(picture_fetch, "FETCH_S", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found.wait(60))
    try:
        answers = [refused("http://slow.example/", "slow.example") for _ in range(3 * NUM_AT_ONCE)]
        assert all("take longer than" in answer for answer in await asyncio.gather(*answers))
        assert threading.active_count() <= before + NUM_AT_ONCE
    finally:
        found.set()


def test_the_setting(tmp_path: Path) -> None:
    own = {"EDGELM_CONFIG_DIR": str(tmp_path)}
    hosts = load_config({}, own | {"EDGELM_PICTURE_HOST": "A.example,[::1]:8080,10.0.0.1:80"}).settings.picture_host
    assert hosts == ("a.example", "[::1]:8080", "10.0.0.1:80")
    for wrong in ("http://a.example", "a.example/x", "::1", "*"):
        with pytest.raises(UsageError, match="picture_host"):
            load_config({}, own | {"EDGELM_PICTURE_HOST": wrong})
