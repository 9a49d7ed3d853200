"""Errors as HTTP responses, in the form of the API that a path belongs to.

Owns what Starlette calls when a route raises.
"""

from __future__ import annotations

from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgelm.base.errors import EdgeLMError
from edgelm.server.api.dialects import error_body_of, error_status_of
from edgelm.server.api.errors import NO_RETRY, ApiError, as_api_error
from edgelm.server.sse import ClientLeftError


def error_response(path: str, error: ApiError) -> Response:
    """Return the response of an error to a request for a path."""
    return JSONResponse(error_body_of(path, error), error_status_of(path, error), error.headers)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(request.url.path, error)


async def _on_edgelm_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, EdgeLMError)
    return error_response(request.url.path, as_api_error(error))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Answer for an unknown path or method."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    phrase = HTTPStatus(error.status_code).phrase.lower()
    message, headers = f"{request.method} {path}: {phrase}", dict(error.headers or {})
    return error_response(path, ApiError(error.status_code, phrase.replace(" ", "_"), message, headers=headers))


async def _on_bug(request: Request, error: Exception) -> Response:
    message = f"edgelm failed: {type(error).__name__}"
    headers = NO_RETRY | {"connection": "close"}  # Starlette raises the exception again, and uvicorn closes then
    return error_response(request.url.path, ApiError(500, "internal_error", message, headers=headers))


async def _on_client_left(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # the client is gone; logs and metrics show the status


EXCEPTION_HANDLERS = {
    ApiError: _on_api_error,
    EdgeLMError: _on_edgelm_error,
    HTTPException: _on_http_exception,
    ClientLeftError: _on_client_left,
    Exception: _on_bug,
}
