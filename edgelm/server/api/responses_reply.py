"""The answer of POST /v1/responses: the response object, and the events of its stream in OpenAI's order.

Owns output items and events. An item is added before its deltas, and done before the next one.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from edgelm.engine.core import Sampled
from edgelm.jobs.request import AnswerDelta
from edgelm.server.api.arguments import custom_input
from edgelm.server.api.dialect import AnswerContext, Reply
from edgelm.server.api.errors import ApiError
from edgelm.server.api.fields import sampling_values
from edgelm.server.api.logprobs import FEW_TOKENS, each_logprobs
from edgelm.server.api.responses import CLIENT_TOOLS, ENCRYPTED, FunctionTool, ResponsesRequest, TextOptions, encoded
from edgelm.text.parse import Args, CallBegin, CallEnd, Content, Part, Reasoning

FUNCTION_KEYS = ("description", "parameters", "strict")
FORMAT_KEYS = ("name", "description", "schema", "strict")
MAX_HOSTED_LEN = 64 * 2**10  # characters, in a response, of the tools that only OpenAI runs
INCOMPLETE = {"length": "max_output_tokens", "context": "max_output_tokens"}


class ReasoningForm(NamedTuple):
    """Where an item shows its reasoning, and the names of the events."""

    key: str  # of the item: a list with one part
    part: str
    text_event: str
    part_event: str
    place: dict[str, int]


CONTENT = ReasoningForm("content", "reasoning_text", "reasoning_text", "content_part", {"content_index": 0})
SUMMARY = ReasoningForm(
    "summary", "summary_text", "reasoning_summary_text", "reasoning_summary_part", {"summary_index": 0}
)


def error_event(error: ApiError) -> bytes:
    """Return the event of a failure before the response began."""
    body = error.body["error"]
    failure = {"code": _failure_code(error), "message": str(error), "param": body["param"]}
    data = {"type": "error", "sequence_number": 0, **failure}
    return b"event: error\ndata: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


class ResponsesReply(Reply):
    """The response to one request."""

    def __init__(self, request: ResponsesRequest, context: AnswerContext) -> None:
        self._request = request
        self._context = context
        self._tools = {tool.shown_name: tool for tool in request.function_tools}
        self._shown_tools = _shown_tools(request.tools or ())
        self._id = f"resp_{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._sequence = 0
        # Clients that ask for summaries read the reasoning of a response nowhere else.
        summarized = request.reasoning is not None and request.reasoning.summary not in (None, "none")
        self._reasoning = SUMMARY if summarized else CONTENT
        self._items: list[dict[str, Any]] = []  # of the output; the last one may be open
        self._open = False
        self._arguments = ""  # of the open call
        self._streams = True
        # Tokens whose log-probabilities are shown: of the open message, and those whose text has not come yet.
        self._sampled: list[Sampled] = []
        self._part_samples: list[Sampled] = []
        # Their JSON, an entry a token, by the text in its place: four events repeat all of a message's.
        self._entries: dict[str, list[bytes]] = {}

    def opening(self) -> bytes:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def ping(self) -> bytes:
        """Return an event, as comments do not reset the clock of Codex; without the long fields of the request."""
        without: dict[str, Any] = {
            "instructions": None,
            "tools": [],
            "tool_choice": "auto",
            "metadata": {},
            "text": _shown_text(None),
        }
        return self._event("response.in_progress", response=self._response("in_progress") | without)

    def error(self, error: ApiError) -> bytes:
        closed = self._close("incomplete")
        failure = {"code": _failure_code(error), "message": str(error)}
        return closed + self._event("response.failed", response=self._response("failed") | {"error": failure})

    def delta(self, delta: AnswerDelta) -> bytes:
        if self._request.num_logprobs is not None:
            self._part_samples += delta.sampled
        events = b"".join(map(self._part, delta.parts))
        if delta.reason is None:
            return events
        events += self._close("completed" if delta.reason not in INCOMPLETE else "incomplete")
        response = self._final(delta)
        return events + self._event(f"response.{response['status']}", response=response)

    def whole(self, deltas: Sequence[AnswerDelta]) -> dict[str, Any]:
        self._streams = False
        for delta in deltas:
            self.delta(delta)
        return self._final(deltas[-1])

    def _part(self, part: Part) -> bytes:
        sampled, self._part_samples = self._part_samples, []  # those of other parts are not shown
        match part:
            case Reasoning(text, _):
                return self._begin("reasoning") + self._append_reasoning(text)
            case Content(text, _):
                return self._begin("message") + self._append_text(text, sampled)
            case CallBegin():
                return self._begin_call(part)
            case Args():
                self._arguments += part.json_text
                if self._items[-1]["type"] == "custom_tool_call":
                    return b""  # its text is known when the JSON around it is complete
                return self._item_event("response.function_call_arguments.delta", delta=part.json_text)
            case CallEnd():
                return self._close("completed")

    def _begin(self, kind: str) -> bytes:
        if self._open and self._items[-1]["type"] == kind:
            return b""
        closed = self._close("completed")
        part: dict[str, Any]
        if kind == "reasoning":
            added = self._add(
                {"type": "reasoning", "id": _new_id("rs"), "summary": [], "content": [], "status": "in_progress"}
            )
            form = self._reasoning
            part = {"type": form.part, "text": ""}
            return closed + added + self._item_event(f"response.{form.part_event}.added", part=part, **form.place)
        item = {"type": "message", "id": _new_id("msg"), "status": "in_progress", "role": "assistant", "content": []}
        added = self._add(item)
        self._sampled = []
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return closed + added + self._item_event("response.content_part.added", content_index=0, part=part)

    def _begin_call(self, call: CallBegin) -> bytes:
        closed = self._close("completed")
        tool = self._tools.get(call.name)
        custom = tool is not None and tool.custom
        item: dict[str, Any] = {
            "type": "custom_tool_call" if custom else "function_call",
            "id": _new_id("ctc" if custom else "fc"),
            "call_id": call.id,
            "name": call.name if tool is None else tool.name,
            ("input" if custom else "arguments"): "",
            "status": "in_progress",
        }
        self._arguments = ""
        return closed + self._add(item | _namespace(tool))

    def _append_reasoning(self, text: str) -> bytes:
        form = self._reasoning
        parts = self._items[-1][form.key]
        if not parts:
            parts.append({"type": form.part, "text": ""})
        parts[0]["text"] += text
        return self._item_event(f"response.{form.text_event}.delta", delta=text, **form.place)

    def _append_text(self, text: str, sampled: list[Sampled]) -> bytes:
        content = self._items[-1]["content"]
        if not content:
            content.append({"type": "output_text", "text": "", "annotations": [], "logprobs": []})
        content[0]["text"] += text
        self._sampled += sampled
        if not sampled or not self._streams:
            return self._item_event("response.output_text.delta", content_index=0, delta=text, logprobs=[])
        place = self._place
        written = self._entries.get(place, [])
        self._entries[place] = [_json(entry).encode() for entry in each_logprobs(self._context.tokenizer, sampled)]
        event = self._item_event("response.output_text.delta", content_index=0, delta=text, logprobs=place)
        self._entries[place] = [*written, *self._entries[place]]
        return event

    @property
    def _place(self) -> str:
        """Return the text in the place of the open message's log-probabilities; no other text has its random part."""
        return f"{self._items[-1]['id']}/logprobs"

    def _logprobs(self) -> str | list[Any] | Iterator[Any]:
        """Return what a document has for those of the open message; those of a large answer are an iterator."""
        if self._streams:
            return self._place if self._place in self._entries else []
        entries = each_logprobs(self._context.tokenizer, self._sampled)
        return entries if len(self._sampled) > FEW_TOKENS else [*entries]

    def _add(self, item: dict[str, Any]) -> bytes:
        self._items.append(item)
        self._open = True
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def _close(self, status: str) -> bytes:
        """Return the events that end the open item; nothing if none is open."""
        if not self._open:
            return b""
        self._open = False
        item = self._items[-1]
        events = b""
        match item["type"]:
            case "reasoning":
                form = self._reasoning
                part = item[form.key][0]
                text = part["text"]
                events = self._item_event(f"response.{form.text_event}.done", text=text, **form.place)
                events += self._item_event(f"response.{form.part_event}.done", part=part, **form.place)
                if ENCRYPTED in (self._request.include or ()):
                    item["encrypted_content"] = encoded(text)
            case "message":
                if self._place in self._entries:
                    self._entries[self._place] = [b",".join(self._entries[self._place])]
                part = item["content"][0] | {"logprobs": self._logprobs()}
                item["content"] = [part]
                events = self._item_event(
                    "response.output_text.done", content_index=0, text=part["text"], logprobs=part["logprobs"]
                ) + self._item_event("response.content_part.done", content_index=0, part=part)
            case "function_call":
                item["arguments"] = self._arguments
                events = self._item_event(
                    "response.function_call_arguments.done", arguments=self._arguments, name=item["name"]
                )
            case "custom_tool_call":
                item["input"] = text = custom_input(self._arguments)
                events = self._item_event("response.custom_tool_call_input.delta", delta=text)
                events += self._item_event("response.custom_tool_call_input.done", input=text)
        item["status"] = status
        return events + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _final(self, last: AnswerDelta) -> dict[str, Any]:
        assert last.reason
        reason = INCOMPLETE.get(last.reason)
        response = self._response("incomplete" if reason else "completed", last)
        dropped = self._request.dropped_tools
        notes = [*last.notes, *([f"ignored tools: {', '.join(dropped)}"] if dropped else [])]
        return response | ({"edgelm": {"notes": notes}} if notes else {})

    def _response(self, status: str, last: AnswerDelta | None = None) -> dict[str, Any]:
        request = self._request
        reasoning, given = request.reasoning, sampling_values(request)
        reason = INCOMPLETE.get(last.reason) if last and last.reason else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "incomplete_details": {"reason": reason} if reason else None,
            "model": self._context.model,
            "previous_response_id": request.previous_response_id,
            "instructions": request.instructions,
            "output": [] if status == "in_progress" else list(self._items),
            "error": None,
            "tools": self._shown_tools,
            "tool_choice": _shown_choice(request.tool_choice),
            "truncation": request.truncation or "disabled",
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "text": _shown_text(request.text),
            "top_p": given.get("top_p", 1.0),
            "presence_penalty": given.get("presence_penalty") or 0.0,
            "frequency_penalty": given.get("frequency_penalty") or 0.0,
            "top_logprobs": request.top_logprobs or 0,
            "temperature": given.get("temperature", 1.0),
            "reasoning": {"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
            "user": request.user,
            "usage": _usage(last) if last else None,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "store": request.store is not False,
            "background": False,
            "service_tier": "default",
            "metadata": request.metadata or {},
            "safety_identifier": request.safety_identifier,
            "prompt_cache_key": request.prompt_cache_key,
        }

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        if not self._streams:
            return b""
        data = _json({"type": kind, "sequence_number": self._sequence, **fields})
        event = f"event: {kind}\ndata: {data}\n\n".encode()
        for place, entries in self._entries.items():
            event = (b"[" + b",".join(entries) + b"]").join(event.split(f'"{place}"'.encode()))
        self._sequence += 1
        return event


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def _namespace(tool: FunctionTool | None) -> dict[str, str]:
    return {"namespace": tool.namespace} if tool and tool.namespace else {}


def _failure_code(error: ApiError) -> str:
    """Return the code of a failure in OpenAI's words, by which clients decide whether to retry."""
    if error.status == 429:
        return "rate_limit_exceeded"
    if error.status >= 500:
        return "server_error"
    return error.code if error.code == "context_length_exceeded" else "invalid_prompt"


def _with_nulls(value: dict[str, Any], keys: Sequence[str], kind: str) -> dict[str, Any]:
    """Return a tool or a format of the request with every key that clients require of its type."""
    return dict.fromkeys(keys) | value if value.get("type") == kind else value


def _shown_tools(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools of a request as the response shows them: those of OpenAI's servers while there is room."""
    shown = []
    room = MAX_HOSTED_LEN
    for tool in tools:
        if tool.get("type") not in CLIENT_TOOLS:
            room -= len(json.dumps(tool, ensure_ascii=False))
            if room < 0:
                continue
        shown.append(_with_nulls(tool, FUNCTION_KEYS, "function"))
    return shown


def _shown_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any]:
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return {"mode": "auto", **choice}
    return "auto" if choice is None else choice


def _shown_text(text: TextOptions | None) -> dict[str, Any]:
    shown = {"format": _with_nulls((text and text.format) or {"type": "text"}, FORMAT_KEYS, "json_schema")}
    return shown | ({"verbosity": text.verbosity} if text and text.verbosity else {})


def _usage(last: AnswerDelta) -> dict[str, Any]:
    stats = last.stats
    assert stats
    return {
        "input_tokens": stats.prompt_tokens,
        "input_tokens_details": {"cached_tokens": stats.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": stats.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": last.reasoning_tokens},
        "total_tokens": stats.prompt_tokens + stats.completion_tokens,
    }
