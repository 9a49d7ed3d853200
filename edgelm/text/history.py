"""Brings the messages of a request into the form in which a model's template shows all of them.

The common form is that of transformers: text content, never None; arguments as objects; reasoning under all its names;
results with the name of their tool. A template that refuses or drops something in that form gets another one of
message_forms.py, or another order (turns.py); habits.py finds out which.

Owns the common form. Knows nothing of special tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from edgelm.base.errors import RequestError
from edgelm.text.habits import Habits, habits_of
from edgelm.text.message_forms import REASONING, Message, reasoning_of, typed, with_thought_part
from edgelm.text.turns import in_turns, is_empty_answer, with_full_answers

if TYPE_CHECKING:
    from edgelm.text.template import ChatTemplate

RAW_ARGUMENTS = "__raw"  # the key of arguments that are no JSON object
MAX_VALUES = 200_000  # in the arguments of a call: `json.loads` of millions would stop every other thread for long

_INSTRUCTIONS = ("system", "developer")


def normalized(messages: Sequence[Message], template: ChatTemplate) -> list[Message]:
    """Return one message in the common form for each message. Raises RequestError for invalid messages."""
    read = [_normalized(message, template) for message in messages]
    _name_results(read)
    return read


def shaped(messages: Sequence[Message], template: ChatTemplate) -> list[Message]:
    """Return messages of the common form in the form that the template wants; there may be more or fewer of them.

    Raises RequestError for calls that the template cannot show.
    """
    habits = habits_of(template)
    shaped = _with_merged_instructions(list(messages), habits)
    if any(message.get("tool_calls") for message in shaped):
        shaped = habits.shape_calls(shaped)
    if not habits.shows_same_role:
        shaped = in_turns(shaped, habits)
    if any(map(reasoning_of, shaped)) and habits.wants_thought_parts:
        shaped = [with_thought_part(message) for message in shaped]
    if any(map(is_empty_answer, shaped)) and not habits.shows_empty_answer:
        shaped = with_full_answers(shaped)
    return [typed(message) for message in shaped] if habits.wants_parts else shaped


def turn_key(message: Message) -> str:
    """Return a key that is equal for messages with the same content, reasoning and calls.

    White space at the ends, the ids of calls and the spelling of their arguments do not count.
    """
    functions = [call.get("function") for call in message.get("tool_calls") or [] if isinstance(call, dict)]
    calls = [
        [function.get("name"), arguments_of(function.get("arguments"))]
        for function in functions
        if isinstance(function, dict)
    ]
    value = [text_of(message.get("content")).strip(), reasoning_of(message).strip(), calls]
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# ----------------------------------------------------------------------------------------------------------------------


def _normalized(message: Message, template: ChatTemplate) -> Message:
    if not isinstance(message.get("role"), str):
        raise RequestError("a message has no role", "give each message a role and content")
    read = {name: value for name, value in message.items() if value is not None}
    if read["role"] == "developer" and not habits_of(template).shows_developer:
        read["role"] = "system"
    texts = _texts_of(message.get("content"))
    read["content"] = _with_separators(texts, habits_of(template).separator(read["role"])) if texts[1:] else texts[0]
    reasoning = next((read[name] for name in REASONING if name in read), None)
    if reasoning is not None:
        read = {"thinking": reasoning, **read, "reasoning_content": reasoning}
    if calls := read.pop("tool_calls", None):  # some templates take an empty list for calls
        read["tool_calls"] = [_normalized_call(call) for call in calls]
    return read


def text_of(content: object) -> str:
    """Return the content of a message as a text, without pictures. Raises RequestError for other parts."""
    if isinstance(content, list):
        content = [part for part in content if not (isinstance(part, dict) and part.get("type") == "image_url")]
    return "".join(_texts_of(content))


def _with_separators(texts: list[str], separator: str) -> str:
    """Return the parts of a text as a template joins them: it separates a part from a text before it."""
    joined = ""
    for text in texts:
        joined += separator + text if joined else text
    return joined


def _texts_of(content: object) -> list[str]:
    """Return the texts of a content: at least one."""
    if content is None or isinstance(content, str):
        return [content or ""]
    if not isinstance(content, list):
        raise RequestError("the content of a message is neither text nor a list of parts", "send it as text")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f"a message holds a part of type {str(kind)[:40]!r}", "send text: the model reads no other"
            )
        texts.append(part["text"])
    return texts or [""]


def _normalized_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    return {"type": "function", **call, "function": {**function, "arguments": arguments_of(function.get("arguments"))}}


def arguments_of(arguments: object) -> dict[str, Any]:
    """Return the arguments of a call as an object. A call that was cut off has none, but must not fail its chat."""
    if isinstance(arguments, dict):
        return arguments
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    try:
        value = json.loads(text) if sum(map(text.count, ",[{")) <= MAX_VALUES else text
    except (ValueError, RecursionError):
        value = text
    return value if isinstance(value, dict) else {RAW_ARGUMENTS: text}


def _name_results(messages: list[Message]) -> None:
    """Add the id and the name of its call to each result: by the id if it has one, otherwise in order."""
    names: dict[str, str] = {}
    waiting: list[tuple[Any, Any]] = []  # the id and name of calls without a result
    for message in messages:
        if message["role"] == "assistant":
            calls = [call for call in message.get("tool_calls", []) if isinstance(call, dict)]
            waiting = [(call.get("id"), (call.get("function") or {}).get("name")) for call in calls]
            names |= {call_id: name for call_id, name in waiting if isinstance(call_id, str)}
        elif message["role"] == "tool":
            call_id = message.get("tool_call_id")
            match = next((call for call in waiting if call_id in (None, call[0])), (call_id, names.get(str(call_id))))
            if match in waiting:
                waiting.remove(match)
            for field, value in zip(("tool_call_id", "name"), match, strict=True):
                if field not in message and isinstance(value, str):
                    message[field] = value


def _with_merged_instructions(messages: list[Message], habits: Habits) -> list[Message]:
    """Move system messages that the template would refuse or drop to where it shows them."""
    places = [index for index, message in enumerate(messages) if message["role"] in _INSTRUCTIONS]
    if not places:
        return messages
    leading = places == list(range(len(places)))
    if habits.shows_system and (
        places == [0] or (habits.shows_leading_instructions if leading else habits.shows_later_instructions)
    ):
        return messages
    if habits.moves_instructions_to_front:
        if len(places) == 1:
            return messages
        front = [messages[index]["content"] for index in places]
        others = [message for message in messages if message["role"] not in _INSTRUCTIONS]
    else:
        front, others = _moved_instructions(messages)
    if not front:
        return others
    if habits.shows_system:
        return [{**messages[places[0]], "content": _joined(front)}, *others]
    user = next((index for index, message in enumerate(others) if message["role"] == "user"), None)
    if user is None:
        return messages if any(front) else others
    others[user] = {**others[user], "content": _joined([*front, others[user]["content"]])}
    return others


def _moved_instructions(messages: list[Message]) -> tuple[list[str], list[Message]]:
    """Return the system texts for the front, and the other messages, where the template shows no later system message.

    A later one becomes a part of the message of the user or the result before it. Behind an answer it begins the user's
    next message, or is one. So each prompt begins as the one before it: with the text at the front, or moved when the
    next message comes, the conversation would have to be computed again.
    """
    front: list[str] = []
    pending: list[str] = []  # behind an answer
    others: list[Message] = []
    for message in messages:
        text = message["content"]
        if message["role"] in _INSTRUCTIONS:
            if not others:
                front.append(text)
            elif others[-1]["role"] == "assistant":
                pending.append(text)
            else:
                others[-1] = {**others[-1], "content": _joined([others[-1]["content"], text])}
            continue
        if pending and message["role"] == "assistant":
            others.append(_of_user(pending))
        elif pending:
            is_result = message["role"] == "tool"  # which may be JSON
            message = {**message, "content": _joined([text, *pending] if is_result else [*pending, text])}
        pending = []
        others.append(message)
    return front, [*others, _of_user(pending)] if pending else others


def _of_user(texts: list[str]) -> Message:
    return {"role": "user", "content": _joined(texts)}


def _joined(texts: list[str]) -> str:
    return "\n\n".join(filter(None, texts))
