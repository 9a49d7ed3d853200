"""The forms in which messages with calls and results are given to a chat template.

Owns the forms. Which of them a template shows is found out by habits.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

Message = dict[str, Any]
REASONING = ("reasoning_content", "thinking", "reasoning")  # the names of it that clients and templates use

_ID_LEN = 9  # of the ids that Mistral's templates accept


def content_of(parts: Sequence[str | dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return texts and pictures as the content of a message: several remain parts, which the model's template joins."""
    if len(parts) == 1 and isinstance(parts[0], str):
        return parts[0]
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def picture_part(url: str) -> dict[str, Any]:
    """Return a picture as a part of a message."""
    return {"type": "image_url", "image_url": {"url": url}}


def typed(message: Message) -> Message:
    """Return a message whose content is a list of parts."""
    content = message.get("content") or ""
    return {**message, "content": content if isinstance(content, list) else [{"type": "text", "text": content}]}


def with_thought_part(message: Message) -> Message:
    """Return a message whose reasoning is a part of its content, the first one."""
    reasoning = reasoning_of(message)
    if not reasoning:
        return message
    rest = {name: value for name, value in message.items() if name not in REASONING}
    text = [{"type": "text", "text": message["content"]}] if message.get("content") else []
    return {**rest, "content": [{"type": "thinking", "thinking": reasoning}, *text]}


def reasoning_of(message: Message) -> str:
    """Return the reasoning of a message, under whichever name it has."""
    value = next((message[name] for name in REASONING if message.get(name)), "")
    return value if isinstance(value, str) else ""


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a message with calls is given to a template."""

    empty: str | None = ""  # the content beside calls, if there is no text
    has_content: bool = True  # whether there is a field `content` then
    argument_strings: bool = False
    ids_of_nine: bool = False
    text_apart: bool = False  # the text is a message of its own, before the calls
    text_as_reasoning: bool = False  # beside reasoning and calls, the text is the end of the reasoning
    one_call: bool = False  # each call is followed by its result
    calls_as_text: bool = False  # the template has no calls
    results_as_text: bool = False  # the template has no results

    def apply(self, messages: Sequence[Message]) -> list[Message]:
        messages = list(_one_call_each(messages)) if self.one_call else list(messages)
        if self.results_as_text:
            messages = _with_results_of_user(messages)
        return [part for message in messages for part in self._parts(message)]

    def _parts(self, message: Message) -> Iterator[Message]:
        if self.calls_as_text and message.get("tool_calls"):
            texts = [message["content"], *map(_call_text, message["tool_calls"])]
            message = {name: value for name, value in message.items() if name != "tool_calls"}
            message["content"] = "\n".join(filter(None, texts))
        if self.ids_of_nine and "tool_call_id" in message:
            message = {**message, "tool_call_id": _id_of_nine(message["tool_call_id"])}
        calls = message.get("tool_calls")
        if not calls:
            yield message
            return
        message = {**message, "tool_calls": [self.with_call(call) for call in calls]}
        if self.text_as_reasoning and message["content"] and (reasoning := message.get("thinking")):
            both = f"{reasoning}\n\n{message['content']}"
            message = {**message, "thinking": both, "reasoning_content": both, "content": ""}
        if self.text_apart and message["content"]:
            yield {name: value for name, value in message.items() if name != "tool_calls"}
            message = {name: value for name, value in message.items() if name not in REASONING} | {"content": ""}
        if not message["content"]:
            message["content"] = self.empty
            if not self.has_content:
                del message["content"]
        yield message

    def with_call(self, call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            return call
        if self.ids_of_nine and "id" in call:
            call = {**call, "id": _id_of_nine(call["id"])}
        if self.argument_strings:
            call = {
                **call,
                "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)},
            }
        return call


def _call_text(call: Any) -> str:
    """Return a call as the models of Qwen and Hermes write it: most others have seen that form too."""
    function = call.get("function") if isinstance(call, dict) else None
    return f"<tool_call>\n{json.dumps(function or call, ensure_ascii=False)}\n</tool_call>"


def _with_results_of_user(messages: Sequence[Message]) -> list[Message]:
    """Return messages with the results of a turn in one message of the user."""
    result: list[Message] = []
    for is_result, group in groupby(messages, key=lambda message: message["role"] == "tool"):
        if not is_result:
            result += group
            continue
        texts = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in group]
        result.append({"role": "user", "content": "\n".join(texts)})
    return result


def argument_strings(messages: Sequence[Message]) -> list[Message]:
    """Return shaped messages with the arguments of calls as JSON strings."""
    form = CallForm(argument_strings=True)
    return [
        {**message, "tool_calls": [form.with_call(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _id_of_nine(call_id: Any) -> str:
    text = str(call_id)
    if len(text) == _ID_LEN and text.isascii() and text.isalnum():
        return text
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_ID_LEN]


def _one_call_each(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield call, result, call, result where a message has several calls that all have their result."""
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            yield message
            continue
        count = next((i for i, other in enumerate(rest) if other["role"] != "tool"), len(rest))
        results = {result.get("tool_call_id"): result for result in rest[:count]}
        ids = [call.get("id") if isinstance(call, dict) else None for call in calls]
        if len(ids) != len(set(ids)) or len(ids) != count or results.keys() != set(ids):
            yield message
            continue
        del rest[:count]
        for number, (call, call_id) in enumerate(zip(calls, ids, strict=True)):
            first = message if not number else {"role": message["role"], "content": ""}
            yield {**first, "tool_calls": [call]}
            yield results[call_id]
