"""Lets user and assistant take turns, for templates that refuse any other order.

Texts of one side that follow each other become one message. Where a side is missing, because calls stand between two
texts of the other or because the chat begins with the assistant, a short message of ours stands for it: so the user's
words stay the user's, and each prompt begins as the one before it.

Owns those messages. Which orders a template refuses is found out by habits.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgelm.text.habits import Habits
from edgelm.text.message_forms import Message, reasoning_of

NO_ANSWER = "(no answer)"
_MISSING = {"user": ("assistant", NO_ANSWER), "assistant": ("user", "(no message)")}  # between two of a side


def in_turns(messages: Sequence[Message], habits: Habits) -> list[Message]:
    """Return messages in an order that a template shows which refuses two texts of one side behind each other."""
    result: list[Message] = []
    last = ""  # the side of the last text: such templates do not count calls and results
    for message in messages:
        side = message["role"]
        if result and _folds(result[-1], message):
            result[-1] = {**result[-1], "content": _joined(result[-1], message)}
            continue
        if side == (last or "assistant") and _is_missing(_MISSING[side][0], result, message, last, habits):
            last, text = _MISSING[side]
            result.append({"role": last, "content": text})
        result.append(message)
        if side in _MISSING and not message.get("tool_calls"):
            last = side
    return result


def with_full_answers(messages: Sequence[Message]) -> list[Message]:
    """Return messages with a text in each one of the assistant that has neither text nor calls."""
    return [{**message, "content": NO_ANSWER} if is_empty_answer(message) else message for message in messages]


def is_empty_answer(message: Message) -> bool:
    """Return whether a message is an answer of nothing, as of a client that has cancelled it."""
    return message["role"] == "assistant" and not message.get("content") and not message.get("tool_calls")


def _is_missing(other: str, before: Sequence[Message], message: Message, last: str, habits: Habits) -> bool:
    """Whether a text of the other side must stand before a message: the template shows a short chat only with it."""
    begin: tuple[str, ...]
    end: tuple[str, ...]
    if message["role"] == "user":
        begin = ("user", "call", "tool") if before[-1]["role"] == "tool" else ("user", "call")
        end = ("user",)
    else:
        begin = ("user", "assistant") if last else ()
        end = ("call", "tool", "assistant", "user") if message.get("tool_calls") else ("assistant", "user")
    return not habits.shows(*begin, *end) and habits.shows(*begin, other, *end)


def _folds(first: Message, second: Message) -> bool:
    """Whether two messages can be one: texts of one side."""
    plain = not any("tool_calls" in message or reasoning_of(message) for message in (first, second))
    return plain and first["role"] == second["role"] and first["role"] in _MISSING


def _joined(first: Message, second: Message) -> str:
    return "\n\n".join(filter(None, (first["content"], second["content"])))
