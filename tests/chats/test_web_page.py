"""Pages of the web as attachments: which addresses are asked, and what of a page is kept."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from edgelm.base.errors import RequestError
from edgelm.chats import web_page
from edgelm.chats.web_page import fetch_page, is_public, is_url, page_text, public_address, urls_in

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


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.255.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
        "224.0.0.1", "255.255.255.255", "198.18.0.1", "192.0.2.1", "::1", "::", "fe80::1", "fc00::1", "ff02::1",
        "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::7f00:1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001::1", "2001:db8::1",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_public(address)
    entries = [(0, 0, 0, "", ("93.184.215.14", 80)), (0, 0, 0, "", (address, 80))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: entries)
    with pytest.raises(RequestError, match="not a public address"):
        public_address("example.test", 80)


@pytest.mark.parametrize("address", ["93.184.215.14", "8.8.8.8", "2606:2800:21f:cb07:6820:80da:af6b:8b2c"])
def test_public_addresses(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (address, 80))])
    assert public_address("example.test", 80) == address


@pytest.mark.parametrize("url", ["http://127.0.0.1/x", "http://localhost:1/", "http://[::1]/", "http://2130706433/"])
def test_this_machine_is_never_asked(url: str) -> None:
    with pytest.raises(RequestError, match=r"not a public address|is not found"):
        fetch_page(url)


def test_a_page_is_text(site: Callable[..., str]) -> None:
    base = site(page=html(PAGE))
    page = fetch_page(f"{base}/page", here)
    assert (page.kind, page.name, page.path) == ("text", f"{base}/page", "")
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
    monkeypatch.setattr(web_page, "_get", lambda *_: ("http://example.test/", b"", ""))
    with pytest.raises(RequestError, match="without encryption"):
        fetch_page("https://example.test/", here)


def test_a_slow_page_has_a_time(site: Callable[..., str]) -> None:
    slow = pytest.raises(RequestError, match=r"did not answer within 0\.2 s")
    with socket.create_server(("127.0.0.1", 0)) as silent, slow:
        fetch_page(f"http://example.test:{silent.getsockname()[1]}/", here, limit_s=0.2)


@pytest.mark.parametrize(
    ("text", "urls"),
    [
        ("see https://a.example/b?c=d#e.", ["https://a.example/b?c=d#e"]),
        ("(http://a.example) and http://a.example!", ["http://a.example"]),
        ("https://a.example/x_(y), <https://b.example>", ["https://a.example/x_(y)", "https://b.example"]),
        ("no address: example.com, ftp://a.example, https://", []),
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
