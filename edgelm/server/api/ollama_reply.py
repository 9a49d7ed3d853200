"""The answers of Ollama's API: lines of JSON, or one object; the last one has the counts and the times.

Owns names and units of the fields. Calls are sent whole.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from edgelm.jobs.request import AnswerDelta
from edgelm.server.api.arguments import read_arguments
from edgelm.server.api.dialect import AnswerContext, Reply
from edgelm.server.api.errors import ApiError
from edgelm.server.api.logprobs import chat_logprobs
from edgelm.server.api.ollama import OllamaChatRequest, OllamaRequest, error_event, line
from edgelm.text.parse import Args, CallBegin, CallEnd, Part

NS_OF_MS = 1e6


class OllamaReply(Reply):
    """The answer to one request."""

    def __init__(self, request: OllamaRequest, context: AnswerContext) -> None:
        self._request = request
        self._context = context
        self._began = time.monotonic()
        self._calls: list[tuple[CallBegin, list[str]]] = []  # with their arguments so far
        self._num_calls = 0  # complete calls

    def ping(self) -> bytes:
        return line(self._object(self._message("", "", [])))

    def error(self, error: ApiError) -> bytes:
        return error_event(error)

    def delta(self, delta: AnswerDelta) -> bytes:
        shown = self._shown(delta.text, delta.reasoning, delta.parts, [delta])
        lines = line(self._object(shown)) if shown else b""
        return lines + line(self._object(self._message("", "", [])) | self._end(delta)) if delta.reason else lines

    def whole(self, deltas: Sequence[AnswerDelta]) -> dict[str, Any]:
        text, thinking = ("".join(getattr(delta, name) for delta in deltas) for name in ("text", "reasoning"))
        parts = [part for delta in deltas for part in delta.parts]
        shown = self._shown(text, thinking, parts, deltas) or self._message("", "", [])
        return self._object(shown) | self._end(deltas[-1])

    def _shown(
        self, text: str, thinking: str, parts: Sequence[Part], deltas: Sequence[AnswerDelta]
    ) -> dict[str, Any] | None:
        """Return the message of some deltas; None: there is nothing to show."""
        calls = self._complete_calls(parts)
        sampled = [sample for delta in deltas for sample in delta.sampled]
        logprobs = chat_logprobs(self._context.tokenizer, sampled) if self._request.logprobs else []
        if not (text or thinking or calls or logprobs):
            return None
        return self._message(text, thinking, calls) | ({"logprobs": logprobs} if logprobs else {})

    def _complete_calls(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """Return the calls that end with these parts; one that is cut off is no call."""
        complete = []
        for part in parts:
            match part:
                case CallBegin():
                    self._calls.append((part, []))
                case Args():
                    self._calls[-1][1].append(part.json_text)
                case CallEnd():
                    begin, texts = self._calls[-1]
                    arguments = read_arguments("".join(texts)) or {}
                    function = {"index": self._num_calls, "name": begin.name, "arguments": arguments}
                    complete.append({"id": begin.id, "function": function})
                    self._num_calls += 1
        return complete

    def _message(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        thoughts = {"thinking": thinking} if thinking else {}
        if not isinstance(self._request, OllamaChatRequest):
            return {"response": text, **thoughts}
        return {
            "message": {"role": "assistant", "content": text, **thoughts, **({"tool_calls": calls} if calls else {})}
        }

    def _object(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"model": self._context.model, "created_at": timestamp(), **fields, "done": False}

    def _end(self, last: AnswerDelta) -> dict[str, Any]:
        assert last.stats
        stats = last.stats
        return {
            "done": True,
            "done_reason": "length" if last.reason in ("length", "context") else "stop",
            "total_duration": round((time.monotonic() - self._began) * 1e9),
            "load_duration": 0,  # loading has ended before the answer begins
            "prompt_eval_count": stats.prompt_tokens,
            "prompt_eval_duration": round(stats.prompt_ms * NS_OF_MS),
            "eval_count": stats.completion_tokens,
            "eval_duration": round(stats.decode_ms * NS_OF_MS),
            **self._notes(last),
        }

    def _notes(self, last: AnswerDelta) -> dict[str, Any]:
        notes, context, asked = [*last.notes], self._context.executor.context, self._request.options.num_ctx
        if asked is not None and asked > context:
            notes.append(f"num_ctx is {asked:,}, and the context holds {context:,} tokens: start edgelm with --ctx")
        return {"edgelm": {"notes": notes}} if notes else {}


def loaded_reply(request: OllamaRequest, reason: str) -> dict[str, Any]:
    """Return the answer to a request that has only loaded or unloaded its model."""
    is_chat = isinstance(request, OllamaChatRequest)
    empty: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    return {"model": request.model, "created_at": timestamp(), **empty, "done": True, "done_reason": reason}


def timestamp(seconds: float | None = None) -> str:
    """Return a time as Ollama writes it; None: now."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
