"""The addresses of endpoints.

Owns how an address that a person writes is read. Knows nothing of requests.
"""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import SplitResult, urlsplit

from edgelm.base.errors import RequestError


def normalize_address(address: str) -> str:
    """Return the base URL of an endpoint: a bare host gets http, an empty path gets /v1. Raises RequestError."""
    url = address.strip()
    if "://" not in url:
        url = f"http://{url}"
    try:
        parts = urlsplit(url)
        port_ok = parts.port is None or parts.port > 0
    except ValueError:
        port_ok = False
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_ok or parts.query or parts.fragment:
        raise RequestError(f"{address!r} is not an endpoint", "give a URL such as http://127.0.0.1:11500")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"


def is_loopback(address: str) -> bool:
    """Return whether the base URL of an endpoint names this machine."""
    host = urlsplit(address).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # another name
        return False


def is_same_server(address: str, target: str) -> bool:
    """Return whether a URL leads to the same server as another one, or from HTTP to HTTPS on the same host."""
    before, after = urlsplit(address), urlsplit(target)
    if before.hostname != after.hostname:
        return False
    return (before.scheme, after.scheme) == ("http", "https") or _port(before) == _port(after)


def _port(parts: SplitResult) -> int:
    return parts.port or (443 if parts.scheme == "https" else 80)
