"""The body of POST /v1/chat/completions: which fields there are, and which we refuse.

Owns names and types: for the front, which refuses a bad request before any model is loaded, and for the engine
process. Ranges of sampling values are those of core.SamplingParams. Knows nothing of models; imports nothing heavy.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from edgelm.server.api_error import ApiError

# Fields of OpenAI's that ask for what we do not do (yet), and the values of each that ask for nothing.
NOT_SUPPORTED: dict[str, tuple[object, ...]] = {
    "audio": (None,),
    "function_call": (None, "none"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False),  # of no effect without tools
    "prediction": (None,),
    "reasoning_effort": (None,),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "verbosity": (None,),
    "web_search_options": (None,),
}
NOT_SUPPORTED_IN_MESSAGE: dict[str, tuple[object, ...]] = {
    "annotations": (None, []),
    "audio": (None,),
    "function_call": (None,),
    "refusal": (None,),
    "tool_calls": (None, []),
}


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class TextPart(_Body):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class Message(_Body):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates know it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text} | ({} if self.name is None else {"name": self.name})


class StreamOptions(_Body):
    """What a stream holds beside the answer."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # against eavesdroppers on packet sizes: nothing to do on one machine


class OwnFields(_Body):
    """What OpenAI's shape has no place for."""

    past: list[Message] | None = None  # the conversation before `messages`, which is not sent to the model any more


class ChatRequest(_Body):
    """A conversation, and how its next turn is sampled. None: the setting of the server."""

    model: str = Field(min_length=1, max_length=4096)
    messages: list[Message] = Field(min_length=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    n: Literal[1] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: str | list[str] | None = None
    user: str | None = None  # this and the next three change nothing about the answer
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    edgelm: OwnFields | None = None

    @property
    def streamed(self) -> bool:
        return bool(self.stream)

    @property
    def streams_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def past(self) -> list[Message]:
        """Return the messages that serve drafting only."""
        return (self.edgelm and self.edgelm.past) or []

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


def parse_chat(body: bytes) -> ChatRequest:
    """Return the request in a body. Raises ApiError that names the field."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        raise ApiError(400, "invalid_json", "the body is not valid JSON") from None
    if not isinstance(data, dict):
        raise ApiError(400, "invalid_json", "the body is not a JSON object")
    data = _without_idle(data, NOT_SUPPORTED, "")
    for holder, where in ((data, "messages"), (data.get("edgelm"), "edgelm.past")):
        name = where.rpartition(".")[2]
        if isinstance(holder, dict) and isinstance(messages := holder.get(name), list):
            holder[name] = [
                _without_idle(each, NOT_SUPPORTED_IN_MESSAGE, f"{where}.{index}.") if isinstance(each, dict) else each
                for index, each in enumerate(messages)
            ]
    try:
        request = ChatRequest.model_validate(data)
    except ValidationError as error:
        raise _as_api_error(error) from None
    _check_together(request)
    return request


def _without_idle(data: dict[str, Any], names: dict[str, tuple[object, ...]], where: str) -> dict[str, Any]:
    """Leave out the fields that ask for nothing. Raises ApiError for one that does ask for what we cannot do."""
    for name in names.keys() & data.keys():
        if not any(data[name] is idle or (data[name] == idle and not isinstance(idle, bool)) for idle in names[name]):
            raise ApiError(400, "unsupported_parameter", f"{where}{name} is not supported", param=where + name)
    return {name: value for name, value in data.items() if name not in names}


def _as_api_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    union = {"str", "list[TextPart]"}  # pydantic names the branches of a union in the path
    param = ".".join(str(step) for step in first["loc"] if step not in union)
    if first["type"] == "extra_forbidden":
        return ApiError(400, "unknown_parameter", f"there is no field {param}", param=param)
    if first["type"] == "missing":
        return ApiError(400, "missing_required_parameter", f"{param} is missing", param=param)
    if param == "n":
        return ApiError(400, "unsupported_value", "n: only one answer at a time is supported", param=param)
    return ApiError(400, "invalid_type", f"{param}: {first['msg'][:1].lower()}{first['msg'][1:]}", param=param)


def _check_together(request: ChatRequest) -> None:
    """Refuse fields that contradict each other or would be ignored."""
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        message = "max_tokens and max_completion_tokens are both given: leave one out"
        raise ApiError(400, "invalid_value", message, param="max_tokens")
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "invalid_value", "top_logprobs needs logprobs to be true", param="top_logprobs")
    if request.stream_options is not None and not request.streamed:
        raise ApiError(400, "invalid_value", "stream_options needs stream to be true", param="stream_options")
