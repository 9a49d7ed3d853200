"""Readers of the parts that the bodies of all formats have: a name, JSON arguments, an id.

Owns the Sink, which takes a call as it is read. The bodies themselves are in json_bodies.py and bodies.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Protocol

from edgelm.text.calls.json_text import read_value, string_of
from edgelm.text.calls.reader import MARKS, Reader, Wait
from edgelm.text.calls.values import Tools, is_object

_NAME = re.compile(r"[\w.:/-]")
_MAX_NAME = 128
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")  # clients send it back, some in URLs


class Sink(Protocol):
    """Takes a call as it is read."""

    tools: Tools
    truncated: bool  # the answer was cut off at its end

    def accepts(self, name: str) -> bool:
        """Return whether a call of this name is one, at this place."""

    def begin(self, name: str, call_id: str = "") -> None: ...

    def args(self, text: str) -> None: ...

    def cut(self) -> None:
        """Note that the call's arguments are incomplete."""


def read_arguments(reader: Reader, sink: Callable[[str], None], call: Sink) -> Wait:
    """Read the JSON of arguments; return whether it is complete. None at all are `{}`."""
    char = yield from reader.peek()
    if char in ("{", "["):
        return (yield from read_value(reader, sink))
    if not char and call.truncated:
        return False
    held: list[str] = []
    complete = yield from read_value(reader, held.append)
    text = "".join(held)
    if char == '"' and complete:  # arguments as a string, as in OpenAI's API
        inner = string_of(text) or ""
        sink(inner if is_object(inner) else "{}" if not inner.strip() else text)
    elif text in ("", "null", "None"):
        sink("{}")
        return True
    else:
        sink(text)
    return complete


def read_name(reader: Reader) -> Generator[None, None, str]:
    """Read the name of a tool, or an id; empty: there is none."""
    yield from reader.peek()
    return (yield from reader.run(_NAME, _MAX_NAME))


def valid_id(call_id: str) -> str:
    """Return the id of a call, or no id, and the call gets a new one."""
    return call_id if _ID.fullmatch(call_id) else ""


def without_marks(text: str) -> str:
    """Return a text without control tokens, which add no text."""
    return MARKS.sub("", text)


def back_to_text(reader: Reader, here: int) -> None:
    """Give back what is no argument, so that it becomes text. Half a key at the end of an answer is no text."""
    is_half_key = reader.ended and not re.search(r"\s", reader.text[here:].strip())
    reader.at = len(reader.text) if is_half_key else here
