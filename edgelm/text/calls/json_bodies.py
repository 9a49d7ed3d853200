"""Readers of bodies whose arguments are JSON: one object with name and arguments, or a name and an object.

JSON arguments are passed on as they are.
"""

from __future__ import annotations

import re

from edgelm.text.calls.body_parts import Sink, back_to_text, read_arguments, read_name, valid_id
from edgelm.text.calls.format import CallFormat, parts_of
from edgelm.text.calls.json_text import read_string, read_value, string_of
from edgelm.text.calls.reader import Reader, Wait

_JSON_NAME = re.compile(r"[\w.:/ -]{1,128}")
_NAME_KEYS = ("name", "tool_name", "function")
_ARGS_KEYS = ("arguments", "parameters")
_ID_KEYS = ("id", "tool_call_id")


def read_json_object(reader: Reader, form: CallFormat, sink: Sink) -> Wait:
    """Read a call that is one object. Return whether it is a call."""
    if (yield from reader.peek()) != "{":
        return False
    reader.at += 1
    call = _JsonCall(form, sink)
    while call.depth and (yield from call.read_field(reader)):
        if call.name:
            reader.forget()
    return call.end()


class _JsonCall:
    """A call that is one JSON object, while its fields come."""

    def __init__(self, form: CallFormat, sink: Sink) -> None:
        self.name = ""
        self.depth = 1
        self._sink = sink
        self._form = form
        self._id = ""
        self._early: list[str] = []  # arguments that come before the name
        self._complete = False  # the arguments
        self._num_keys = 0

    def read_field(self, reader: Reader) -> Wait:
        """Read the next field, comma or bracket; return whether more can follow."""
        char = yield from reader.peek()
        if char in ("}", ","):
            reader.at += 1
            self.depth -= char == "}"
            return True
        here = reader.at
        key = (yield from read_string(reader)) if char == '"' else None
        if key is None or (yield from reader.peek()) != ":":
            back_to_text(reader, here)
            return False
        reader.at += 1
        self._num_keys += 1
        char = yield from reader.peek()
        name_key, args_key, id_key = self._form.keys
        if self._form.at_start and self._num_keys == 1 and key not in (name_key, *_NAME_KEYS, "type"):
            return False
        if key in (name_key, *_NAME_KEYS) and char == '"' and not self.name:
            return self._begin((yield from read_string(reader)) or "")
        if key == "function" and char == "{":
            reader.at += 1
            self.depth += 1
            return True
        if key in (args_key, *_ARGS_KEYS) and not self._complete:
            self._complete = yield from read_arguments(
                reader, self._sink.args if self.name else self._early.append, self._sink
            )
            return self._complete
        here = reader.at
        held: list[str] = []
        complete = yield from read_value(reader, held.append)
        if not complete:
            back_to_text(reader, here)
        elif key in (id_key, *_ID_KEYS):
            self._id = valid_id(string_of("".join(held)) or "")
        return complete

    def _begin(self, name: str) -> bool:
        if not _JSON_NAME.fullmatch(name) or not self._sink.accepts(name):
            return False
        self.name = name
        self._sink.begin(name, self._id)
        if self._complete:
            self._sink.args("".join(self._early))
        return True

    def end(self) -> bool:
        """End the object; return whether it is a call."""
        if not self.name:
            return False
        if not self._complete and self.depth:
            self._sink.cut()
        elif not self._complete:
            self._sink.args("{}")
        return True


def read_name_and_json(reader: Reader, form: CallFormat, sink: Sink) -> Wait:
    """Read a name, perhaps an id, and an object of arguments. Return whether it is a call."""
    call_id = ""
    name = yield from read_name(reader)
    if name and form.id_before and (yield from reader.mark(form.id_before)):
        call_id, name = name, (yield from read_name(reader))
    if name and form.id_after and (yield from reader.mark(form.id_after)):
        call_id = yield from read_name(reader)
    if form.id_rule == "functions":
        call_id, name = name, re.sub(r":\d+$", "", name.removeprefix("functions."))
    if not name or not (yield from _name_ends(reader, form)) or not sink.accepts(name):
        return False
    sink.begin(name, valid_id(call_id))
    reader.forget()
    if not (yield from read_arguments(reader, sink.args, sink)):
        sink.cut()
    return True


def _name_ends(reader: Reader, form: CallFormat) -> Wait:
    """Read the mark after a name. A model may omit it before a JSON object."""
    line = "\n" if not parts_of(form.name_end) else ""
    if line:
        return (yield from reader.literal(line))
    if (yield from reader.mark(form.name_end)):
        return True
    return (yield from reader.peek()) == "{"
