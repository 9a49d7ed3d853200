"""The answer of Anthropic's API: the message, and the events of its stream.

Owns content blocks, stop reasons and token counts.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from edgelm.engine.core import Stats
from edgelm.jobs.request import AnswerDelta
from edgelm.server.api.arguments import read_arguments
from edgelm.server.api.dialect import AnswerContext, Reply
from edgelm.server.api.errors import ApiError
from edgelm.server.api.messages import PING, MessagesRequest, error_event
from edgelm.text.parse import Args, CallBegin, CallEnd, Content, Part, Reasoning

SIGNATURE = "ZWRnZWxt"  # of thinking: clients drop thinking that has none. Nobody checks it
REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "context": "model_context_window_exceeded",
    "tool_calls": "tool_use",
}


class MessagesReply(Reply):
    """The answer as content blocks: their indices count from 0, and one is open at a time."""

    def __init__(self, request: MessagesRequest, context: AnswerContext) -> None:
        self._request = request
        self._context = context
        self._id = f"msg_{secrets.token_hex(12)}"
        self._index = -1
        self._open: str | None = None  # the type of the open block

    def opening(self) -> bytes:
        usage = {"input_tokens": len(self._context.prompt), "output_tokens": 0}
        usage |= {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        return _event("message_start", message=self._message([], None, None, usage)) + PING

    def ping(self) -> bytes:
        return PING

    def error(self, error: ApiError) -> bytes:
        return error_event(error)

    def delta(self, delta: AnswerDelta) -> bytes:
        events = b"".join(self._part(part) for part in delta.parts)
        if delta.reason is None:
            return events
        assert delta.stats
        reason, stop = self._reason(delta)
        end = {"stop_reason": reason, "stop_sequence": stop}
        notes = self._notes(delta)
        return events + self._close() + _event("message_delta", delta=end, usage=_usage(delta.stats), **notes)

    def closing(self) -> bytes:
        return _event("message_stop")

    def whole(self, deltas: Sequence[AnswerDelta]) -> dict[str, Any]:
        blocks: list[dict[str, Any]] = []
        arguments: list[str] = []  # of each block
        for part in (part for delta in deltas for part in delta.parts):
            kind = _kind(part)
            if kind and (isinstance(part, CallBegin) or not blocks or blocks[-1]["type"] != kind):
                blocks.append(_empty_block(part))
                arguments.append("")
            match part:
                case Reasoning(text, _):
                    blocks[-1]["thinking"] += text
                case Content(text, _):
                    blocks[-1]["text"] += text
                case Args():
                    arguments[-1] += part.json_text
        for block, written in zip(blocks, arguments, strict=True):
            if block["type"] == "tool_use":
                block["input"] = read_arguments(written) or {}  # those of a call that was cut off are none
            elif block["type"] == "thinking":
                block["signature"] = SIGNATURE
        last = deltas[-1]
        assert last.stats
        return self._message(blocks, *self._reason(last), _usage(last.stats)) | self._notes(last)

    def _part(self, part: Part) -> bytes:
        match part:
            case Reasoning(text, _):
                return self._begin(part) + self._delta(type="thinking_delta", thinking=text)
            case Content(text, _):
                return self._begin(part) + self._delta(type="text_delta", text=text)
            case CallBegin():
                return self._close() + self._begin(part)
            case Args():
                return self._delta(type="input_json_delta", partial_json=part.json_text)
            case CallEnd():
                return self._close()

    def _begin(self, part: Part) -> bytes:
        if self._open == _kind(part):
            return b""
        closed = self._close()
        self._open, self._index = _kind(part), self._index + 1
        return closed + _event("content_block_start", index=self._index, content_block=_empty_block(part))

    def _delta(self, **delta: Any) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> bytes:
        was_open, self._open = self._open, None
        if was_open is None:
            return b""
        signature = self._delta(type="signature_delta", signature=SIGNATURE) if was_open == "thinking" else b""
        return signature + _event("content_block_stop", index=self._index)

    def _reason(self, last: AnswerDelta) -> tuple[str, str | None]:
        """Return the stop reason, and the stop sequence of the request that was found."""
        assert last.reason
        if last.stop in self._request.stops:  # templates have stop strings of their own
            return "stop_sequence", last.stop
        return REASONS.get(last.reason, last.reason), None

    def _notes(self, last: AnswerDelta) -> dict[str, Any]:
        dropped = self._request.dropped_tools
        notes = [*last.notes, *([f"ignored tools: {', '.join(dropped)}"] if dropped else [])]
        return {"edgelm": {"notes": notes}} if notes else {}

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, stop: str | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._context.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }


def _kind(part: Part) -> str | None:
    return {Reasoning: "thinking", Content: "text", CallBegin: "tool_use"}.get(type(part))


def _empty_block(part: Part) -> dict[str, Any]:
    match part:
        case Reasoning():
            return {"type": "thinking", "thinking": "", "signature": ""}
        case CallBegin():
            return {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
        case _:
            return {"type": "text", "text": ""}


def _usage(stats: Stats) -> dict[str, int]:
    return {
        "input_tokens": stats.prompt_tokens - stats.cached_tokens,  # without those of cached prefixes
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": stats.cached_tokens,
        "output_tokens": stats.completion_tokens,
    }


def _event(kind: str, **fields: Any) -> bytes:
    data = json.dumps({"type": kind, **fields}, ensure_ascii=False, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()
