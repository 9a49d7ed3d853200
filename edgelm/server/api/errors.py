"""Errors of the APIs: a status, and a body in OpenAI's format.

Owns the mapping from our errors to both. Imports nothing heavy: front and engine process use it.
"""

from __future__ import annotations

import json
from typing import Any

from edgelm.base.errors import (
    BusyError,
    EdgeLMError,
    EngineError,
    ModelError,
    NotSeenError,
    OutOfMemoryError,
    RequestError,
)

RETRY_AFTER = "retry-after"
NOT_SEEN = "x-edgelm-not-seen"  # of an engine, to its front: it knows which other models read pictures
NO_RETRY = {"x-should-retry": "false"}  # OpenAI's clients retry every 5xx without this header


class ApiError(Exception):
    """An error response."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: dict[str, str] | None = None,
        **more: Any,  # fields that OpenAI does not have
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers or {}
        self.body = {"error": {"message": message, "type": _kind(status), "param": param, "code": code} | more}

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
    """Return the response for one of our errors."""
    if isinstance(error, NotSeenError):
        return ApiError(400, "unsupported_content", str(error), headers={NOT_SEEN: "1"})
    if isinstance(error, RequestError):
        return ApiError(400, "invalid_value", str(error))
    if isinstance(error, BusyError):
        return ApiError(429, "queue_full", str(error), headers={RETRY_AFTER: "1"})
    if isinstance(error, ModelError):
        return ApiError(503, "model_failed", str(error), headers=NO_RETRY)
    if isinstance(error, OutOfMemoryError):  # the engine lives, and other requests may be served
        return ApiError(503, "out_of_memory", str(error), headers={RETRY_AFTER: "1"})
    if isinstance(error, EngineError):
        return ApiError(503, "engine_died", str(error), headers={RETRY_AFTER: "1"})
    return ApiError(503, "model_failed", str(error), headers=NO_RETRY)
