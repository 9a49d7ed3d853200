"""POST /v1/responses: OpenAI's newer API. Its fields, and its input items as messages.

Owns names and types of the request; responses_reply.py has the answer. Knows nothing of stored responses: the front has
put the items of `previous_response_id` into `input`.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from edgelm.base.sampling import MAX_LOGPROBS
from edgelm.base.workers.grammars import GrammarSpec
from edgelm.jobs.request import AnswerRequest, thinking_kwargs
from edgelm.server.api.arguments import CUSTOM_INPUT
from edgelm.server.api.errors import ApiError
from edgelm.server.api.fields import (
    Body,
    GrammarFields,
    KeepAliveFields,
    ModelName,
    SamplingFields,
    TextOrParts,
    schema_spec,
)
from edgelm.text.calls.format import ToolChoice
from edgelm.text.message_forms import content_of, picture_part

REASONING_PREFIX = "edgelm:"  # of our `encrypted_content`, which is plain base64: the text never leaves the machine
ENCRYPTED = "reasoning.encrypted_content"  # in `include`
LOGPROBS = "message.output_text.logprobs"  # in `include`
REFERENCE = "item_reference"  # the front puts stored items in place of these
CLIENT_TOOLS = ("function", "custom", "namespace")
MAX_METADATA = (16, 64, 512)  # keys, characters of a key and of a value
# Input items that no template can show, as are the calls of hosted tools.
SKIPPED = (
    *("compaction", "compaction_trigger", "context_compaction", "configuration_update", "program", "program_output"),
)
SKIPPED_ENDINGS = ("_call", "_call_output", "_search_output", "_tools", "_request", "_response")

UNREADABLE = "[encrypted by another provider, which alone can read it]"

Name = Annotated[str, StringConstraints(max_length=512)]  # each event that shows the response repeats it


class ReasoningOptions(Body):
    """How long the model thinks."""

    effort: Name | None = None
    summary: Name | None = None


class TextOptions(Body):
    """The form of the answer."""

    format: dict[str, Any] | None = None
    verbosity: Name | None = None


class ResponsesRequest(GrammarFields, SamplingFields, KeepAliveFields):
    """The body of POST /v1/responses."""

    model: ModelName
    input: TextOrParts
    instructions: str | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    include: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    max_output_tokens: int | None = Field(default=None, ge=1)
    truncation: Name | None = None
    metadata: dict[str, str] | None = None
    user: Name | None = None
    prompt_cache_key: Name | None = None
    safety_identifier: Name | None = None
    service_tier: Name | None = None

    @property
    def streamed(self) -> bool:
        return bool(self.stream)

    @property
    def function_tools(self) -> list[FunctionTool]:
        """The tools that the client runs; those of OpenAI's servers are dropped. Raises ApiError."""
        tools = list(_function_tools(self.tools or (), "tools", ""))
        uses = Counter(tool.name for tool in tools)
        return [tool if uses[tool.name] == 1 else tool.with_long_name() for tool in tools]

    @property
    def dropped_tools(self) -> list[str]:
        """The types of the tools that only OpenAI runs."""
        return sorted({str(tool.get("type")) for tool in self.tools or ()} - set(CLIENT_TOOLS))

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives of each token are returned; None: no log-probability at all."""
        return self.top_logprobs if self.top_logprobs or LOGPROBS not in (self.include or ()) else 0

    def answer_requests(self) -> list[AnswerRequest]:
        """Return the request in our words. Raises ApiError."""
        _check_metadata(self.metadata or {})
        limits = {"max_tokens": self.max_output_tokens, "num_logprobs": self.num_logprobs}
        kwargs = thinking_kwargs(self.reasoning.effort if self.reasoning else None, None)
        tools = self.function_tools
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        messages = list(_messages(items, {(tool.namespace, tool.name): tool.shown_name for tool in tools}))
        if not messages:
            raise ApiError(400, "invalid_value", "input has no message", param="input")
        request = AnswerRequest(
            messages=[*system, *messages],
            tools=[tool.definition for tool in tools],
            tool_choice=_tool_choice(self.tool_choice, tools),
            parallel_tool_calls=self.parallel_tool_calls,
            grammar=self.grammar_spec("text.format", _text_format(self.text)),
            template_kwargs=kwargs | (self.chat_template_kwargs or {}),
            sampling=self.sampling() | {name: value for name, value in limits.items() if value is not None},
            stop=self.stops,
        )
        return [request]


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """A tool that the client runs, as a function."""

    definition: dict[str, Any]  # in the form of chat completions
    name: str  # as the client knows it
    custom: bool = False  # its only parameter is a text
    namespace: str = ""

    @property
    def shown_name(self) -> str:
        """The name that the model sees."""
        name: str = self.definition["function"]["name"]
        return name

    def with_long_name(self) -> FunctionTool:
        """Return the tool under a name that differs from those of other namespaces."""
        if not self.namespace:
            return self
        function = {**self.definition["function"], "name": f"{self.namespace}__{self.name}"}
        return replace(self, definition={"type": "function", "function": function})


def _function_tools(tools: Sequence[dict[str, Any]], where: str, namespace: str) -> Iterator[FunctionTool]:
    for index, tool in enumerate(tools):
        kind, name, param = tool.get("type"), tool.get("name"), f"{where}.{index}"
        if kind not in CLIENT_TOOLS:
            continue  # a hosted tool: its server is not here
        if not isinstance(name, str) or not name:
            raise ApiError(400, "invalid_type", f"{param}.name is missing", param=f"{param}.name")
        if kind == "namespace":
            nested = tool.get("tools")
            nested = [entry for entry in nested if isinstance(entry, dict)] if isinstance(nested, list) else []
            yield from _function_tools(nested, f"{param}.tools", name)
            continue
        function: dict[str, Any] = {"name": name, "description": str(tool.get("description") or "")}
        if kind == "custom":
            text = {"type": "string", "description": "The input of the tool, as plain text"}
            function["parameters"] = {"type": "object", "properties": {CUSTOM_INPUT: text}, "required": [CUSTOM_INPUT]}
        else:
            function["parameters"] = tool.get("parameters") or {"type": "object", "properties": {}}
            if not isinstance(function["parameters"], dict):
                message = f"{param}.parameters is not a JSON schema"
                raise ApiError(400, "invalid_type", message, param=f"{param}.parameters")
            if tool.get("strict") is True:
                function["strict"] = True
        yield FunctionTool({"type": "function", "function": function}, name, kind == "custom", namespace)


def _tool_choice(choice: str | dict[str, Any] | None, tools: Sequence[FunctionTool]) -> ToolChoice:
    match choice:
        case None | "auto":
            return ToolChoice()
        case "none":
            return ToolChoice("none")
        case "required":
            return ToolChoice("required")
        case {"type": "function" | "custom", "name": str(name)}:
            return ToolChoice("required", _shown_names([name], tools))
        case {"type": "allowed_tools", "tools": list(allowed), **more} if more.get("mode", "auto") in (
            "auto",
            "required",
        ):
            names = [str(tool.get("name")) for tool in allowed if isinstance(tool, dict)]
            mode: Literal["auto", "required"] = "required" if more.get("mode") == "required" else "auto"
            return ToolChoice(mode, _shown_names(names, tools))
    raise ApiError(400, "invalid_value", "tool_choice is not one of the known forms", param="tool_choice")


def _shown_names(names: Sequence[str], tools: Sequence[FunctionTool]) -> frozenset[str]:
    chosen = set(names)
    shown = frozenset(tool.shown_name for tool in tools if tool.name in chosen)
    if not shown:
        message = f"tool_choice names no function of tools: {', '.join(names)[:100]}"
        raise ApiError(400, "invalid_value", message, param="tool_choice")
    return shown


def _check_metadata(metadata: Mapping[str, str]) -> None:
    """Raise ApiError for metadata beyond OpenAI's limits."""
    num, key_len, value_len = MAX_METADATA
    if len(metadata) > num or any(len(key) > key_len or len(value) > value_len for key, value in metadata.items()):
        message = f"metadata has at most {num} keys of {key_len} characters, with values of {value_len}"
        raise ApiError(400, "invalid_value", message, param="metadata")


def _text_format(text: TextOptions | None) -> GrammarSpec | None:
    match text and text.format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return GrammarSpec("json_object")
        case {"type": "json_schema", "schema": dict(schema), **more}:
            return schema_spec(schema, strict=more.get("strict") is not False)
    raise ApiError(400, "invalid_value", "text.format is not text, json_object or json_schema", param="text.format")


def _messages(items: Sequence[dict[str, Any]], shown_names: Mapping[tuple[str, str], str]) -> Iterator[dict[str, Any]]:
    """Yield messages in the form of chat completions: reasoning, text and calls of one turn become one message."""
    turn: dict[str, Any] = {}
    for index, item in enumerate(items):
        where = f"input.{index}"
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind in ("reasoning", "function_call", "custom_tool_call") or (
            kind == "message" and item.get("role") == "assistant"
        ):
            if turn and (kind == "reasoning" or (kind == "message" and ("content" in turn or "tool_calls" in turn))):
                yield _assistant(turn)
                turn = {}
            _extend(turn, item, kind, where, shown_names)
        elif kind == "message":
            yield from _finished_turn(turn)
            turn = {}
            if item.get("role") not in ("user", "system", "developer"):
                raise ApiError(400, "invalid_value", f"{where}.role is not known", param=f"{where}.role")
            yield {"role": item["role"], "content": _text(item.get("content"), f"{where}.content")}
        elif kind in ("function_call_output", "custom_tool_call_output"):
            yield from _finished_turn(turn)
            turn = {}
            output = _text(_given(item, "output"), f"{where}.output")
            yield {"role": "tool", "tool_call_id": str(item.get("call_id") or ""), "content": output}
        elif kind == "agent_message":  # of one of Codex's agents to another
            yield from _finished_turn(turn)
            turn = {}
            yield {"role": "user", "content": _agent_message(item, f"{where}.content")}
        elif not isinstance(kind, str):
            raise ApiError(400, "invalid_type", f"{where}.type is missing", param=f"{where}.type")
        elif kind not in SKIPPED and not kind.endswith(SKIPPED_ENDINGS):
            raise ApiError(400, "invalid_value", f"{where}: items of type {kind[:40]!r} are not supported", param=where)
    yield from _finished_turn(turn)


def _agent_message(item: dict[str, Any], where: str) -> str | list[dict[str, Any]]:
    """Return the content of an agent's message, behind a line that says whose it is."""
    content = item.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    ends = [f"{word} {name}" for word in ("author", "recipient") if isinstance(name := item.get(word), str) and name]
    heading = f"Message of another agent ({', '.join(ends)}):" if ends else "Message of another agent:"
    return _text([{"type": "text", "text": heading + "\n"}, *(parts if isinstance(parts, list) else ())], where)


def _finished_turn(turn: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if turn:
        yield _assistant(turn)


def _assistant(turn: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", **turn}


def _extend(
    turn: dict[str, Any], item: dict[str, Any], kind: str, where: str, shown_names: Mapping[tuple[str, str], str]
) -> None:
    """Add an item of the model to its turn."""
    if kind == "message":
        turn["content"] = _text(_given(item, "content"), f"{where}.content")
    elif kind == "reasoning":
        if text := _reasoning(item):
            turn["reasoning_content"] = text
    else:
        name = str(item.get("name") or "")
        name = shown_names.get((str(item.get("namespace") or ""), name), name)
        arguments = item.get("arguments")
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        if kind == "custom_tool_call":
            arguments = json.dumps({CUSTOM_INPUT: item.get("input")}, ensure_ascii=False)
        function = {"name": name, "arguments": arguments if isinstance(arguments, str) else "{}"}
        calls = turn.setdefault("tool_calls", [])
        calls.append({"id": str(item.get("call_id") or ""), "type": "function", "function": function})


def _reasoning(item: dict[str, Any]) -> str:
    """Return the text of a reasoning item: its own, or that of our `encrypted_content`, or its summary."""
    for name in ("content", "summary"):
        parts = item.get(name)
        if isinstance(parts, list) and (
            text := "".join(str(p.get("text") or "") for p in parts if isinstance(p, dict))
        ):
            return text
        if name == "content" and (text := _decoded(item.get("encrypted_content"))):
            return text
    return ""


def encoded(reasoning: str) -> str:
    """Return reasoning as `encrypted_content`, for clients that keep the conversation themselves."""
    return base64.b64encode((REASONING_PREFIX + reasoning).encode()).decode()


def _decoded(content: object) -> str:
    if not isinstance(content, str):
        return ""
    try:
        text = base64.b64decode(content, validate=True).decode()
    except ValueError:
        return ""  # another provider's: only it can read it
    return text.removeprefix(REASONING_PREFIX) if text.startswith(REASONING_PREFIX) else ""


def _given(item: dict[str, Any], name: str) -> object:
    """Return a text of the model or of a tool, of which some clients write null."""
    return "" if name in item and item[name] is None else item.get(name)


def _text(content: object, where: str) -> str | list[dict[str, Any]]:
    """Return content as text or parts. Raises ApiError for parts that no model reads here."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, "invalid_type", f"{where} is neither a text nor a list of parts", param=where)
    return content_of([_part(part, f"{where}.{index}") for index, part in enumerate(content)])


def _part(part: object, where: str) -> str | dict[str, Any]:
    match part:
        case {"type": "input_image", "image_url": str(url)}:
            return picture_part(url)
        case {"type": "input_text" | "output_text" | "text" | "summary_text" | "reasoning_text", "text": str(text)}:
            return text
        case {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": "encrypted_content"}:
            return UNREADABLE
        case {"type": "input_image" | "input_file" | "input_audio" as kind}:
            message = f"{where}: an {kind} is not read here, or has another form"
            raise ApiError(400, "unsupported_content", message, param=where)
    raise ApiError(400, "invalid_type", f"{where} is not a part of text", param=where)
