"""Renders messages into the text of a prompt, so that only the template can write special tokens.

If a message contains the string of a special token, a placeholder replaces it while the template runs: one character
that the chat does not contain. chat_tokens.py encodes the text.

Owns the placeholders, and the places of messages in the text; history.py has the form of messages that templates read.
Knows nothing of processes and sets no time limit: a template may run for ever (see template_worker.py).
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

from edgelm.base.errors import RequestError
from edgelm.text.history import normalized, shaped
from edgelm.text.message_forms import REASONING, argument_strings
from edgelm.text.switches import switched
from edgelm.text.template import ChatTemplate, Message, RefusedError, TemplateFailedError, other_efforts, too_long

# Printable letters without case that almost nobody writes (CJK extension B). No template filter changes them.
_PLACEHOLDERS = range(0x20000, 0x2A6E0)
_MARKS = range(0x2A700, 0x2EBE0)  # as rare: extensions C to F
_MAX_DEPTH = 64


class Span(NamedTuple):
    """Where a message lies in a rendered chat: its first and last marked characters."""

    message: int  # its number in the request
    first: int
    last: int
    shows_reasoning: bool


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text of a chat, its placeholders, and the places of its messages."""

    text: str
    plain: dict[str, str] = field(default_factory=dict)  # placeholder: the string that it stands for
    spans: list[Span] = field(default_factory=list, compare=False)
    effort: str = field(default="", compare=False)  # the `reasoning_effort` in place of one that the template refuses
    stays_on: bool = field(default=False, compare=False)  # reasoning was to be off, and the template has no way

    @property
    def restored(self) -> str:
        """The text with the strings that its placeholders stand for."""
        return restored(self.text, self.plain)


def render_chat(
    template: ChatTemplate,
    messages: Sequence[Message],
    /,
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    max_bytes: int | None = None,
    with_spans: bool = False,
    pictures: Mapping[str, str] | None = None,
    own_marks: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> Rendered:
    """Render a conversation in OpenAI's form; see ChatTemplate.render for the other arguments.

    With `continue_final_message`, the text ends with that of the last message, which is an assistant's. `with_spans`
    adds the places of the messages. For a `reasoning_effort` that the template refuses, it gets the nearest one that it
    takes; switches.py has what turns reasoning off. `pictures` are the marks of pictures in the messages (pictures.py),
    `own_marks` those of control tokens (own_marks.py). Raises RequestError for invalid messages, and the errors of the
    template.
    """
    messages = normalized(messages, template)
    switches = switched(template, kwargs)
    chat = {"messages": messages, "tools": tools, **switches.kwargs}
    hidden = _Placeholders(chat, template)
    chat = hidden.hide_markers(chat)
    if continue_final_message:
        add_generation_prompt, end = False, hidden.unused()
        chat["messages"] = _with_end(chat["messages"], end)
    text, effort = _with_effort(template, chat, add_generation_prompt=add_generation_prompt, max_bytes=max_bytes)
    if effort:
        chat["reasoning_effort"] = effort
    _check_controls(template, chat, hidden, text, add_generation_prompt)
    spans = _spans(template, chat, text, add_generation_prompt=add_generation_prompt) if with_spans else []
    if continue_final_message:
        text, spans = _continued(text, end), []
    rendered, plain = hidden.unescaped(text)
    spans = spans if rendered == text else []
    if own_marks:
        rendered, spans = _with_controls(rendered, spans, own_marks)
    for mark, name in (pictures or {}).items():
        if mark not in rendered:
            raise RequestError("the model's chat template does not show a picture", "send it in a user's message")
        plain[mark] = name
    if plain and max_bytes is not None and len(restored(rendered, plain).encode("utf-8", "surrogatepass")) > max_bytes:
        raise too_long(max_bytes)
    return Rendered(rendered, plain, spans, effort or switches.effort, switches.stays_on)


def _with_controls(text: str, spans: Sequence[Span], marks: Mapping[str, str]) -> tuple[str, list[Span]]:
    """Return a rendered text with control strings in place of their marks, and the places of messages in it."""
    places = [match.start() for match in re.finditer(f"[{''.join(marks)}]", text)]
    lens = list(accumulate((len(marks[text[at]]) - 1 for at in places), initial=0))  # added before each mark

    def moved(at: int) -> int:
        return at + lens[bisect_left(places, at)]

    return restored(text, marks), [span._replace(first=moved(span.first), last=moved(span.last)) for span in spans]


def _with_effort(template: ChatTemplate, chat: dict[str, Any], **options: Any) -> tuple[str, str]:
    """Return the text of a chat, and the effort in place of one that the template refuses; empty: it refuses none."""
    try:
        return _render_forms(template, chat, **options), ""
    except RefusedError as error:
        for effort in other_efforts(chat.get("reasoning_effort"), error.message):
            with suppress(RefusedError):
                return _render_forms(template, {**chat, "reasoning_effort": effort}, **options), effort
        raise


def _render_forms(template: ChatTemplate, chat: dict[str, Any], **options: Any) -> str:
    """Render a chat in the form that the template wants. If it still fails, try other forms."""
    chat = {**chat, "messages": shaped(chat["messages"], template)}
    try:
        return template.render(**chat, **options)
    except TemplateFailedError as error:
        first = error
    strings = argument_strings(chat["messages"])
    for form in ({**chat, "tools": chat["tools"] or []}, {**chat, "messages": strings, "tools": chat["tools"] or []}):
        if form != chat:
            try:
                return template.render(**form, **options)
            except TemplateFailedError:
                pass
    raise first


def _continued(text: str, end: str) -> str:
    """Return a rendered text up to the mark at the end of its last message."""
    at = text.rfind(end)
    if at < 0:
        raise RequestError(
            "the model's chat template does not show the last message, so it cannot be continued", "end with a user's"
        )
    return text[:at]


def _with_end(messages: list[Message], end: str) -> list[Message]:
    """Return messages with a mark behind the text of the last one. Raises RequestError if it cannot be continued."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or not last["content"] or "tool_calls" in last:
        raise RequestError(
            "continue_final_message: the last message is not an assistant's message of text", "end with one"
        )
    return [*messages[:-1], {**last, "content": last["content"] + end}]


# ----------------------------------------------------------------------------------------------------------------------


def _spans(template: ChatTemplate, chat: dict[str, Any], text: str, **options: Any) -> list[Span]:
    """Return where the text of each message lies in the rendered text.

    The chat is rendered again with a mark in each message. Return nothing if the marks change the text around them,
    or if the chat contains characters that could be marks.
    """
    marks: list[tuple[int, bool]] = []  # the message of each mark, and whether its reasoning is marked

    def marked(value: object, *, message: int, is_reasoning: bool = False) -> Any:
        """Return a text with a mark before its last character that is no white space."""
        core = value.rstrip() if isinstance(value, str) else ""
        if not isinstance(value, str) or not core or len(marks) == len(_MARKS):
            return value
        marks.append((message, is_reasoning))
        at = len(core) - 1
        return value[:at] + chr(_MARKS[len(marks) - 1]) + value[at:]

    messages = []
    for number, message in enumerate(chat["messages"]):
        mark = partial(marked, message=number)
        changed = {name: mark(message[name], is_reasoning=True) for name in REASONING if name in message}
        changed["content"] = mark(message["content"])
        if calls := message.get("tool_calls"):
            changed["tool_calls"] = [_with_name(call, mark) for call in calls]
        messages.append({**message, **changed})
    pattern = re.compile(f"[{chr(_MARKS[0])}-{chr(_MARKS[-1])}]")
    if pattern.search(text):
        return []
    try:
        other = _render_forms(template, {**chat, "messages": messages}, **options)
    except RequestError:
        return []
    if pattern.sub("", other) != text:
        return []
    places: dict[int, list[int]] = {}
    thoughts: set[int] = set()
    seen: set[str] = set()
    for count, match in enumerate(pattern.finditer(other)):
        if match[0] in seen:  # the name of a call again, with its result
            continue
        seen.add(match[0])
        number, is_reasoning = marks[ord(match[0]) - _MARKS[0]]
        places.setdefault(number, []).append(match.start() - count)
        if is_reasoning:
            thoughts.add(number)
    return [Span(number, min(at), max(at), number in thoughts) for number, at in places.items()]


def _with_name(call: Any, change: Callable[[object], object]) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    return {**call, "function": {**function, "name": change(function.get("name"))}}


class _Placeholders:
    """The placeholders of one chat: one rare character for each hidden string."""

    def __init__(self, chat: dict[str, Any], template: ChatTemplate) -> None:
        self._template = template
        self._chat = chat
        self._free: Iterator[str] | None = None
        self._placeholders: dict[str, str] = {}  # by the string

    def hide_markers(self, chat: dict[str, Any]) -> dict[str, Any]:
        """Return the chat with placeholders for markers.

        The model's own messages keep user-defined markers such as `<think>`: templates search for them, and the prefix
        cache has their tokens.
        """
        control, markers = self._hider(self._template.control), self._hider(self._template.markers)
        messages = [
            _mapped(message, control if message["role"] == "assistant" else markers) for message in chat["messages"]
        ]
        rest = {name: _mapped(value, markers) for name, value in chat.items() if name != "messages"}
        return {"messages": messages, **rest}

    def disarm(self, chat: dict[str, Any]) -> dict[str, Any]:
        """Return the chat with placeholders for the characters that every control string needs."""
        hider = self._hider(self._template.control_signs)
        return {name: _mapped(value, hider) for name, value in chat.items()}

    def unescaped(self, text: str) -> tuple[str, dict[str, str]]:
        """Return a rendered text and its placeholders, including those that a filter wrote as JSON escapes."""
        for string, char in list(self._placeholders.items()):
            escape = _escape(char)
            if escape in text:
                text = text.replace(escape, self._placeholder(_escape(string)))
        return text, {char: string for string, char in self._placeholders.items() if char in text}

    def unused(self) -> str:
        """Return a rare character that neither the chat nor the template contains."""
        return self._next()

    def _hider(self, pattern: re.Pattern[str]) -> Callable[[str], str]:
        return lambda text: pattern.sub(lambda match: self._placeholder(match[0]), text)

    def _placeholder(self, string: str) -> str:
        if string not in self._placeholders:
            self._placeholders[string] = self._next()
        return self._placeholders[string]

    def _next(self) -> str:
        if self._free is None:
            self._free = self._free_characters()
        char = next(self._free, None)
        if char is None:
            raise RequestError(
                "the messages contain every rare character that can stand for a special token", "remove some of them"
            )
        return char

    def _free_characters(self) -> Iterator[str]:
        strings: list[str] = [self._template.source]

        def collect(text: str) -> str:
            strings.append(text)
            return text

        _mapped(self._chat, collect)
        taken = "\n".join(strings)
        rare = frozenset(re.findall(f"[{chr(_PLACEHOLDERS[0])}-{chr(_PLACEHOLDERS[-1])}]", taken))
        escapes = r"\ud8" in taken.lower()
        for code in _PLACEHOLDERS:
            if chr(code) not in rare and not (escapes and _escape(chr(code)) in taken.lower()):
                yield chr(code)


def _mapped(value: Any, change: Callable[[str], str], depth: int = 0) -> Any:
    """Return a JSON value with `change` applied to all its strings, including the keys."""
    if isinstance(value, str):
        return change(value)
    if depth > _MAX_DEPTH:
        raise RequestError(f"the messages are nested more than {_MAX_DEPTH} deep", "send messages with less nesting")
    if isinstance(value, dict):
        return {change(str(key)): _mapped(item, change, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change, depth + 1) for item in value]
    return value


def _escape(text: str) -> str:
    """Return a text as ASCII JSON writes it, without the quotes."""
    return json.dumps(text)[1:-1]


def _check_controls(
    template: ChatTemplate, chat: dict[str, Any], hidden: _Placeholders, text: str, add_generation_prompt: bool
) -> None:
    """Raise RequestError if the template made a control string from a user's text.

    A template that deletes `/think` turns `<|im_/thinkend|>` into `<|im_end|>`. So the chat is rendered again with
    placeholders for the characters that a control string needs: the control strings must be the same.
    """
    disarmed = hidden.disarm(chat)
    if disarmed == chat:
        return
    own = template.control.findall(
        _render_forms(template, disarmed, add_generation_prompt=add_generation_prompt, max_bytes=None)
    )
    rendered = template.control.findall(text)
    if rendered != own:
        forged = (string for string in rendered if rendered.count(string) != own.count(string))
        strange = next(forged, rendered[0] if rendered else "")
        raise RequestError(
            f"the model's chat template would turn text of a message into the special token {strange!r}",
            "change the message",
        )


def restored(text: str, plain: Mapping[str, str]) -> str:
    """Return a text with the strings that its placeholders stand for."""
    return text.translate({ord(char): string for char, string in plain.items()})
