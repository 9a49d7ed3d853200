"""Failures of an endpoint as EdgeLMErrors: one line with a reason and a hint.

Owns the translation of the exceptions of openai's package and of httpx2 below it. Knows nothing of requests and
screens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from edgelm.base.errors import BusyError, EdgeLMError, EngineError, RequestError, StillLoadingError

MAX_RETRY_S = 5.0
CONTEXT_HINT = "send less of the conversation, or raise --ctx"


class UnreachableError(EdgeLMError):
    """There is no answer at the address."""


class ContextFullError(RequestError):
    """The conversation does not fit the model's context."""


class Progress(Protocol):
    """The state of an answer: `begun` after its first part."""

    begun: bool


@contextmanager
def explained(address: str, progress: Progress | None = None) -> Iterator[None]:
    """Raise the exceptions of both packages in the block as EdgeLMErrors."""
    import httpx2
    import openai

    try:
        yield
    except openai.APIStatusError as error:
        raise _explain_status(error, address) from error
    except (openai.APITimeoutError, httpx2.TimeoutException) as error:
        raise EngineError(f"{address} does not answer", "try again, or choose another endpoint") from error
    except (openai.APIConnectionError, httpx2.RequestError) as error:  # httpx2's while an answer is read
        if progress is not None and progress.begun:
            raise EngineError(f"the connection to {address} broke", "regenerate the answer") from error
        cause = str(error.__cause__ or error) or "no connection"
        message = f"{address} cannot be reached ({cause})"
        raise UnreachableError(message, "start it, or give another --endpoint") from error
    except openai.APIError as error:  # an error event in the middle of a stream
        raise _explain_body(error.message, error.body, address) from error
    except (openai.OpenAIError, ValueError, RecursionError) as error:
        raise no_protocol(address) from error


def no_protocol(address: str) -> EngineError:
    """Return the error for an address with another kind of server."""
    return EngineError(f"{address} does not speak OpenAI's protocol", "check the address; it may need /v1")


def _explain_status(error: Any, address: str) -> EdgeLMError:
    status: int = error.status_code
    body = error.body
    detail = detail_of(body) or f"HTTP {status}"
    code = body.get("code") if isinstance(body, Mapping) else None
    if status == 503 and code == "model_loading":
        return StillLoadingError(detail, retry_after_s=_retry_after(error.response.headers.get("retry-after")))
    if status in (401, 403):
        return RequestError(f"{address} refuses the key: {detail}", "give the right --api-key")
    if code == "context_length_exceeded":
        return ContextFullError(detail, CONTEXT_HINT)
    if status == 404:
        address_hint = "" if code == "model_not_found" else "; the address may need /v1"
        return RequestError(f"{address}: {detail}", f"choose a model with /model{address_hint}")
    if status == 429:
        return BusyError(f"{address} is busy: {detail}", "wait a moment and regenerate")
    if status < 500:
        return RequestError(f"{address} refuses the request: {detail}")
    return _explain_body(detail, body, address)


def _explain_body(message: str, body: object, address: str) -> EdgeLMError:
    code = body.get("code") if isinstance(body, Mapping) else None
    message = " ".join((message or "").split()) or "no reason given"
    if code == "context_length_exceeded":
        return ContextFullError(message, CONTEXT_HINT)
    if code == "engine_died":
        return EngineError(message, "your next message starts it again")
    if code == "out_of_memory":
        return EngineError(message)  # it says what to do; the model stays loaded
    return EngineError(f"{address} failed: {message}", "try again")


def detail_of(body: object) -> str:
    """Return the message of an error body, in OpenAI's or a similar shape."""
    if isinstance(body, Mapping):
        for name in ("message", "detail", "error"):
            value = body.get(name)
            if isinstance(value, str) and value:
                return " ".join(value.split())[:500]
            if isinstance(value, Mapping):
                return detail_of(value)
    return " ".join(body.split())[:200] if isinstance(body, str) and "<" not in body else ""


def _retry_after(value: str | None) -> float:
    try:
        return min(max(float(value or 0.5), 0.1), MAX_RETRY_S)
    except ValueError:
        return 0.5
