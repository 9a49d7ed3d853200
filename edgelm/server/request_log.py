"""One record for each request to the front: its id, its place in the metrics, and its line in a log of JSON.

Owns the header `x-request-id` of every answer, and what a log tells of a request: never a prompt, an answer or a key.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import httpx2
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgelm.server.engines.process import EngineProcess
from edgelm.server.engines.slots import EngineSlot
from edgelm.server.request_id import ANTHROPIC_REQUEST_ID, REQUEST_ID, request_id_of, set_request_id
from edgelm.server.routes.metrics import Metrics

USAGE_LIMIT_S = 1.0  # for an engine to tell what a request cost
MAX_PATH = 200  # characters of a path in a log

log = logging.getLogger("edgelm.requests")


@dataclass(slots=True)
class RequestRecord:
    """One request: its id, its engine, and its status once it is answered."""

    request_id: str
    usage_name: str = ""  # the name under which its engine reports the usage; empty: no report is needed
    began: float = field(default_factory=time.monotonic)
    status: int = 0  # 0: there is no answer yet
    model: str | None = None
    process: EngineProcess | None = None  # the engine process that got the request
    sent_s: float = 0.0  # from its begin to that
    usage: dict[str, Any] = field(default_factory=dict)  # of an answer that came from another server

    def sent_to(self, slot: EngineSlot, process: EngineProcess) -> None:
        """Note the engine that the request goes to now."""
        self.model, self.process, self.sent_s = slot.model.name, process, time.monotonic() - self.began


def record_of(request: Request) -> RequestRecord:
    """Return the record of a request that passed the RequestLog."""
    record: RequestRecord = request.state.record
    return record


class RequestLog:
    """ASGI application around a whole front: no answer, however early, is without an id and a record.

    `writes` tells whether each request gets a line in the log; a bug (status 500) always has one.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, client_of: Callable[[Request], str], *, writes: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._client_of = client_of
        self._writes = writes
        self._writing: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(Headers(scope=scope).get(REQUEST_ID))
        record = RequestRecord(request_id, secrets.token_hex(16) if self._writes else "")
        set_request_id(request_id)
        scope.setdefault("state", {}).update(record=record, key=None)

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = request_id
                if scope["path"].startswith("/v1/messages"):
                    headers[ANTHROPIC_REQUEST_ID] = request_id
            await send(message)

        try:
            await self._app(scope, receive, with_id)
        except Exception:
            record.status = record.status or 500  # uvicorn answers, and logs the exception
            raise
        finally:
            self._end(scope, record)

    def _end(self, scope: Scope, record: RequestRecord) -> None:
        route = getattr(scope.get("route"), "path", None)
        self._metrics.count_request(scope["method"], route, record.status)
        if record.status == 500:
            place = f" in the engine of {record.model}" if record.model else ""
            log.error(
                "%s %s: status 500%s, request %s", scope["method"], scope["path"][:MAX_PATH], place, record.request_id
            )
        if record.process is not None:
            self._metrics.refresh_soon()
        if self._writes:
            duration_s = time.monotonic() - record.began
            writing = asyncio.create_task(self._write(scope, record, duration_s))
            self._writing.add(writing)
            writing.add_done_callback(self._writing.discard)

    async def _write(self, scope: Scope, record: RequestRecord, duration_s: float) -> None:
        usage: dict[str, Any] = dict(record.usage)
        try:
            if record.process is not None:
                usage = await _usage(record.process, record.usage_name)
        finally:  # also if the front ends now
            if (first_s := usage.get("time_to_first_token_s")) is not None:
                usage["time_to_first_token_s"] = round(record.sent_s + first_s, 6)
            fields = {
                "request_id": record.request_id,
                "client": self._client_of(Request(scope)),
                "model": record.model,
                "method": scope["method"],
                "route": scope["path"][:MAX_PATH],
                "status": record.status,
                **usage,
                "duration_s": round(duration_s, 6),
            }
            known = {name: value for name, value in fields.items() if value is not None}
            log.info("request", extra={"fields": known})


async def _usage(process: EngineProcess, name: str) -> dict[str, Any]:
    """Return the usage of a request; empty: its engine has not taken it, is gone, or does not answer in time."""
    try:
        async with asyncio.timeout(USAGE_LIMIT_S):
            answer = await process.client.get(f"/usage/{name}")
            return dict(answer.json()) if answer.status_code == 200 else {}
    except (TimeoutError, httpx2.HTTPError, ValueError):
        return {}


class JsonLines(logging.Formatter):
    """Every record of a log as a line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        time_of = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {"time": time_of, "level": record.levelname.lower(), "message": record.getMessage()}
        fields: dict[str, Any] = getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line | fields, ensure_ascii=False)
