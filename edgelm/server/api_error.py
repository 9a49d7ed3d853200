"""Errors as an HTTP client meets them: a status, and a body in OpenAI's shape.

Owns the mapping from our errors to both. Imports nothing heavy: front and engine process use it.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgelm.errors import BusyError, EdgeLMError, EngineError, ModelError, RequestError

RETRY_AFTER = "retry-after"
NO_RETRY = {"x-should-retry": "false"}  # OpenAI's clients repeat every 5xx that does not say this


class ApiError(Exception):
    """What a request gets instead of its answer."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: dict[str, str] | None = None,
        **more: Any,  # fields beside OpenAI's own
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        self.body = {
            "error": {"message": message, "type": _kind(status), "param": param, "code": code} | more,
        }

    def response(self) -> Response:
        return JSONResponse(self.body, self.status, self.headers)

    def event(self) -> bytes:
        """Return the error as a server-sent event, for a stream that has begun."""
        return b"data: " + json.dumps(self.body, ensure_ascii=False).encode() + b"\n\n"


def _kind(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def as_api_error(error: EdgeLMError) -> ApiError:
    """Return what a client gets for one of our errors."""
    if isinstance(error, RequestError):
        return ApiError(400, "invalid_value", str(error))
    if isinstance(error, BusyError):
        return ApiError(429, "queue_full", str(error), headers={RETRY_AFTER: "1"})
    if isinstance(error, ModelError):
        return ApiError(503, "model_failed", str(error), headers=NO_RETRY)
    if isinstance(error, EngineError):
        return ApiError(503, "engine_died", str(error), headers={RETRY_AFTER: "1"})
    return ApiError(503, "model_failed", str(error), headers=NO_RETRY)


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _on_edgelm_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, EdgeLMError)
    return as_api_error(error).response()


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Answer for an unknown path or method."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    phrase = HTTPStatus(error.status_code).phrase.lower()
    return ApiError(
        error.status_code, phrase.replace(" ", "_"), f"{what}: {phrase}", headers=dict(error.headers or {})
    ).response()


async def _on_bug(_: Request, error: Exception) -> Response:
    return ApiError(500, "internal_error", f"edgelm failed: {type(error).__name__}", headers=NO_RETRY).response()


EXCEPTION_HANDLERS = {
    ApiError: _on_api_error,
    EdgeLMError: _on_edgelm_error,
    HTTPException: _on_http_exception,
    Exception: _on_bug,
}
