"""Calls of tools within an answer, with their results.

Owns their form as JSON and Markdown, and where they stand in the answer's text. Knows nothing of how tools are run,
allowed and shown.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
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

    @property
    def has_ended(self) -> bool:
        return self.state in ("done", "failed", "refused")

    @property
    def answer(self) -> str:
        """Return the result for the model, also of a call that never ended: each call needs one."""
        if self.has_ended:
            return self.result
        return "The answer was stopped before this call ended." if self.state == "running" else "This call was not run."

    @property
    def values(self) -> dict[str, Any] | None:
        """Return the arguments; None where they are no JSON object."""
        try:
            values = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return None
        return values if isinstance(values, dict) else None

    @property
    def name(self) -> str:
        """Return the name for a person."""
        return f"{self.server}/{self.tool}" if self.server else self.tool


def segments(text: str, calls: Sequence[ToolCall]) -> Iterator[tuple[str, tuple[ToolCall, ...]]]:
    """Yield the parts of an answer's text, each with the calls after it; the last part has none."""
    begin = 0
    for at, group in groupby(calls, key=lambda call: call.at):
        yield text[begin:at], tuple(group)
        begin = at
    yield text[begin:], ()


def tool_name(server: str, tool: str) -> str:
    """Return the name of a tool for the model: servers may have tools of the same name.

    One that is too long, or has other characters, ends with a hash: a.b and a_b are two tools.
    """
    name = re.sub(r"[^A-Za-z0-9_-]", "_", f"{server}__{tool}")
    if len(name) <= 64 and name.endswith(tool):
        return name
    return f"{name[:55]}_{hashlib.sha256(f'{server}__{tool}'.encode('utf-8', 'replace')).hexdigest()[:8]}"


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


def with_calls(text: str, calls: Sequence[ToolCall]) -> str:
    """Return an answer as Markdown, with its calls where they were made."""
    parts: list[str] = []
    for part, group in segments(text, calls):
        parts += [part.strip("\n")] if part.strip() else []
        parts += map(_as_markdown, group)
    return "\n\n".join(parts)


def _as_markdown(call: ToolCall) -> str:
    name = call.name.replace("`", "'")
    body = f"{call.arguments}\n\n{call.answer}"
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`{3,}", body))])
    return f"**Tool** `{name}`, {call.state}\n\n{fence}\n{body}\n{fence}"
