"""Calls of tools within an answer, with their results.

Owns their form as JSON. Knows nothing of how tools are run, allowed and shown.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

CallState = Literal["asked", "running", "done", "failed", "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call. Calls with the same `at` were made together, after that many characters of the answer's text."""

    id: str  # of the endpoint
    server: str  # the name of the tool's server in the settings
    tool: str
    arguments: str  # JSON, as the model wrote it
    at: int
    state: CallState = "asked"
    result: str = ""  # for the model; of a failed call its error
    took_s: float = 0.0


def tool_name(server: str, tool: str) -> str:
    """Return the name of a tool for the model: servers may have tools of the same name."""
    name = re.sub(r"[^A-Za-z0-9_-]", "_", f"{server}__{tool}")
    return name if len(name) <= 64 else f"{name[:55]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def calls_to_text(calls: Sequence[ToolCall]) -> str:
    """Return calls as JSON; empty for none."""
    return json.dumps(calls_as_json(calls)) if calls else ""


def calls_as_json(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Return calls as values of JSON."""
    return [asdict(call) for call in calls]


def calls_from_text(text: str) -> tuple[ToolCall, ...]:
    """Return the calls that `calls_to_text` wrote, possibly in another version."""
    names = ToolCall.__slots__
    items = json.loads(text) if text else []
    return tuple(ToolCall(**{name: value for name, value in item.items() if name in names}) for item in items)
