"""The worker that fetches one page of the web and makes text of it: its parent ends it, whatever the page does.

Owns which addresses may be asked: each name is resolved once, a name with an address that is not public is refused, and
the connection goes to that address, again for each redirect. No proxy is used, no cookie and no login is sent.
"""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from html.parser import HTMLParser
from urllib.parse import quote, urljoin, urlsplit, urlunsplit

from edgelm.base.errors import RequestError
from edgelm.base.public_addresses import is_public
from edgelm.base.workers.child import run_job
from edgelm.chats.knowledge.secret_files import holds_key
from edgelm.chats.printable import printable
from edgelm.chats.tools.results import plain_text
from edgelm.chats.web_page import HINT, FetchPage, PageText, host_of

MAX_BYTES = 2 * 2**20
MAX_REDIRECTS = 5
CHUNK = 2**16
_TEXTS = re.compile(r"text/|application/((.+\+)?(json|xml)|javascript|x-yaml|toml)(;|$)")

Resolve = Callable[[str, int], str]


def public_address(host: str, port: int) -> str:
    """Resolve a name once; return its address, if all that it has are public. Raises RequestError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise RequestError(f"{printable(host)} is not found", "correct the address") from None
    addresses = [str(entry[4][0]).partition("%")[0] for entry in found]
    for address in addresses:
        if not is_public(address):
            raise RequestError(
                f"{printable(host)} is {address}, which is not a public address: it is not fetched", HINT
            )
    return addresses[0]


def fetch_page(url: str, resolve: Resolve = public_address) -> PageText:
    """Return the text of a page. It has no limit of time. Raises RequestError."""
    asked = url
    try:
        for _ in range(MAX_REDIRECTS + 1):
            redirect, data, content_type = _get(asked, resolve)
            if not redirect:
                return _text_of(asked, data, content_type)
            target = urljoin(asked, redirect)
            if asked.lower().startswith("https:") and not target.lower().startswith("https:"):
                raise RequestError(f"{host_of(url)} leads to a page without encryption: it is not fetched", HINT)
            asked = target
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise RequestError(f"{host_of(asked)} cannot be fetched: {printable(str(error))}", HINT) from None
    raise RequestError(f"{host_of(url)} leads from page to page, more than {MAX_REDIRECTS} times", HINT)


def _get(url: str, resolve: Resolve) -> tuple[str, bytes, str]:
    """Ask for one address; return where it redirects to, or the body and its type."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise RequestError(f"{printable(url)} is no address of a page", "give one with https://")
    if parts.username is not None:
        raise RequestError(f"the address of {host_of(url)} has a login in it: it is not fetched", HINT)
    host = parts.hostname.encode("idna").decode() if not parts.hostname.isascii() else parts.hostname
    port = parts.port or (443 if parts.scheme == "https" else 80)
    connection = _Connection(host, port, resolve(host, port), is_secure=parts.scheme == "https")
    path = quote(urlunsplit(("", "", parts.path or "/", parts.query, "")), safe="/?&=%:;,+@!$'()*~-._[]|")
    with ExitStack() as stack:
        stack.callback(connection.close)
        connection.request("GET", path, headers={
            "Accept": "text/html, text/*, application/json;q=0.9", "Accept-Encoding": "identity",
            "User-Agent": "edgelm", "Connection": "close",
        })  # fmt: skip
        response = stack.enter_context(connection.getresponse())
        if response.status in (301, 302, 303, 307, 308) and (location := response.getheader("Location")):
            return location, b"", ""
        if response.status != 200:
            raise RequestError(f"{host_of(url)} answers {response.status} {printable(response.reason)}".strip(), HINT)
        content_type = (response.getheader("Content-Type") or "text/plain").lower()
        if not _TEXTS.match(content_type):
            raise RequestError(f"the page is {printable(content_type)}, not text: it is not attached", HINT)
        if (encoding := response.getheader("Content-Encoding", "identity").lower()) not in ("", "identity"):
            raise RequestError(f"the page is compressed ({printable(encoding)}), which was not asked for", HINT)
        data = bytearray()
        while chunk := response.read1(CHUNK):
            data += chunk
            if len(data) > MAX_BYTES:
                raise RequestError(f"the page is larger than {MAX_BYTES // 2**20} MiB", HINT)
        return "", bytes(data), content_type


class _Connection(http.client.HTTPConnection):
    """A connection to one address, whatever its name would be resolved to now."""

    def __init__(self, host: str, port: int, address: str, *, is_secure: bool) -> None:
        super().__init__(host, port)
        self.default_port = 443 if is_secure else 80
        self._address = address
        self._is_secure = is_secure

    def connect(self) -> None:
        self.sock = socket.create_connection((self._address, self.port))
        if self._is_secure:
            self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)


def _text_of(asked: str, data: bytes, content_type: str) -> PageText:
    charset = re.search(r"charset=[\"']?([\w.:-]+)", content_type)
    is_html = "html" in content_type
    if charset is None and is_html:
        charset = re.search(
            r"<meta[^>]+charset=[\"']?([\w.:-]+)", data[:2048].decode("ascii", "replace"), re.IGNORECASE
        )
    try:
        text = data.decode(charset[1] if charset else "utf-8", "replace")
    except LookupError:
        text = data.decode("utf-8", "replace")
    text = plain_text(page_text(text) if is_html else text).strip()
    if not text:
        raise RequestError(f"{host_of(asked)} has no text: the page may need a browser", HINT)
    if holds_key(text):
        raise RequestError("the page holds a private key: it is not attached", HINT)
    return PageText(f"{text}\n", len(data))


_SKIPPED = frozenset("script style noscript template svg head iframe object nav".split())
_BLOCKS = frozenset(
    "p div br li ul ol dl dt dd tr table h1 h2 h3 h4 h5 h6 section article header footer aside main blockquote pre hr"
    " figure figcaption details summary".split()
)
_MARKS = {"li": "- ", **{f"h{level}": "#" * level + " " for level in range(1, 7)}}


class _PageText(HTMLParser):
    """The visible text: a line a block, with the marks of headings and lists."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._skipped: list[str] = []
        self._num_skipped = Counter[str]()  # by the tag: a page may have a million
        self._num_pre = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "body":  # the end of a head may be left out
            self._skipped.clear()
            self._num_skipped.clear()
        if tag in _SKIPPED:
            self._skipped.append(tag)
            self._num_skipped[tag] += 1
        if self._skipped:
            return
        if tag in _BLOCKS:
            self.parts.append("\n\n" if tag in ("p", "pre", "table", "ul", "ol") or tag[0] == "h" else "\n")
        self.parts.append(_MARKS.get(tag, " | " if tag in ("td", "th") else ""))
        self._num_pre += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        if self._num_skipped[tag]:
            last = ""
            while last != tag:
                last = self._skipped.pop()
                self._num_skipped[last] -= 1
        elif not self._skipped and tag in _BLOCKS:
            self.parts.append("\n")
            self._num_pre -= tag == "pre" and self._num_pre > 0

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self.parts.append(data if self._num_pre else re.sub(r"\s+", " ", data))


def page_text(html: str) -> str:
    """Return the visible text of a page."""
    parser = _PageText()
    parser.feed(html)
    parser.close()
    lines = (line.rstrip() for line in "".join(parser.parts).split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def main(resolve: Resolve = public_address) -> int:
    """Fetch the page that standard input names."""
    return run_job({FetchPage: lambda request, child: child.send(fetch_page(request.url, resolve))})


if __name__ == "__main__":
    sys.exit(main())
