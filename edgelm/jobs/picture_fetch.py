"""Fetches the pictures of clients from the hosts that the server's owner allows.

A host's name is resolved once, and the connection goes to that address; a private address must be allowed itself. No
proxy is used, no redirect followed. All of it happens within a time, on the event loop. Owns these rules. Knows nothing
of how a picture is decoded.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from edgelm.base.errors import RequestError
from edgelm.base.public_addresses import is_public
from edgelm.base.workers.pictures import MAX_FILE_BYTES

if TYPE_CHECKING:
    import ssl

FETCH_S = 20.0  # for all pictures of a request, with the wait for those of others
WAIT_S = 5.0  # for the connection, and for each part of an answer
NUM_AT_ONCE = 8  # pictures, of all requests
PORTS = {"http": 80, "https": 443}
SEND = "send the picture itself: data:image/png;base64,…"
_fetching = asyncio.Semaphore(NUM_AT_ONCE)
_blocking = ThreadPoolExecutor(NUM_AT_ONCE, "pictures")  # a name may be looked up for longer than it is waited for


class PictureFetcher:
    """Fetches the pictures of one request. `hosts` are names or addresses, with a port that is not the usual one."""

    def __init__(self, hosts: Collection[str]) -> None:
        self._hosts = frozenset(hosts)
        self._left_s = FETCH_S

    async def fetch(self, url: str) -> bytes:
        """Return what an address of http or https has. Raises RequestError."""
        try:
            parts = urlsplit(url)
            scheme, host, port = parts.scheme, parts.hostname or "", parts.port or PORTS[parts.scheme]
        except ValueError:
            raise RequestError("the address of a picture is not one", SEND) from None
        name = _named(host, port, scheme)
        if name not in self._hosts or "@" in parts.netloc:
            raise RequestError(
                f"nothing is fetched from {name[:100]!r}: the server's owner has not allowed that host",
                f"{SEND}; --picture-host allows one",
            )
        path = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._left_s), _fetching:
                address = await self._address(host, port, scheme)
                return await _get(f"{scheme}://{_in_url(str(address))}:{port}{path}", host, name)
        except TimeoutError:
            raise RequestError(f"the pictures of {name} take longer than {FETCH_S:.0f} s", SEND) from None
        finally:
            self._left_s -= time.monotonic() - started

    async def _address(self, host: str, port: int, scheme: str) -> IPv4Address | IPv6Address:
        """Return the address of a host that may be asked. Raises RequestError."""
        look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        try:
            found = await asyncio.get_running_loop().run_in_executor(_blocking, look_up)
        except (OSError, UnicodeError):
            raise RequestError(f"the host {host} of a picture is not found", SEND) from None
        for _, _, _, _, place in found:
            address = ip_address(str(place[0]).partition("%")[0])
            real = getattr(address, "ipv4_mapped", None) or address
            if is_public(str(address)) or _named(str(real), port, scheme) in self._hosts:
                return address
        raise RequestError(
            f"the host {host} of a picture is at a private address",
            "its owner must allow the address, with its port: --picture-host",
        )


async def _get(url: str, host: str, name: str) -> bytes:
    """Return what a URL with an address instead of `host` has. Raises RequestError."""
    tls = await asyncio.get_running_loop().run_in_executor(_blocking, _tls)
    import httpx2  # `_tls` has imported it: most engines fetch nothing

    headers = {"host": name, "accept": "image/*", "accept-encoding": "identity", "user-agent": "edgelm"}
    data = bytearray()
    try:
        async with (
            httpx2.AsyncClient(trust_env=False, timeout=WAIT_S, verify=tls) as client,
            client.stream("GET", url, headers=headers, extensions={"sni_hostname": host}) as answer,
        ):
            if answer.status_code != 200:
                redirects = ", a redirect, which is not followed" if answer.is_redirect else ""
                raise RequestError(f"{name} answers {answer.status_code}{redirects} for a picture", SEND)
            async for part in answer.aiter_raw():
                data += part
                if len(data) > MAX_FILE_BYTES:
                    raise RequestError(
                        f"a picture of {name} is larger than {MAX_FILE_BYTES // 2**20} MiB", "send a smaller one"
                    )
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise RequestError(f"a picture cannot be fetched from {name}: {type(error).__name__}", SEND) from None
    return bytes(data)


@cache
def _tls() -> ssl.SSLContext:
    """Return what all connections verify certificates with: it takes longer to make than many a picture."""
    import httpx2

    return httpx2.create_ssl_context()


def _named(host: str, port: int, scheme: str) -> str:
    """Return host and port as the owner allows them: without the usual port."""
    return _in_url(host) if port == PORTS[scheme] else f"{_in_url(host)}:{port}"


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
