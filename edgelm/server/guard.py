"""Who may ask, and how: Host, Origin, key, content type and size of a request, checked before anything else.

Owns the defences of a port that every program and every web page of the user's browser can reach. Knows nothing of
what is asked.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from edgelm.server.api_error import ApiError

MAX_BODY_BYTES = 16 * 2**20
BODY_LIMIT_S = 60.0
OPEN_PATHS = frozenset({"/health"})  # without a key: says nothing but that we run


@dataclass(frozen=True, slots=True)
class Rules:
    """What the guard asks for."""

    loopback: bool  # only this machine reaches us: whoever names another host was led here by DNS rebinding
    api_key: str | None = None
    max_body_bytes: int = MAX_BODY_BYTES


class Guard:
    """ASGI middleware that answers for requests which may not pass."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # websockets are not accepted
        try:
            check(self._rules, scope["method"], scope["path"], Headers(scope=scope))
        except ApiError as error:
            await error.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def check(rules: Rules, method: str, path: str, headers: Headers) -> None:
    """Raise ApiError for a request that breaks a rule."""
    host = headers.get("host", "")
    if rules.loopback and not is_loopback(_name(host)):
        raise ApiError(403, "host_not_allowed", "this server answers on this machine only: use http://127.0.0.1")
    origin = headers.get("origin")
    if origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
        raise ApiError(403, "origin_not_allowed", "requests from web pages are not allowed")
    if rules.api_key is not None and path not in OPEN_PATHS and not _has_key(headers, rules.api_key):
        message = "the API key is missing or wrong: send it as `Authorization: Bearer KEY`"
        raise ApiError(401, "invalid_api_key", message, headers={"www-authenticate": "Bearer"})
    if method in ("POST", "PUT", "PATCH"):
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a web page can send other kinds without being asked for permission
            raise ApiError(415, "unsupported_media_type", "send Content-Type: application/json")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > rules.max_body_bytes:
            raise _too_large(rules.max_body_bytes)


async def read_body(request: Request, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Return the body of a request, which may come in pieces without a length. Raises ApiError."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_LIMIT_S):
            async for piece in request.stream():
                body += piece
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError:
        raise ApiError(408, "request_timeout", f"the body did not come within {BODY_LIMIT_S:.0f} seconds") from None
    except ClientDisconnect:
        raise ApiError(400, "client_left", "the client left before the body was complete") from None
    return bytes(body)


def is_loopback(host: str) -> bool:
    """Return whether a name or address can only mean this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def _name(host: str) -> str:
    """Return a Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] or host


def _has_key(headers: Headers, key: str) -> bool:
    kind, _, given = headers.get("authorization", "").partition(" ")
    return kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), key.encode())


def _too_large(limit: int) -> ApiError:
    return ApiError(413, "request_too_large", f"the body is larger than {limit // 2**20} MiB")
