"""POST /api/chat, /api/generate and /api/embed: Ollama's API. Its fields, its messages as OpenAI's, its errors.

Owns names and types of the requests; ollama_reply.py has the answers. https://docs.ollama.com/api has the format.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from edgelm.base.sampling import MAX_LOGPROBS, SAMPLING
from edgelm.base.workers.grammars import GrammarSpec
from edgelm.jobs.request import AnswerRequest, thinking_kwargs
from edgelm.server.api.errors import ApiError
from edgelm.server.api.field_table import OLLAMA_OPTIONS
from edgelm.server.api.fields import Body, GrammarFields, KeepAliveFields, ModelName, SamplingFields, schema_spec
from edgelm.server.api.sentinels import without_sentinels
from edgelm.text.message_forms import content_of, picture_part

PING = b" "  # before a line of JSON, it is part of that line
_WHOLE = ("num_predict", "num_ctx", "seed", *(name for name, param in SAMPLING.items() if param.kind is int))


class Options(SamplingFields):
    """How tokens are chosen, by Ollama's names."""

    num_predict: int | None = None  # 0 or less: where the model ends
    num_ctx: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        """Read whole numbers written as 3.0, and a negative seed as none, as Ollama does. Raises ApiError."""
        if not isinstance(data, dict):
            return data
        OLLAMA_OPTIONS.check(data)
        given = dict(without_sentinels(data))
        for name in _WHOLE:
            value = given.get(name)
            if isinstance(value, float) and value.is_integer():
                given[name] = int(value)
        if isinstance(given.get("seed"), int) and given["seed"] < 0:
            del given["seed"]
        return given

    def sampling(self) -> dict[str, Any]:
        values = super().sampling()
        if self.num_predict is not None and self.num_predict > 0:
            values["max_tokens"] = self.num_predict
        return values


class Function(Body):
    """The function of a call."""

    name: str = Field(min_length=1)
    arguments: dict[str, Any] | None = None


class Call(Body):
    """A call of the history."""

    id: str | None = None
    function: Function


class Message(Body):
    """One turn of the conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[Call] | None = None
    tool_name: str | None = None
    name: str | None = None
    tool_call_id: str | None = None


class OllamaRequest(GrammarFields, SamplingFields, KeepAliveFields):
    """The fields that both ways to ask have. Those of sampling belong into `options`, which come first."""

    model: ModelName
    stream: bool | None = None  # unlike in other APIs, true by default
    format: dict[str, Any] | str | None = None
    think: bool | str | None = None
    options: Options = Options()
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @field_validator("options", mode="before")
    @classmethod
    def _no_options(cls, value: object) -> object:
        return {} if value is None else value

    @property
    def streamed(self) -> bool:
        return self.stream is not False

    @property
    @abstractmethod
    def only_loads(self) -> bool:
        """Whether there is nothing to answer: the request loads the model, or unloads it."""

    def answer_requests(self) -> list[AnswerRequest]:
        """Return the request in our words. Raises ApiError."""
        return [] if self.only_loads else [self._answer_request(self._common())]

    @abstractmethod
    def _answer_request(self, common: dict[str, Any]) -> AnswerRequest: ...

    def _common(self) -> dict[str, Any]:
        """Return the fields of AnswerRequest that both have. Raises ApiError."""
        sampling = self.sampling() | self.options.sampling()
        if self.logprobs:
            sampling["num_logprobs"] = self.top_logprobs or 0
        effort = self.think if isinstance(self.think, str) else None
        enabled = self.think if isinstance(self.think, bool) else None
        return {
            "grammar": self.grammar_spec("format", self._format()),
            "template_kwargs": thinking_kwargs(effort, enabled),
            "sampling": sampling,
            "stop": self.options.stops or self.stops,
        }

    def _format(self) -> GrammarSpec | None:
        if isinstance(self.format, dict):
            return schema_spec(self.format)
        if self.format in (None, ""):
            return None
        if self.format == "json":
            return GrammarSpec("json_object")
        raise ApiError(400, "invalid_value", 'format is not "json" or a JSON schema', param="format")


class OllamaChatRequest(OllamaRequest):
    """The body of POST /api/chat."""

    messages: list[Message] | None = Field(default=None, fail_fast=True)
    tools: list[dict[str, Any]] | None = None

    @property
    def only_loads(self) -> bool:
        return not self.messages

    def _answer_request(self, common: dict[str, Any]) -> AnswerRequest:
        messages = self.messages or []
        return AnswerRequest(
            messages=list(_messages(messages)),
            tools=[_tool(tool, index) for index, tool in enumerate(self.tools or ())],
            continues_last=messages[-1].role == "assistant" and not messages[-1].tool_calls,
            **common,
        )


class GenerateRequest(OllamaRequest):
    """The body of POST /api/generate."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = None

    @property
    def only_loads(self) -> bool:
        return not (self.prompt or self.suffix)

    def _answer_request(self, common: dict[str, Any]) -> AnswerRequest:
        prompt = self.prompt or ""
        if self.images and (self.suffix or self.raw):
            message = f"images: {'a gap in a text' if self.suffix else 'a raw prompt'} has no place for pictures"
            raise ApiError(400, "unsupported_content", message, param="images")
        if self.suffix:
            return AnswerRequest(prompt=prompt, suffix=self.suffix, **common)
        if self.raw:
            return AnswerRequest(prompt=prompt, **common)
        system = [{"role": "system", "content": self.system}] if self.system else []
        return AnswerRequest(messages=[*system, {"role": "user", "content": _content(prompt, self.images)}], **common)


def _messages(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """Yield OpenAI's messages. Results without an id belong to the calls before them, by name or in their order."""
    open_calls = _OpenCalls(())
    num_calls = 0
    for message in messages:
        turn: dict[str, Any] = {"role": message.role, "content": _content(message.content or "", message.images)}
        if message.role == "assistant":
            if message.thinking:
                turn["reasoning_content"] = message.thinking
            calls = []
            for call in message.tool_calls or ():
                num_calls += 1
                arguments = json.dumps(call.function.arguments or {}, ensure_ascii=False)
                function = {"name": call.function.name, "arguments": arguments}
                calls.append({"id": call.id or f"call_{num_calls}", "type": "function", "function": function})
            if calls:
                turn["tool_calls"] = calls
                open_calls = _OpenCalls(calls)
        elif message.role == "tool":
            turn["tool_call_id"], name = open_calls.take(message.tool_call_id, message.tool_name or message.name)
            if name:
                turn["name"] = name
        yield turn


def _content(text: str, images: Sequence[str] | None) -> str | list[dict[str, Any]]:
    """Return a text with its pictures before it, as Ollama shows them to a model."""
    return content_of([*(picture_part(f"data:;base64,{image}") for image in images or ()), text])


class _OpenCalls:
    """The calls of a turn that have no result yet, in their order."""

    def __init__(self, calls: Iterable[dict[str, Any]]) -> None:
        self._names = {call["id"]: call["function"]["name"] for call in calls}
        self._same_name: dict[str, deque[str]] = {}  # ids, also of calls that have a result
        for call_id, name in self._names.items():
            self._same_name.setdefault(name, deque()).append(call_id)

    def take(self, call_id: str | None, name: str | None) -> tuple[str, str | None]:
        """Return the id and the name for a result: those of the call with its id, or the first with its name, or any.

        The id is empty, and the name is the given one, if there is no such call.
        """
        if not call_id and name:
            ids = self._same_name.get(name, deque())
            while ids and ids[0] not in self._names:
                ids.popleft()
            call_id = ids[0] if ids else ""
        elif not call_id:
            call_id = next(iter(self._names), "")
        own_name = self._names.pop(call_id, None)
        return call_id, name or own_name


def _tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    match tool:
        case {"function": {"name": str(name)} as function} if name:
            if not isinstance(function.get("parameters"), dict):
                function = {**function, "parameters": {"type": "object", "properties": {}}}
            return {"type": "function", "function": function}
    raise ApiError(400, "invalid_type", f"tools.{index} is not a function with a name", param=f"tools.{index}")


def error_body(error: ApiError) -> dict[str, Any]:
    """Return an error in Ollama's form."""
    return {"error": str(error)}


def error_event(error: ApiError) -> bytes:
    """Return an error as a line of a stream."""
    return line(error_body(error))


def line(data: dict[str, Any]) -> bytes:
    """Return a line of a stream."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"
