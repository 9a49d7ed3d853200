"""The id of a request: the client's own `x-request-id`, or a new one; every answer and every log has it.

Knows nothing of routes.
"""

from __future__ import annotations

import re
import secrets
from contextvars import ContextVar

REQUEST_ID = "x-request-id"
ANTHROPIC_REQUEST_ID = "request-id"  # Anthropic's clients read it there
_VALID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")  # nothing that a log, a header or a terminal could misread

_current: ContextVar[str] = ContextVar("request_id", default="")


def new_request_id() -> str:
    """Return an id that no other request has."""
    return f"req_{secrets.token_hex(12)}"


def current_request_id() -> str:
    """Return the id of the request that this task answers; empty: it answers none."""
    return _current.get()


def set_request_id(request_id: str) -> None:
    """Let this task, and those that it starts, answer the request of this id."""
    _current.set(request_id)


def request_id_of(sent: str | None) -> str:
    """Return the id that a client sent, or a new one if it sent none or one that is too long or has odd characters."""
    return sent if sent is not None and _VALID.fullmatch(sent) else new_request_id()
