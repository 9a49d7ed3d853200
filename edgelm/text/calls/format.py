"""CallFormat: how a model writes tool calls, as data, and the writer of that format.

A format is a handful of strings around names, arguments and values. The parser (text/parse.py), the grammar
(text/constraint.py) and `write_calls` read the same strings:

    section[0]  call[0] NAME name_end ARGUMENTS call[1]  separator  call[0] NAME …  section[1]

With the body `json`, NAME and ARGUMENTS are two values of one JSON object between call[0] and call[1].

Owns the data and the writer. Knows no model's name and no template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Body = Literal["json", "name_json", "tagged", "python", "gemma", "harmony"]
IdRule = Literal["any", "alnum9", "functions", "index"]
Raw = Literal["json", "python"]

# A line break in a mark, and the border between two tags, stand for any white space: models vary it. The surrogates are
# the control tokens of a compiled format (reader.py).
_FLEXIBLE = re.compile("\\s*\n\\s*|(?<=[>\\]\udc00-\udfff])(?=[<\\[{\udc00-\udfff])")


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may or must call a tool, and which: a named tool is `required` with one name."""

    mode: Literal["none", "auto", "required"] = "auto"
    names: frozenset[str] | None = None  # None: every tool


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call: the arguments are a JSON object."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How tool calls are written. An empty string is a part that the format does not have."""

    name: str  # for messages to people; nothing depends on it
    body: Body
    section: tuple[str, str] = ("", "")  # around all calls of a turn
    call: tuple[str, str] = ("", "")  # around one call
    separator: str = ""  # between two calls
    name_end: str = ""  # between name and arguments
    id_before: str = ""  # between id and name, if the id comes first
    id_after: str = ""  # between name and id, if the id follows
    keys: tuple[str, str, str] = ("name", "arguments", "")  # of the JSON object: name, arguments, id
    id_first: bool = False  # the id is the first key of the object; otherwise the last
    arg: tuple[str, str, str] = ("", "", "")  # before the key, before the value, after it
    value_mark: str = ""  # before a value that is JSON, where that differs from the mark before a string
    arg_separator: str = ""
    raw: Raw = "json"  # how a template writes values that are no strings; both are read
    id_rule: IdRule = "any"
    parallel: bool = True  # the model may call several tools in one turn
    at_start: bool = False  # a call is the whole answer; JSON elsewhere is text
    known_names: bool = False  # the marks are so weak that only the name of a tool makes it a call
    drop: tuple[str, ...] = ()  # marks around content that are no text
    also: tuple[CallFormat, ...] = ()  # other forms that these models are seen to write; read, never written

    @property
    def head(self) -> str:
        """The text before the first call's name, or before its JSON object."""
        return self.section[0] + self.call[0]

    @property
    def strings(self) -> tuple[str, ...]:
        """Every literal part of the format, those of `also` included."""
        own = (
            *self.section, *self.call, self.separator, self.name_end, self.id_before, self.id_after, *self.arg,
            self.value_mark, self.arg_separator, *self.drop,
        )  # fmt: skip
        extra = HARMONY_MARKS if self.body == "harmony" else (GEMMA_QUOTE,) if self.body == "gemma" else ()
        return (*filter(None, own), *extra, *(text for form in self.also for text in form.strings))


HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
TAG_STARTS = frozenset(("<", *map(chr, range(0xDC00, 0xE000))))  # a tag, or a control token of a compiled format
GEMMA_QUOTE = '<|"|>'


def parts_of(mark: str) -> tuple[str, ...]:
    """Return the literal parts of a mark; any white space may stand between them and around them."""
    return tuple(part for part in _FLEXIBLE.split(mark.strip()) if part)


def heads_of(form: CallFormat) -> tuple[tuple[str, ...], ...]:
    """Return the parts of the marks that may begin calls in free text.

    The second one, if any, is that of a single call: a model may omit the frame around all of them.
    """
    if form.at_start:
        return ()
    whole, inner = parts_of(form.head), parts_of(form.call[0])
    omits = form.section[0] and inner and inner[0][0] in TAG_STARTS
    return (whole, inner) if omits else (whole,)


def write_calls(form: CallFormat, calls: Sequence[Call]) -> str:
    """Return the text of calls as the model's template writes them in the history."""
    written = [_write_call(form, call, index) for index, call in enumerate(calls)]
    return form.section[0] + form.separator.join(written) + form.section[1]


def to_json(value: object) -> str:
    """Return JSON with the separators that templates write and models are trained on."""
    return json.dumps(value, ensure_ascii=False)


def _write_call(form: CallFormat, call: Call, index: int) -> str:
    opened, closed = form.call
    if form.body == "json":
        return opened + _write_object(form, call, index) + closed
    if form.body == "harmony":
        return f"<|start|>assistant to=functions.{call.name}<|channel|>commentary json<|message|>" + (
            to_json(dict(call.arguments)) + "<|call|>"
        )
    name = f"functions.{call.name}:{index}" if form.id_rule == "functions" else call.name
    if form.id_before:
        name = call.id + form.id_before + name
    if form.id_after:
        name += form.id_after + call.id
    return opened + name + form.name_end + _write_arguments(form, call.arguments) + closed


def _write_object(form: CallFormat, call: Call, index: int) -> str:
    name_key, args_key, id_key = form.keys
    fields: dict[str, object] = {name_key: call.name, args_key: dict(call.arguments)}
    if id_key:
        number = {id_key: str(index) if form.id_rule == "index" else call.id}
        fields = {**number, **fields} if form.id_first else {**fields, **number}
    return to_json(fields)


def _write_arguments(form: CallFormat, arguments: Mapping[str, Any]) -> str:
    if form.body == "python":
        return ", ".join(f"{key}={_python(value)}" for key, value in arguments.items())
    if form.body == "gemma":
        return _gemma(arguments)
    if form.body == "tagged":
        return form.arg_separator.join(_write_argument(form, key, value) for key, value in arguments.items())
    return to_json(dict(arguments))


def _write_argument(form: CallFormat, key: str, value: object) -> str:
    opened, middle, closed = form.arg
    if isinstance(value, str):
        return opened + key + middle + value + closed
    plain = repr(value) if form.raw == "python" and not isinstance(value, dict | list) else to_json(value)
    return opened + key + (form.value_mark or middle) + plain + closed


def _python(value: object) -> str:
    if isinstance(value, dict | list):
        return to_json(value)
    return repr(value)


def _gemma(value: object) -> str:
    if isinstance(value, str):
        return GEMMA_QUOTE + value + GEMMA_QUOTE
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_gemma(item)}" for key, item in sorted(value.items())) + "}"
    if isinstance(value, Iterable):
        return "[" + ",".join(map(_gemma, value)) + "]"
    return json.dumps(value)
