"""The fields of POST /v1/chat/completions, OpenAI's API for conversations, and their meaning in our words.

Knows nothing of HTTP and of the engine. The answer is in chat_reply.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field

from edgelm.base.sampling import MAX_LOGPROBS
from edgelm.jobs.request import AnswerRequest, thinking_kwargs
from edgelm.server.api.arguments import CUSTOM_INPUT
from edgelm.server.api.chat_reply import ReplyOptions
from edgelm.server.api.errors import ApiError
from edgelm.server.api.fields import (
    MAX_CHOICES,
    Body,
    GrammarFields,
    KeepAliveFields,
    ModelName,
    SamplingFields,
    StreamOptions,
    TextOrParts,
)
from edgelm.text.calls.format import ToolChoice
from edgelm.text.message_forms import content_of, picture_part


class Message(Body):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: TextOrParts | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: dict[str, Any] | None = None  # OpenAI's older form of one call

    def for_template(self, where: str) -> dict[str, Any]:
        """Return the message in the form that chat templates expect. Raises ApiError."""
        content, thoughts = self.content, ""
        if isinstance(content, list):
            parts = []
            for index, part in enumerate(content):
                thought = _thought(part) if self.role == "assistant" else None
                thoughts += thought or ""
                if thought is None:
                    parts.append(_part(part, f"{where}.content.{index}"))
            content = content_of(parts)
        message: dict[str, Any] = {"role": self.role, "content": content}
        for name in ("name", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if reasoning := self.reasoning_content or self.reasoning or thoughts:
            message["reasoning_content"] = reasoning
        calls = [_call(call, f"{where}.tool_calls.{index}") for index, call in enumerate(self.tool_calls or ())]
        if self.function_call:
            calls.append(
                _call({"type": "function", "id": "", "function": self.function_call}, f"{where}.function_call")
            )
        if calls:
            message["tool_calls"] = calls
        if self.role == "function":
            message |= {"role": "tool", "tool_call_id": ""}
        return message


class OwnFields(Body):
    """Our own fields."""

    past: list[Message] | None = Field(
        default=None, fail_fast=True
    )  # the conversation before `messages`, used for drafting only


class ChatRequest(GrammarFields, SamplingFields, KeepAliveFields):
    """A conversation, and the sampling of its next turn."""

    model: ModelName
    messages: list[Message] = Field(min_length=1, fail_fast=True)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None  # OpenAI's older form of tools
    function_call: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    reasoning_budget: int | None = Field(default=None, ge=0)
    thinking_budget_tokens: int | None = Field(default=None, ge=0)
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    prediction: dict[str, Any] | None = None
    edgelm: OwnFields | None = None

    @property
    def streamed(self) -> bool:
        return bool(self.stream)

    def answer_requests(self) -> list[AnswerRequest]:
        """Return the request in our words. Raises ApiError."""
        self._check_together()
        sampling = self.sampling()
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if limit is not None:
            sampling["max_tokens"] = limit
        if self.logprobs:
            sampling["num_logprobs"] = self.top_logprobs or 0
        kwargs = thinking_kwargs(self.reasoning_effort, self.enable_thinking) | (self.chat_template_kwargs or {})
        past = (self.edgelm and self.edgelm.past) or []
        tools = list(self._tools())
        choice = self.function_call if self.tool_choice is None else self.tool_choice
        request = AnswerRequest(
            messages=[message.for_template(f"messages.{at}") for at, message in enumerate(self.messages)],
            tools=tools,
            tool_choice=_tool_choice(choice, [tool["function"]["name"] for tool in tools]),
            parallel_tool_calls=False if self.functions else self.parallel_tool_calls,
            grammar=self.grammar_spec(),
            template_kwargs=kwargs,
            thinking_budget=self.thinking_budget_tokens if self.reasoning_budget is None else self.reasoning_budget,
            continues_last=bool(self.continue_final_message),
            sampling=sampling,
            stop=self.stops,
            num_choices=self.n or 1,
            past=[message.for_template(f"edgelm.past.{at}") for at, message in enumerate(past)],
            prediction=self._prediction(),
        )
        return [request]

    def reply_options(self) -> ReplyOptions:
        return ReplyOptions(
            num_choices=self.n or 1,
            has_logprobs=bool(self.logprobs),
            includes_usage=bool(self.stream_options and self.stream_options.include_usage),
            custom_tools=frozenset(tool["custom"]["name"] for tool in self.tools or () if tool["type"] == "custom"),
            has_functions=bool(self.functions) and not self.tools,
            has_prediction=bool(self._prediction()),
        )

    def _tools(self) -> Iterator[dict[str, Any]]:
        given = [(f"tools.{index}", tool) for index, tool in enumerate(self.tools or ())]
        given += [
            (f"functions.{index}", {"type": "function", "function": function})
            for index, function in enumerate(self.functions or ())
        ]
        for where, tool in given:
            match tool:
                case {"type": "function", "function": {"name": str(name)}} if name:
                    function = tool["function"]
                    if not isinstance(function.get("parameters"), dict):
                        function = function | {"parameters": {"type": "object", "properties": {}}}
                    yield {"type": "function", "function": function}
                case {"type": "custom", "custom": {"name": str(name)}} if name:
                    text = {"type": "string", "description": "The input of the tool, as plain text"}
                    schema = {"type": "object", "properties": {CUSTOM_INPUT: text}, "required": [CUSTOM_INPUT]}
                    description = str(tool["custom"].get("description") or "")
                    function = {"name": name, "description": description, "parameters": schema}
                    yield {"type": "function", "function": function}
                case _:
                    raise ApiError(400, "invalid_type", f"{where} is not a function with a name", param=where)

    def _prediction(self) -> str:
        match self.prediction:
            case {"content": str(text)}:
                return text
            case {"content": list(parts)}:
                return "".join(_text(part, f"prediction.content.{index}") for index, part in enumerate(parts))
        return ""

    def _check_together(self) -> None:
        """Refuse fields that contradict each other."""
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "invalid_value", "top_logprobs needs logprobs to be true", param="top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt are both true: omit one"
            raise ApiError(400, "invalid_value", message, param="add_generation_prompt")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            message = "continue_final_message needs an assistant's message at the end"
            raise ApiError(400, "invalid_value", message, param="continue_final_message")


def _tool_choice(choice: str | dict[str, Any] | None, known: Sequence[str]) -> ToolChoice:
    match choice:
        case None | "auto":
            return ToolChoice()
        case "none":
            return ToolChoice("none")
        case "required":
            return ToolChoice("required")
        case {"type": "function", "function": {"name": str(name)}} | {"type": "custom", "custom": {"name": str(name)}}:
            return ToolChoice("required", frozenset({name}))
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)}}:
            functions = [tool.get("function") or tool.get("custom") for tool in tools if isinstance(tool, dict)]
            names = [
                str(function["name"]) for function in functions if isinstance(function, dict) and "name" in function
            ]
            if unknown := sorted(set(names).difference(known)):
                message = f"tool_choice allows a tool that is not among the tools: {unknown[0]}"
                raise ApiError(400, "invalid_value", message, param="tool_choice")
            if len(names) == len(tools):
                return ToolChoice(mode, frozenset(names))
        case {"name": str(name)}:
            return ToolChoice("required", frozenset({name}))
    raise ApiError(400, "invalid_value", "tool_choice is not one of the known forms", param="tool_choice")


def _thought(part: object) -> str | None:
    """Return the text of a part that is reasoning, as LiteLLM writes that of a message with calls; None: it is none."""
    match part:
        case {"type": "thinking", "thinking": str(text)} | {"type": "reasoning", "text": str(text)}:
            return text
        case {"type": "thinking" | "reasoning" | "redacted_thinking"}:
            return ""
    return None


def _part(part: object, where: str) -> str | dict[str, Any]:
    """Return the text of a part, or the picture. Raises ApiError for one that no model reads here."""
    match part:
        case {"type": "image_url", "image_url": {"url": str(url)}}:
            return picture_part(url)
        case {"type": "image_url" | "input_image", "image_url": str(url)}:
            return picture_part(url)
    return _text(part, where)


def _text(part: object, where: str) -> str:
    """Return the text of a part. Raises ApiError for another part."""
    match part:
        case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
            return text
        case {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": "image_url" | "input_image" | "image" | "input_audio" | "file" | "video_url" as kind}:
            message = f"{where}: a part of type {kind} is not read here, or has another form"
            raise ApiError(400, "unsupported_content", message, param=where)
    raise ApiError(400, "invalid_type", f"{where} is not a part of text", param=where)


def _call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a call of the history as a function's."""
    match call:
        case {"type": "custom", "custom": {"name": str(name), "input": str(text)}}:
            function = {"name": name, "arguments": json.dumps({CUSTOM_INPUT: text}, ensure_ascii=False)}
        case {"function": {"name": str(name)}}:
            arguments = call["function"].get("arguments")
            function = {"name": name, "arguments": "{}" if arguments in (None, "") else arguments}
        case _:
            raise ApiError(400, "invalid_type", f"{where} is not a call with a name", param=where)
    return {"id": str(call.get("id") or ""), "type": "function", "function": function}
