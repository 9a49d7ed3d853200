"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API. Its fields, its blocks as messages, its errors.

Owns names and types of the request; messages_reply.py has the answer. https://docs.anthropic.com/en/api/messages has
the format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from pydantic import Field

from edgelm.jobs.request import AnswerRequest, thinking_kwargs
from edgelm.server.api.errors import NO_RETRY, ApiError
from edgelm.server.api.fields import (
    Body,
    GrammarFields,
    KeepAliveFields,
    ModelName,
    SamplingFields,
    Stops,
    TextOrParts,
    schema_spec,
)
from edgelm.server.request_id import current_request_id, new_request_id
from edgelm.text.calls.format import ToolChoice
from edgelm.text.message_forms import content_of, picture_part

# Claude Code puts a line that changes with every request first, which no cached prefix would survive.
BILLING_HEADER = "x-anthropic-billing-header:"
OVERLOADED = 529  # Anthropic's own status
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    OVERLOADED: "overloaded_error",
}
PING = b'event: ping\ndata: {"type": "ping"}\n\n'
# Blocks of an assistant's turn that no template can show: calls of tools on Anthropic's servers, and their results.
HOSTED_BLOCKS = ("server_tool_use", "mcp_tool_use", "mcp_tool_listing", "container_upload", "compaction", "fallback")


class Thinking(Body):
    """Whether the model thinks, and for how many tokens at most."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1)


class Choice(Body):
    """Which tools the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Format(Body):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """Form and effort of the answer."""

    effort: str | None = None
    format: Format | None = None


class InputMessage(Body):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: TextOrParts


class MessagesRequest(GrammarFields, SamplingFields, KeepAliveFields):
    """The body of POST /v1/messages."""

    model: ModelName
    max_tokens: int | None = Field(default=None, ge=1)  # required for an answer, not for a count
    messages: list[InputMessage] = Field(min_length=1, fail_fast=True)
    system: TextOrParts | None = None
    stream: bool | None = None
    stop_sequences: Stops | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Format | None = None  # the name of `output_config.format` in the beta

    @property
    def streamed(self) -> bool:
        return bool(self.stream)

    @property
    def stops(self) -> tuple[str, ...]:
        return (*(self.stop_sequences or ()), *super().stops)

    @property
    def dropped_tools(self) -> list[str]:
        """The names of the tools that only Anthropic runs."""
        return [str(tool.get("name") or tool.get("type")) for tool in self.tools or () if not _is_ours(tool)]

    def answer_requests(self) -> list[AnswerRequest]:
        """Return the request in our words. Raises ApiError."""
        config = self.output_config or OutputConfig()
        form = config.format or self.output_format
        thinking = self.thinking or Thinking(type="adaptive")
        enabled = {"enabled": True, "disabled": False}.get(thinking.type)
        limit = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        tools = [_tool(tool, index) for index, tool in enumerate(self.tools or ()) if _is_ours(tool)]
        messages = list(_messages(self.messages))
        if self.messages[-1].role == "assistant" and "tool_calls" in messages[-1]:
            message = "messages: the last turn has a tool_use without its tool_result"
            raise ApiError(400, "invalid_value", message, param="messages")
        disabled = self.tool_choice and self.tool_choice.disable_parallel_tool_use
        request = AnswerRequest(
            messages=[*self._system(), *messages],
            tools=tools,
            tool_choice=self._choice({tool["function"]["name"] for tool in tools}),
            parallel_tool_calls=None if disabled is None else not disabled,
            grammar=self.grammar_spec("output_config.format", schema_spec(form.schema_) if form else None),
            template_kwargs=thinking_kwargs(config.effort, enabled),
            thinking_budget=thinking.budget_tokens if thinking.type == "enabled" else None,
            continues_last=self.messages[-1].role == "assistant",
            sampling=self.sampling() | limit,
            stop=self.stops,
        )
        return [request]

    def _system(self) -> list[dict[str, Any]]:
        if self.system is None:
            return []
        blocks = _blocks(self.system, "system")
        texts = [_text(block, f"system.{index}") for index, block in enumerate(blocks)]
        text = "\n\n".join(filter(None, map(_without_billing, texts)))
        return [{"role": "system", "content": text}] if text else []

    def _choice(self, names: set[str]) -> ToolChoice:
        choice = self.tool_choice
        if choice is None or choice.type == "auto":
            return ToolChoice()
        if choice.type == "tool":
            if choice.name not in names:
                message = f"tool_choice.name: {choice.name} is not among the tools"
                raise ApiError(400, "invalid_value", message, param="tool_choice.name")
            return ToolChoice("required", frozenset({choice.name}))
        return ToolChoice("none" if choice.type == "none" else "required")


def _without_billing(text: str) -> str:
    return text.partition("\n")[2].lstrip("\n") if text.startswith(BILLING_HEADER) else text


def _messages(messages: Sequence[InputMessage]) -> Iterator[dict[str, Any]]:
    """Yield OpenAI's messages. The tool results of a user's turn come before its text."""
    for index, message in enumerate(messages):
        where = f"messages.{index}.content"
        blocks = [(block, f"{where}.{at}") for at, block in enumerate(_blocks(message.content, where))]
        if message.role == "assistant":
            yield _assistant(blocks)
            continue
        rest = [(block, at) for block, at in blocks if block.get("type") != "tool_result"]
        for block, at in blocks:
            if block.get("type") == "tool_result":
                call_id = str(block.get("tool_use_id") or "")
                yield {"role": "tool", "tool_call_id": call_id, "content": _result(block, at)}
        if rest or not blocks:
            yield {"role": message.role, "content": _content(rest)}


def _content(blocks: Iterable[tuple[dict[str, Any], str]]) -> str | list[dict[str, Any]]:
    """Return blocks as one text, or as texts and pictures. Raises ApiError."""
    parts: list[str | dict[str, Any]] = []
    for block, where in blocks:
        part = _picture(block) or _text(block, where)
        if isinstance(part, str) and parts and isinstance(parts[-1], str):
            parts[-1] = f"{parts[-1]}\n\n{part}"
        else:
            parts.append(part)
    return content_of(parts or [""])


def _picture(block: dict[str, Any]) -> dict[str, Any] | None:
    match block:
        case {"type": "image", "source": {"type": "base64", "data": str(data), **more}}:
            return picture_part(f"data:{more.get('media_type', '')};base64,{data}")
        case {"type": "image", "source": {"type": "url", "url": str(url)}}:
            return picture_part(url)
    return None


def _result(block: dict[str, Any], where: str) -> str | list[dict[str, Any]]:
    """Return the content of a tool's result. Templates have no field for a failure, so its text says so."""
    parts = _blocks(block.get("content") or "", f"{where}.content")
    content = _content((part, f"{where}.content.{index}") for index, part in enumerate(parts))
    if not block.get("is_error") or not isinstance(content, str) or content.lower().startswith("error"):
        return content
    return f"Error: {content}" if content else "Error"


def _assistant(blocks: list[tuple[dict[str, Any], str]]) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for block, where in blocks:
        match block.get("type"):
            case "thinking":
                thoughts.append(str(block.get("thinking") or ""))
            case "redacted_thinking":
                pass  # of another provider: only it can read it
            case "tool_use":
                arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
                function = {"name": str(block.get("name") or ""), "arguments": arguments}
                calls.append({"id": str(block.get("id") or ""), "type": "function", "function": function})
            case str(kind) if kind in HOSTED_BLOCKS or kind.endswith("_tool_result"):
                pass
            case _:
                texts.append(_text(block, where))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _blocks(content: object, where: str) -> list[dict[str, Any]]:
    """Return content as a list of blocks. Raises ApiError."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list):
        for index, block in enumerate(content):
            if not isinstance(block, dict):
                raise ApiError(400, "invalid_type", f"{where}.{index} is not a block", param=f"{where}.{index}")
        return content
    raise ApiError(400, "invalid_type", f"{where} is neither a text nor a list of blocks", param=where)


def _text(block: dict[str, Any], where: str) -> str:
    """Return the text of a block. Raises ApiError for a block that a model of text cannot read."""
    match block:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "search_result", "content": list(parts)}:
            return _joined(parts)
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            return _titled(block, text)
        case {"type": "document", "source": {"type": "content", "content": str(text)}}:
            return _titled(block, text)
        case {"type": "document", "source": {"type": "content", "content": list(parts)}} if all(map(_is_text, parts)):
            return _titled(block, _joined(parts))
        case {"type": "tool_reference", "tool_name": str(name)}:
            return name
        case {"type": "image" | "document" as kind}:
            message = f"{where}: {'an' if kind == 'image' else 'a'} {kind} of this form is not read here"
            raise ApiError(400, "unsupported_content", message, param=where)
    kind = str(block.get("type"))[:40]
    raise ApiError(400, "invalid_type", f"{where}: blocks of type {kind!r} are not supported", param=where)


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text"


def _joined(parts: Sequence[object]) -> str:
    return "\n".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))


def _titled(block: dict[str, Any], text: str) -> str:
    title = block.get("title")
    return f"{title}\n{text}" if isinstance(title, str) and title else text


def _is_ours(tool: dict[str, Any]) -> bool:
    """Tell whether the client runs a tool; those of other types run on Anthropic's servers, and are dropped."""
    return tool.get("type") in (None, "custom") or "input_schema" in tool


def _tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    name, schema = tool.get("name"), tool.get("input_schema", {"type": "object"})
    if not isinstance(name, str) or not name or not isinstance(schema, dict):
        raise ApiError(400, "invalid_type", f"tools.{index} has no name or no input_schema", param=f"tools.{index}")
    function = {"name": name, "description": str(tool.get("description") or ""), "parameters": schema}
    return {"type": "function", "function": function | ({"strict": True} if tool.get("strict") is True else {})}


def error_body(error: ApiError) -> dict[str, Any]:
    """Return an error in Anthropic's form."""
    kind = ERROR_TYPES.get(error_status(error), "invalid_request_error" if error.status < 500 else "api_error")
    message = str(error)
    if error.code == "context_length_exceeded":
        message = f"Prompt is too long: {message}"  # clients shorten the conversation on these words
    body = {"type": "error", "error": {"type": kind, "message": message}}
    return body | {"request_id": current_request_id() or new_request_id()}


def error_status(error: ApiError) -> int:
    """Return the status of an error: Anthropic has no 503."""
    if error.status != 503:
        return error.status
    return 500 if NO_RETRY.items() <= error.headers.items() else OVERLOADED


def error_event(error: ApiError) -> bytes:
    """Return an error as an event."""
    return b"event: error\ndata: " + json.dumps(error_body(error), ensure_ascii=False).encode() + b"\n\n"
