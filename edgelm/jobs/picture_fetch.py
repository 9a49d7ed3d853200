"""Fetches the pictures of clients from the hosts that the server's owner allows.

A host's name is resolved once, and the connection goes to that address; a private address must be allowed itself. No
proxy is used, no redirect followed. Owns these rules. Knows nothing of how a picture is decoded.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Collection
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

from edgelm.base.errors import RequestError
from edgelm.base.workers.pictures import MAX_FILE_BYTES

FETCH_S = 20.0  # for all pictures of a request
WAIT_S = 5.0  # for the connection, and for each part of an answer
PORTS = {"http": 80, "https": 443}
SEND = "send the picture itself: data:image/png;base64,…"


class PictureFetcher:
    """Fetches the pictures of one request. `hosts` are names or addresses, with a port that is not the usual one."""

    def __init__(self, hosts: Collection[str]) -> None:
        self._hosts = frozenset(hosts)
        self._deadline = time.monotonic() + FETCH_S

    def fetch(self, url: str) -> bytes:
        """Return what an address of http or https has. Raises RequestError."""
        import httpx2  # here: most engines fetch nothing

        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port or PORTS[parts.scheme]
        except ValueError:
            raise RequestError("the address of a picture is not one", SEND) from None
        shown = f"[{host}]" if ":" in host else host
        name = shown if port == PORTS[parts.scheme] else f"{shown}:{port}"
        if name not in self._hosts or "@" in parts.netloc:
            raise RequestError(
                f"nothing is fetched from {name[:100]!r}: the server's owner has not allowed that host",
                f"{SEND}; --picture-host allows one",
            )
        address = self._address(host, port)
        pinned = f"[{address}]" if address.version == 6 else str(address)
        target = f"{parts.scheme}://{pinned}:{port}{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
        headers = {"host": name, "accept": "image/*", "accept-encoding": "identity", "user-agent": "edgelm"}
        data = bytearray()
        try:
            with (
                httpx2.Client(trust_env=False, timeout=WAIT_S) as client,
                client.stream("GET", target, headers=headers, extensions={"sni_hostname": host}) as answer,
            ):
                if answer.status_code != 200:
                    redirects = ", a redirect, which is not followed" if answer.is_redirect else ""
                    raise RequestError(f"{name} answers {answer.status_code}{redirects} for a picture", SEND)
                for part in answer.iter_raw():
                    data += part
                    if len(data) > MAX_FILE_BYTES:
                        raise RequestError(
                            f"a picture of {name} is larger than {MAX_FILE_BYTES // 2**20} MiB", "send a smaller one"
                        )
                    self._check_time(name)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise RequestError(f"a picture cannot be fetched from {name}: {type(error).__name__}", SEND) from None
        return bytes(data)

    def _address(self, host: str, port: int) -> IPv4Address | IPv6Address:
        """Return the address of a host that may be asked. Raises RequestError."""
        self._check_time(host)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise RequestError(f"the host {host} of a picture is not found", SEND) from None
        allowed = {entry.rpartition(":")[0] if _has_port(entry) else entry for entry in self._hosts}
        for _, _, _, _, place in found:
            address = ip_address(str(place[0]).partition("%")[0])
            real = getattr(address, "ipv4_mapped", None) or address
            if real.is_global or str(real) in allowed or f"[{real}]" in allowed:
                return address
        raise RequestError(
            f"the host {host} of a picture is at a private address", "its owner must allow the address: --picture-host"
        )

    def _check_time(self, name: str) -> None:
        if time.monotonic() > self._deadline:
            raise RequestError(f"the pictures of {name} take longer than {FETCH_S:.0f} s", SEND)


def _has_port(entry: str) -> bool:
    return ":" in entry.rpartition("]")[2]
