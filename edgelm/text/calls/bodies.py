"""Readers of one call's name and arguments, for each body of a format.

Every reader is a generator over a Reader. It returns False, with nothing passed on, if no call stands there; the caller
goes back and takes the text as text. Once a call has begun it is never withdrawn.

Forms other than JSON are rewritten as JSON while they come.

Owns the choice of the reader, and the bodies that are not JSON. Knows nothing of sections, reasoning and tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator

from edgelm.text.calls.body_parts import Sink, back_to_text, read_name, without_marks
from edgelm.text.calls.format import CallFormat, parts_of, to_json
from edgelm.text.calls.json_bodies import read_json_object, read_name_and_json
from edgelm.text.calls.json_text import read_value
from edgelm.text.calls.reader import MARKS, Finder, Reader, Wait
from edgelm.text.calls.values import json_escaped, json_of_literal, json_of_text

_KEYWORD = re.compile("[^=,()\\[\\]{}'\"\udc00-\udfff]")
_MAX_KEY = 256
_SCALAR = re.compile(r"[\w.+-]")
_MAX_DEPTH = 64


def read_call(reader: Reader, form: CallFormat, sink: Sink) -> Wait:
    """Read what stands between the marks of a call. Return whether it is a call."""
    return _READERS[form.body](reader, form, sink)


def _tagged(reader: Reader, form: CallFormat, sink: Sink) -> Wait:
    name = yield from read_name(reader)
    if not name or not sink.accepts(name) or not (yield from reader.mark(form.name_end)):
        return False
    opened, closed = form.arg[0], form.call[1]
    here = reader.at
    if not (yield from reader.mark(opened)) and not (yield from reader.mark(closed)):
        return False
    reader.at = here
    sink.begin(name)
    sink.args("{")
    comma = ""
    while True:
        reader.forget()
        if not (yield from reader.mark(opened)):
            break
        here = reader.at
        key, text = yield from _key(reader, form)
        if not key:
            back_to_text(reader, here)
            sink.cut()
            return True
        sink.args(f"{comma}{to_json(key)}: ")
        comma = ", "
        types = sink.tools.types(name, key) if not form.value_mark else frozenset(("string",) if text else ())
        if not (yield from _raw_value(reader, form, types, sink)):
            sink.cut()
            return True
        if form.arg_separator.strip():
            yield from reader.mark(form.arg_separator)
    here = reader.at
    if (yield from reader.mark(closed)) or not (reader.ended and sink.truncated):
        sink.args("}")
    else:
        sink.cut()
    reader.at = here
    return True


def _key(reader: Reader, form: CallFormat) -> Generator[None, None, tuple[str, bool]]:
    """Read a key and the mark behind it. Return it, and whether the mark is that of a string."""
    marks = {parts_of(mark)[0]: mark for mark in (form.arg[1], form.value_mark) if mark}
    starts = sorted({first[0] for first in marks})
    key = ""
    while (yield from reader.more()) and len(key) < _MAX_KEY:
        char = reader.text[reader.at]
        if char in starts:
            here = reader.at
            for mark in (form.arg[1], form.value_mark):
                if mark and (yield from reader.mark(mark)):
                    return key.strip(), mark == form.arg[1]
            reader.at = here
        if MARKS.match(char):
            break
        key += char
        reader.at += 1
    return "", False


def _raw_value(reader: Reader, form: CallFormat, types: frozenset[str], sink: Sink) -> Wait:
    """Read the text of a value up to its mark; return whether the mark came."""
    finder = Finder(parts_of(form.arg[2])[:1])
    own_line = form.arg[2].startswith("\n")
    if form.arg[1].endswith("\n"):
        yield from reader.literal("\n")
    if types == {"string"}:
        sink.args('"')
        found = yield from reader.until(
            finder, lambda text: sink.args(json_escaped(without_marks(text))), own_line=own_line
        )
        if found:
            sink.args('"')
    else:
        held: list[str] = []
        here = reader.at
        if (yield from reader.peek()) in ("{", "["):  # a string in it may contain the mark
            yield from read_value(reader, held.append)
        else:
            reader.at = here
        found = yield from reader.until(finder, held.append, own_line=own_line)
        text = without_marks("".join(held))
        sink.args(json_of_text(text, types) if found else text)
    return bool(found) and (yield from reader.mark(form.arg[2]))


def _python(reader: Reader, form: CallFormat, sink: Sink) -> Wait:
    name = yield from read_name(reader)
    word = form.name_end.rstrip("(")
    if not name.endswith(word) or not (yield from reader.mark("(")):
        return False
    name = name.removesuffix(word)
    if not name or not sink.accepts(name):
        return False
    sink.begin(name)
    sink.args("{")
    comma, index = "", 0
    while True:
        reader.forget()
        char = yield from reader.peek()
        if char == ")":
            sink.args("}")
            return True
        if char == ",":
            reader.at += 1
            continue
        here = reader.at
        key = (yield from reader.run(_KEYWORD, _MAX_KEY)).strip()
        if (yield from reader.peek()) == "=":
            reader.at += 1
        else:
            reader.at = here
            key = sink.tools.parameter(name, index)
        index += 1
        held: list[str] = []
        complete = yield from _python_value(reader, held.append)
        value = "".join(held)
        sink.args(f"{comma}{to_json(key)}: {json_of_literal(value) if complete else value}")
        if not complete:
            sink.cut()
            return True
        comma = ", "


def _python_value(reader: Reader, sink: Callable[[str], None]) -> Wait:
    """Read a literal up to the comma or bracket behind it; return whether one came."""
    depth, quote, escaped = 0, "", False
    while (yield from reader.more()):
        char = reader.text[reader.at]
        if MARKS.match(char):
            return False
        if quote:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}" and depth:
            depth -= 1
        elif char in ",)" and not depth:
            return True
        sink(char)
        reader.at += 1
    return False


def _gemma(reader: Reader, form: CallFormat, sink: Sink) -> Wait:
    name = yield from read_name(reader)
    if not name or (yield from reader.peek()) != "{" or not sink.accepts(name):
        return False
    sink.begin(name)
    if not (yield from _gemma_value(reader, form, sink.args, _MAX_DEPTH)):
        sink.cut()
    return True


def _gemma_value(reader: Reader, form: CallFormat, sink: Callable[[str], None], depth: int) -> Wait:
    """Read a value, and pass it on as JSON; return whether it is complete."""
    reader.forget()
    if (yield from reader.peek()) in ("{", "[") and depth:
        return (yield from _gemma_items(reader, form, sink, depth))
    for mark in (form.arg[1], '"'):
        if (yield from reader.literal(mark)):
            sink('"')
            found = yield from reader.until(Finder((mark,)), lambda text: sink(json_escaped(without_marks(text))))
            if found:
                reader.at += len(mark)
                sink('"')
            return bool(found)
    word = yield from reader.run(_SCALAR, _MAX_KEY)
    is_cut = reader.ended and reader.at == len(reader.text)
    if word:
        sink(word if is_cut else json_of_literal(word))
    return bool(word) and not is_cut


def _gemma_items(reader: Reader, form: CallFormat, sink: Callable[[str], None], depth: int) -> Wait:
    """Read an object or a list; return whether it is complete."""
    char = reader.text[reader.at]
    closed = "}" if char == "{" else "]"
    reader.at += 1
    sink(char)
    comma = ""
    while True:
        after = yield from reader.peek()
        if after == closed:
            reader.at += 1
            sink(closed)
            return True
        if comma:
            if after != ",":
                return False
            reader.at += 1
            yield from reader.peek()
        here = reader.at
        key = (yield from _gemma_key(reader, form.arg[1])) if char == "{" else ""
        if not after or (char == "{" and not key):
            back_to_text(reader, here)
            return False
        sink(comma + (f"{to_json(key)}: " if key else ""))
        comma = ", "
        if not (yield from _gemma_value(reader, form, sink, depth - 1)):
            return False


def _gemma_key(reader: Reader, quote: str) -> Generator[None, None, str]:
    for mark in (quote, '"'):
        yield from reader.literal(mark)
    key = ""
    while (yield from reader.more()) and len(key) < _MAX_KEY:
        char = reader.text[reader.at]
        reader.at += 1
        if char == ":":
            return key.strip().removesuffix(quote).removesuffix('"')
        key += char
    return ""


_READERS: dict[str, Callable[[Reader, CallFormat, Sink], Wait]] = {
    "json": read_json_object,
    "name_json": read_name_and_json,
    "tagged": _tagged,
    "python": _python,
    "gemma": _gemma,
}
