"""A page of the web as an attachment: text only, of public addresses only, within a time.

Owns which words of a message are addresses, and the limit of time. A worker, web_worker.py, fetches the page and makes
text of it: neither a server that drips nor a page that is slow to parse goes on behind the limit.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from edgelm.base.errors import RequestError
from edgelm.base.workers.parent import Worker
from edgelm.chats.attachments import Attachment
from edgelm.chats.printable import printable

LIMIT_S = 20.0
HINT = "open it in a browser, and paste its text"
PORTS = {"http": 80, "https": 443}
_URL = re.compile(r"https?://[^\s<>\"'`]+", re.IGNORECASE)
_PAIRS = (("(", ")"), ("[", "]"), ("{", "}"))


@dataclass(frozen=True, slots=True)
class FetchPage:
    """Fetch the page at an address."""

    url: str


@dataclass(frozen=True, slots=True)
class PageText:
    """The text of a page; `size` is that of the page, in bytes."""

    text: str
    size: int


def urls_in(text: str) -> list[str]:
    """Return the addresses of pages in a message, each once."""
    found = (_without_stop(match[0]) for match in _URL.finditer(text))
    return list(dict.fromkeys(url for url in found if _host(url)))


def is_url(text: str) -> bool:
    """Tell whether a text is the address of a page, and nothing else."""
    return urls_in(text) == [text]


def host_of(url: str) -> str:
    """Return the name of a page's server, with a port that is not the usual one, for a question to the user."""
    return _host(url) or printable(url)


async def fetched(url: str, limit_s: float = LIMIT_S, command: tuple[str, ...] = ()) -> Attachment:
    """Return the text of a page; `command` replaces that of the worker. Raises EdgeLMError."""
    worker = Worker(
        "edgelm.chats.web_worker", replies=(PageText,), errors=(RequestError,), grace_s=0.0, command=command
    )
    try:
        async with asyncio.timeout(limit_s):
            worker.send(FetchPage(url))
            page: PageText | None = await worker.areceive()
            if page is None:
                raise RequestError(f"{host_of(url)} cannot be fetched: the process {(await worker.aexit()).how}", HINT)
    except TimeoutError:
        raise RequestError(f"{host_of(url)} did not answer within {limit_s:g} s", HINT) from None
    finally:
        await worker.aclose()
    return Attachment(kind="text", name=printable(url), text=page.text, size=page.size)


def _without_stop(url: str) -> str:
    """Return an address without what ends the sentence or the bracket that it stands in."""
    while url[-1] in ".,;:!?" or any(url[-1] == end and url.count(end) > url.count(begin) for begin, end in _PAIRS):
        url = url[:-1]
    return url


def _host(url: str) -> str:
    """Return host and port; empty where it is no address."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return ""
    shown = f"[{host}]" if ":" in host else host
    return printable(shown if not host or port in (None, PORTS.get(parts.scheme)) else f"{shown}:{port}")
