"""Access control: Host, Origin, key, content type and size of a request are checked before anything else.

Owns the defences of a port that every program and every web page in the user's browser can reach, and what other
origins are told (CORS). Knows nothing of the routes.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgelm.server.api.errors import ApiError
from edgelm.server.api.handlers import error_response
from edgelm.server.keys import Key, Keys

MAX_BODY_BYTES = 16 * 2**20
OPEN_PATHS = frozenset({"/health"})  # answered without a key: it tells only that we run
LOCAL = "local"  # of `Rules.origins`: web views of editors, browser extensions, pages of servers on this machine
LOCAL_SCHEMES = frozenset(
    {
        *("app", "file", "tauri", "vscode-file", "vscode-webview"),
        *("chrome-extension", "moz-extension", "safari-web-extension"),
    }
)
METHODS = "GET, POST, DELETE"  # allowed to other origins
# Clients have headers of their own (traceparent, x-title, …), which change nothing; the front's own are not theirs.
HEADERS = re.compile(r"(?!x-edgelm-)[a-z0-9!#$%&'*+.^_`|~-]{1,100}")
EXPOSED_HEADERS = "request-id, retry-after, x-request-id, x-should-retry"
PREFLIGHT_AGE_S = "600"
CURL_TYPES = ("", "application/x-www-form-urlencoded")  # of `curl -d`, as people type it
FORWARDED = frozenset({"cf-connecting-ip", "forwarded", "true-client-ip", "via", "x-client-ip", "x-real-ip"})


@dataclass(frozen=True, slots=True)
class Rules:
    """The conditions that every request must meet."""

    loopback: bool  # only this machine reaches us: an address in Host does not name it, except its own
    keys: Keys = field(default_factory=Keys)  # none: no request needs one
    origins: frozenset[str] = frozenset()  # in lower case, besides our own; perhaps LOCAL
    allowed_hosts: frozenset[str] = frozenset()  # names in Host, besides this machine's own
    max_body_bytes: int = MAX_BODY_BYTES


class Guard:
    """ASGI application that rejects requests which break a rule, and passes on the others.

    It wraps the whole application, so that its answers to bugs have the headers of CORS too. Routes find the key of a
    request in `request.state.key`: a `Key`, or None if it has none and needs none.
    """

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # websockets are not accepted
        headers = Headers(scope=scope)
        app: ASGIApp
        try:
            check_sender(self._rules, headers)
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                app = _preflight(headers)  # browsers send it without the key
            else:
                host, _ = scope.get("client") or ("", 0)
                key = check(self._rules, scope["method"], scope["path"], headers, host)
                scope.setdefault("state", {})["key"] = key
                app = self._app
        except ApiError as error:
            app = error_response(scope["path"], error)
        await app(scope, receive, _with_cors(self._rules, headers, send) if self._rules.origins else send)


def check_sender(rules: Rules, headers: Headers) -> None:
    """Raise ApiError for a name that is not ours, as after DNS rebinding, and for a web page that is not allowed."""
    host = headers.get("host", "")
    name = _name(host)
    if not (is_loopback(name) or name in rules.allowed_hosts or (not rules.loopback and _is_address(name))):
        reach = "use localhost or 127.0.0.1" if rules.loopback else "use its address"
        message = f"this server does not answer to that name: {reach}, or start edgelm serve with --allowed-host NAME"
        raise ApiError(403, "host_not_allowed", message)
    origin = headers.get("origin")
    if origin is not None and not _is_own(origin, host) and not is_allowed_origin(rules.origins, origin):
        message = "pages of this origin may not send requests: start edgelm serve with --origin ORIGIN to allow them"
        raise ApiError(403, "origin_not_allowed", message)


def check(rules: Rules, method: str, path: str, headers: Headers, client: str) -> Key | None:
    """Return the key of a request of an address.

    Raises ApiError for one that needs another key, or with a body of another kind.
    """
    key = rules.keys.find(headers)
    if rules.keys and key is None and path not in OPEN_PATHS:
        message = "the API key is missing or wrong: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`"
        raise ApiError(401, "invalid_api_key", message, headers={"www-authenticate": "Bearer"})
    if method in ("POST", "PUT", "PATCH"):
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        # Browsers let web pages send other types without a preflight.
        is_typed = kind in CURL_TYPES and (key is not None or _by_hand(headers, client))
        if kind != "application/json" and not is_typed:
            raise ApiError(415, "unsupported_media_type", "send Content-Type: application/json")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > rules.max_body_bytes:
            raise too_large(rules.max_body_bytes)
    return key


def may_administer(request: Request) -> bool:
    """Return whether a request that the Guard let in may change the server: load, unload, pull or delete models.

    A key of a file decides by its mark, wherever the request comes from. Without one it must come from this machine
    itself: neither from a web page nor through a proxy that shows itself in Host or in a header.
    """
    key: Key | None = request.state.key
    if key is not None and key.admin is not None:
        return key.admin
    headers = request.headers
    local = request.client is not None and is_loopback(request.client.host) and is_loopback(_name(headers["host"]))
    # nginx sends HTTP/1.0 and no header of its own, unless it is told otherwise.
    return local and "origin" not in headers and not _is_forwarded(headers) and request.scope["http_version"] != "1.0"


def may_name_paths(request: Request) -> bool:
    """Return whether a request may name a model file of this machine by its path: only administrators may.

    A key without a mark does not, on this machine either: a proxy that hides itself makes its clients look local.
    """
    key: Key | None = request.state.key
    return may_administer(request) and (key is None or key.admin is True)


def permitted_keep_alive(request: Request, keep_alive_s: float | None) -> float | None:
    """Return the `keep_alive` of a request; None if it has none, or may not change the server.

    Many clients always send one: a refusal would shut them out.
    """
    return keep_alive_s if may_administer(request) else None


def _by_hand(headers: Headers, client: str) -> bool:
    """Return whether a request comes from a program on this machine: no web page, and no proxy that shows itself."""
    if not (is_loopback(client) and is_loopback(_name(headers.get("host", "")))):
        return False
    names = headers.keys()
    of_page = any(name == "origin" or name.startswith("sec-fetch-") for name in names)
    return not of_page and not _is_forwarded(headers)


def _is_forwarded(headers: Headers) -> bool:
    """Return whether a proxy shows itself in a header."""
    return any(name in FORWARDED or name.startswith("x-forwarded-") for name in headers)


def too_large(limit: int) -> ApiError:
    """Return the refusal of a body with more bytes than the limit."""
    return ApiError(413, "request_too_large", f"the body is larger than {limit // 2**20} MiB")


def is_allowed_origin(origins: frozenset[str], origin: str) -> bool:
    """Return whether the value of an Origin header is among these origins. `null` never is: every page can send it."""
    origin = origin.lower()
    if origin in origins - {LOCAL}:
        return True
    if LOCAL not in origins:
        return False
    try:
        parts = urlsplit(origin)
        host = parts.hostname or ""
    except ValueError:
        return False
    if parts.scheme in ("http", "https"):
        return is_loopback(host) or host.endswith(".localhost")
    return parts.scheme in LOCAL_SCHEMES


def is_loopback(host: str) -> bool:
    """Return whether a name or address always means this machine."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower().rstrip(".") == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_own(origin: str, host: str) -> bool:
    """Return whether a page of this server sends the request."""
    return origin.lower() in (f"http://{host}".lower(), f"https://{host}".lower())


def _name(host: str) -> str:
    """Return a Host header without its port, in lower case."""
    host = host.lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return (host.rpartition(":")[0] or host).rstrip(".")


def _preflight(headers: Headers) -> Response:
    """Return the answer to a browser that asks what a page of an allowed origin may send."""
    names = [name.strip().lower() for name in headers.get("access-control-request-headers", "").split(",")]
    allowed = {
        "access-control-allow-methods": METHODS,
        "access-control-allow-headers": ", ".join(name for name in names if HEADERS.fullmatch(name)),
        "access-control-max-age": PREFLIGHT_AGE_S,
    }
    return Response(status_code=204, headers=allowed)


def _with_cors(rules: Rules, request: Headers, send: Send) -> Send:
    """Return a `send` that adds the headers without which a browser hides the answer from a page."""
    origin = request.get("origin")

    async def add(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.add_vary_header("Origin")
            if origin is not None and is_allowed_origin(rules.origins, origin):
                headers["access-control-allow-origin"] = origin
                headers["access-control-expose-headers"] = EXPOSED_HEADERS
        await send(message)

    return add
