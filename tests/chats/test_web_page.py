"""Pages of the web as attachments: which addresses are asked, and what of a page is kept."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from edgelm.base.errors import RequestError
from edgelm.chats import web_worker
from edgelm.chats.web_page import fetched, host_of, is_url, urls_in
from edgelm.chats.web_worker import fetch_page, page_text, public_address
from tests.base.test_public_addresses import NOT_PUBLIC

# The worker, which asks this machine whatever the address is.
WORKER = (sys.executable, "-P", "-c", "from edgelm.chats import web_worker; web_worker.main(lambda *_: '127.0.0.1')")
Answer = tuple[int, dict[str, str], bytes]
PAGE = b"""<html><head><title>T</title><style>p {}</style></head><body><nav>Menu</nav><h1>Ferrets</h1>
<script>alert(1)</script><p>They  sleep&nbsp;a&#8217;lot.<br>All day.</p><ul><li>one<li>two</ul>
<table><tr><td>a<td>b</table><pre>x = 1
  y</pre><p>\x1b]52;c;aGFja2Vk\x07end</p></body></html>"""


@pytest.fixture
def site() -> Iterator[Callable[..., str]]:
    """Return a function that sets what a server on this machine answers for each path, and returns its address."""
    answers: dict[str, Answer] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = answers.get(self.path, (404, {}, b""))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("X-Host", self.headers["Host"])
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()

    def answer(**paths: Answer) -> str:
        answers.update({f"/{name}": value for name, value in paths.items()})
        return f"http://example.test:{server.server_address[1]}"

    yield answer
    server.shutdown()
    server.server_close()
    thread.join()


def here(_host: str, _port: int) -> str:
    return "127.0.0.1"


def html(body: bytes, content_type: str = "text/html; charset=utf-8") -> Answer:
    return 200, {"Content-Type": content_type}, body


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_a_name_with_an_address_that_is_not_public(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [(0, 0, 0, "", ("93.184.215.14", 80)), (0, 0, 0, "", (address, 80))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: entries)
    with pytest.raises(RequestError, match="not a public address"):
        public_address("example.test", 80)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: entries[:1])
    assert public_address("example.test", 80) == "93.184.215.14"


@pytest.mark.parametrize("url", ["http://127.0.0.1/x", "http://localhost:1/", "http://[::1]/", "http://2130706433/"])
def test_this_machine_is_never_asked(url: str) -> None:
    with pytest.raises(RequestError, match=r"not a public address|is not found"):
        fetch_page(url)


def test_a_page_is_text(site: Callable[..., str]) -> None:
    base = site(page=html(PAGE))
    page = fetch_page(f"{base}/page", here)
    lines = [line for line in page.text.split("\n") if line.strip()]
    assert lines == [
        "# Ferrets", "They sleep a\u2019lot.", "All day.", "- one", "- two", " | a | b", "x = 1", "  y", "end",
    ]  # fmt: skip


def test_other_texts_stay_as_they_are(site: Callable[..., str]) -> None:
    base = site(
        data=html(b'{"a": [1]}\r\n', "application/json"),
        latin=html("Grüße".encode("latin-1"), "text/plain; charset=latin-1"),
    )
    assert fetch_page(f"{base}/data", here).text == '{"a": [1]}\n'
    assert fetch_page(f"{base}/latin", here).text == "Grüße\n"


def test_each_redirect_is_resolved_and_checked_again(site: Callable[..., str]) -> None:
    base = site(page=html(PAGE), first=(302, {"Location": "/second"}, b""))
    site(second=(301, {"Location": f"{base.replace('example', 'other')}/page"}, b""))
    asked: list[str] = []

    def resolve(host: str, _port: int) -> str:
        asked.append(host)
        return "127.0.0.1"

    assert "Ferrets" in fetch_page(f"{base}/first", resolve).text
    assert asked == ["example.test", "example.test", "other.test"]
    site(away=(302, {"Location": "http://127.0.0.1/secret"}, b""))

    def only_first(host: str, port: int) -> str:
        return here(host, port) if host == "example.test" else public_address(host, port)

    with pytest.raises(RequestError, match=r"127\.0\.0\.1 is 127\.0\.0\.1, which is not a public address"):
        fetch_page(f"{base}/away", only_first)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (html(b"\x89PNG", "image/png"), "the page is image/png, not text"),
        ((200, {"Content-Encoding": "gzip"}, b"\x1f\x8b"), "the page is compressed"),
        (html(b"x" * 2**21 + b"y"), "larger than 2 MiB"),
        (html(b"<script>1</script>"), "has no text"),
        ((302, {"Location": "/page"}, b""), "leads from page to page, more than 5 times"),
        ((302, {"Location": "file:///etc/passwd"}, b""), "is no address of a page"),
        ((302, {"Location": "http://user:secret@example.test/"}, b""), "has a login in it"),
        ((500, {}, b""), "answers 500"),
        (html(b"-----BEGIN OPENSSH PRIVATE KEY-----\nb3Blbn\n", "text/plain"), "holds a private key"),
    ],
)
def test_pages_that_are_not_attached(site: Callable[..., str], answer: Answer, message: str) -> None:
    base = site(page=answer)
    with pytest.raises(RequestError, match=message) as raised:
        fetch_page(f"{base}/page", here)
    assert "secret" not in str(raised.value)


def test_a_page_without_encryption_does_not_follow_one_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_worker, "_get", lambda *_: ("http://example.test/", b"", ""))
    with pytest.raises(RequestError, match="without encryption"):
        fetch_page("https://example.test/", here)


def test_the_host_is_shown_as_it_is_asked() -> None:
    assert host_of("http://a.example:80/") == "a.example"
    assert host_of("http://a.example:8080/x") == "a.example:8080"
    assert host_of("https://[2606::1]:80/") == "[2606::1]:80"
    with pytest.raises(RequestError) as raised:
        public_address("a\x1b[31m.invalid", 80)
    assert "\x1b" not in str(raised.value)


async def test_a_worker_fetches_the_page(site: Callable[..., str]) -> None:
    base = site(page=html(PAGE))
    page = await fetched(f"{base}/page", command=WORKER)
    assert (page.kind, page.name, page.path, page.size) == ("text", f"{base}/page", "", len(PAGE))
    assert page.text.startswith("# Ferrets\n")
    with pytest.raises(RequestError, match="answers 404"):
        await fetched(f"{base}/none", command=WORKER)
    with pytest.raises(RequestError, match="not a public address"):
        await fetched("http://127.0.0.1/")
    with pytest.raises(RequestError, match="the process ended with code 3"):
        await fetched(base, command=(sys.executable, "-c", "raise SystemExit(3)"))


async def test_a_page_has_a_time() -> None:
    with pytest.raises(RequestError, match=r"example\.test did not answer within 0\.2 s"):
        await fetched("http://example.test/", 0.2, (sys.executable, "-c", "import time; time.sleep(600)"))


@pytest.mark.parametrize(
    ("scheme", "begin", "end"),
    [
        ("https", b"", b""),  # no handshake
        ("http", b"HTTP/1.1 200 OK\r\nX", b"x"),
        ("http", b"HTTP/1.1 200 OK\r\n\r\n", b"x"),
        ("http", b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 1800000\r\n\r\n", b"<!--" * 450_000),
    ],
    ids=["handshake", "headers", "body", "parsing"],
)  # fmt: skip
async def test_a_page_that_is_left_ends(scheme: str, begin: bytes, end: bytes) -> None:
    """Nothing goes on behind the end of the time, or Esc, whatever the server sends: it sees the connection end."""
    asked, left = asyncio.Event(), asyncio.Event()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        writer.write(begin)
        asked.set()
        with suppress(OSError):
            while not reader.at_eof():
                writer.write(end)
                await writer.drain()
                await asyncio.sleep(0.01)
                if len(end) > 1:
                    break
            await reader.read()
        writer.close()
        left.set()

    async with await asyncio.start_server(drip, "127.0.0.1", 0) as server:
        url = f"{scheme}://example.test:{server.sockets[0].getsockname()[1]}/"
        fetching = asyncio.create_task(fetched(url, 600, WORKER))
        await asked.wait()
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        await left.wait()


@pytest.mark.parametrize(
    ("text", "urls"),
    [
        ("see https://a.example/b?c=d#e.", ["https://a.example/b?c=d#e"]),
        ("(http://a.example) and http://a.example!", ["http://a.example"]),
        ("https://a.example/x_(y), <https://b.example>", ["https://a.example/x_(y)", "https://b.example"]),
        ("no address: example.com, ftp://a.example, https://, http://a.example:99999", []),
    ],
)
def test_addresses_in_a_message(text: str, urls: list[str]) -> None:
    assert urls_in(text) == urls


def test_an_address_alone() -> None:
    assert is_url("https://a.example/b")
    assert not is_url("https://a.example/b c")
    assert not is_url("/tmp/file")


def test_broken_pages() -> None:
    assert page_text("a</script></p><b>c<script>d") == "a\nc"
    assert page_text("<head><title>T<body>text").strip() == "text"
    assert page_text("<svg>" * 300_000 + "</b>" * 300_000 + "</svg>" * 300_000 + "text") == "text"
