"""Finds the call format of a model: renders probes with its template, and looks at what it writes.

A known format (known.py) is taken if it predicts exactly how the template writes calls that it has not seen. Otherwise
the format is derived: pairs of calls that differ in one thing show which text belongs to what. A derived format is
accepted only if its predictions are exact. Then come known formats that can read what the template writes, and last the
generic one.

Owns the probes and the choice. Knows nothing of processes: `render` is a callable.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from edgelm.base.errors import EdgeLMError
from edgelm.text.calls.format import Call, CallFormat, write_calls
from edgelm.text.calls.generic import GENERIC
from edgelm.text.calls.known import known_formats
from edgelm.text.calls.output import Args, CallBegin
from edgelm.text.parse import AnswerParser

Render = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], str]

_USER = "Qq7u"
_FIRST, _SECOND = "probe_alpha", "probe_beta"
_KEY, _OTHER = "kk_one", "kk_two"
_IDS = ("abcdefgh1", "abcdefgh2")
_TEXT = {"type": "string", "description": "t"}
_NUMBER = {"type": "integer", "description": "n"}
_UNSEEN = (
    [Call(_SECOND, {_KEY: "other text", _OTHER: 7}, _IDS[0])],
    [Call(_FIRST, {_OTHER: {"a": ["x", "y"]}}, _IDS[1])],
    [Call(_SECOND, {}, _IDS[0])],
)
_UNSEEN_PAIR = [Call(_SECOND, {_KEY: "one"}, _IDS[0]), Call(_FIRST, {_KEY: "two", _OTHER: 12}, _IDS[1])]


# How a format was found. exact: known, and predicts the template; derived: from probes; readable: known, and reads what
# the template writes; marks: known, and the template writes no calls.
Source = Literal["exact", "derived", "readable", "marks", "generic"]


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """How a model is given tools, and how it calls them.

    Where the template does not describe the tools, give it none, and use generic.with_tools_text. Where it does not
    write the calls of the history, use generic.with_plain_calls, whose results it may show nevertheless.
    """

    form: CallFormat
    describes_tools: bool
    writes_calls: bool
    source: Source
    shows_results: bool = True  # where it writes no calls: whether it has a form for their results


def find_support(template: str, special_strings: Collection[str], render: Render) -> ToolSupport:
    """Return the tool support of a model.

    `render(messages, tools)` renders its template without a generation prompt, as `render_chat` does; it may raise
    EdgeLMError. It is called about 15 times, so call this in a thread if it waits for a worker.
    """
    probes = _Probes(render)
    with_tools, without = probes.text(None, tools=True), probes.text(None, tools=False)
    describes = with_tools is not None and _FIRST in with_tools and with_tools != without
    single = probes.turn(_UNSEEN[0])
    writes = single is not None and _SECOND in single and "other text" in single
    if writes and GENERIC.call[0].strip() not in template and _predicts(GENERIC, probes, two=False):
        writes = False  # history.py wrote them, as the template drops calls
    pair = probes.turn(_UNSEEN_PAIR)
    two = pair is not None and _SECOND in pair and _FIRST in pair
    candidates = known_formats(template, special_strings)

    def support(form: CallFormat, source: Source) -> ToolSupport:
        is_own = source != "generic"
        writes_calls = writes and is_own
        return ToolSupport(form, describes and is_own, writes_calls, source, is_own and (writes or probes.shows_result))

    if writes:
        for form in candidates:
            if _predicts(form, probes, two):
                return support(form, "exact")
        derived = _derived(probes, two)
        if derived is not None:
            habits = tuple(form for form in candidates[:1] if form.call == derived.call)
            return support(replace(derived, also=habits[0].also if habits else ()), "derived")
    for form in candidates:
        if not writes:
            return support(form, "marks")
        if single is not None and _reads(form, single, _UNSEEN[0]):
            return support(form, "readable")
    return support(GENERIC, "generic")


class _Probes:
    """Renderings of a template; None where it fails."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._turns: dict[str, str | None] = {}

    def text(self, calls: Sequence[Call] | None, *, tools: bool = True) -> str | None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": _USER}]
        if calls is not None:
            written = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
                for call in calls
            ]
            messages.append({"role": "assistant", "content": "", "tool_calls": written})
        parameters = {"type": "object", "properties": {_KEY: _TEXT, _OTHER: _NUMBER}, "required": []}
        functions = [
            {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}
            for name in (_FIRST, _SECOND)
        ]
        try:
            return self._render(messages, functions if tools else None)
        except EdgeLMError:
            return None

    def answer(self, text: str) -> str | None:
        """Return the text after the user's message, if the assistant answers with text."""
        try:
            rendered = self._render([{"role": "user", "content": _USER}, {"role": "assistant", "content": text}], None)
        except EdgeLMError:
            return None
        return rendered.rpartition(_USER)[2] if _USER in rendered else None

    @property
    def shows_result(self) -> bool:
        """Whether a result is shown behind an answer of text."""
        result = {"role": "tool", "tool_call_id": _IDS[0], "name": _FIRST, "content": "vv_result"}
        answer = {"role": "assistant", "content": "vv_text"}
        try:
            rendered = self._render([{"role": "user", "content": _USER}, answer, result], None)
        except EdgeLMError:
            return False
        return "vv_text" in rendered and "vv_result" in rendered

    def turn(self, calls: Sequence[Call]) -> str | None:
        """Return the text after the user's message."""
        key = repr(calls)
        if key not in self._turns:
            text = self.text(calls)
            self._turns[key] = None if text is None or _USER not in text else text.rpartition(_USER)[2]
        return self._turns[key]


def _predicts(form: CallFormat, probes: _Probes, two: bool) -> bool:
    """Return whether a format writes calls exactly as the template does, twice the same call included."""
    unseen = [*_UNSEEN, _UNSEEN_PAIR] if two and form.parallel else [*_UNSEEN]
    return all((turn := probes.turn(calls)) is not None and write_calls(form, calls) in turn for calls in unseen)


def _reads(form: CallFormat, turn: str, calls: Sequence[Call]) -> bool:
    parser = AnswerParser(form, None)
    parts = parser.push(None, turn) + parser.flush()
    names = [part.name for part in parts if isinstance(part, CallBegin)]
    arguments = ["".join(p.json_text for p in parts if isinstance(p, Args) and p.index == i) for i in range(len(names))]
    try:
        values = [json.loads(text) for text in arguments]
    except ValueError:
        return False
    return names == [call.name for call in calls] and values == [dict(call.arguments) for call in calls]


# ------------------------------------------------------------------------------------------------------------------


def _derived(probes: _Probes, two: bool) -> CallFormat | None:
    """Return a format that predicts the template exactly; None if there is none."""
    one = probes.turn([Call(_FIRST, {_KEY: "vv_text"}, _IDS[0])])
    both = probes.turn([Call(_FIRST, {_KEY: "vv_text", _OTHER: 35}, _IDS[0])])
    pair = probes.turn([Call(_FIRST, {_KEY: "vv_text"}, _IDS[0])] * 2) if two else None
    if one is None or both is None or one.count(_FIRST) != 1:
        return None
    before, after = _frame(one, probes)
    inner = one[len(before) : len(one) - len(after)]
    for form in (_as_json(inner), _as_tags(inner, both[len(before) : len(both) - len(after)])):
        if form is not None:
            for framed in _with_section(form, inner, pair, before, after):
                if _is_sound(framed) and _predicts(framed, probes, two):
                    return framed
    return None


def _frame(one: str, probes: _Probes) -> tuple[str, str]:
    """Return the text before and after the calls of a turn, which a turn of text has too."""
    said = probes.answer("Zz8w") or ""
    opened, _, closed = said.partition("Zz8w")
    head = _common(one, opened)
    before = one[: _cut_back(one, min(len(head), one.index(_FIRST)))]
    return before, closed if one.endswith(closed) else ""


def _common(one: str, other: str) -> str:
    size = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:size]


def _cut_back(text: str, at: int) -> int:
    """Return the place of the tag that a cut would split, otherwise the cut."""
    opened = max(text.rfind(char, 0, at) for char in "<[")
    closed = max(text.rfind(char, 0, at) for char in ">]")
    return opened if opened > closed else at


def _as_json(inner: str) -> CallFormat | None:
    """Return the format of one call whose arguments are JSON."""
    written = re.escape(json.dumps({_KEY: "vv_text"}))
    whole = re.search(rf'\{{"([\w-]+)": "{_FIRST}", "([\w-]+)": {written}(, "([\w-]+)": "{_IDS[0]}")?\}}', inner)
    if whole:
        return CallFormat(
            name="derived",
            body="json",
            call=(inner[: whole.start()], inner[whole.end() :]),
            keys=(whole[1], whole[2], whole[4] or ""),
        )
    first = re.search(rf'\{{"([\w-]+)": "{_IDS[0]}", "([\w-]+)": "{_FIRST}", "([\w-]+)": {written}\}}', inner)
    if first:
        return CallFormat(
            name="derived",
            body="json",
            call=(inner[: first.start()], inner[first.end() :]),
            keys=(first[2], first[3], first[1]),
            id_first=True,
        )
    apart = re.search(rf"{_FIRST}(.*?){written}", inner, re.DOTALL)
    if not apart:
        return None
    middle, opened, mark = apart[1], inner[: apart.start()], ""
    if _IDS[0] in middle:
        mark, _, middle = middle.partition(_IDS[0])
    id_before = ""
    if _IDS[0] in opened:
        opened, _, id_before = opened.partition(_IDS[0])
    return CallFormat(
        name="derived",
        body="name_json",
        call=(opened, inner[apart.end() :]),
        name_end=middle,
        id_after=mark,
        id_before=id_before,
    )


def _as_tags(inner: str, both: str) -> CallFormat | None:
    """Return the format of one call with a tag for each argument."""
    match = re.fullmatch(
        rf"(?P<open>.*?){_FIRST}(?P<rest>.*?){_KEY}(?P<middle>.*?)vv_text(?P<tail>.*)", inner, re.DOTALL
    )
    more = re.fullmatch(
        rf".*?{_KEY}(?P<middle>.*?)vv_text(?P<between>.*?){_OTHER}(?P<mark>.*?)35(?P<tail>.*)", both, re.DOTALL
    )
    if not match or not more or not match["middle"] or match["middle"] != more["middle"]:
        return None
    between, tail, rest = more["between"], match["tail"], match["rest"]
    # `between` is the end of one argument and the beginning of the next; `rest` ends with that beginning.
    opening = _common(between[::-1], rest[::-1])[::-1]
    closing = between[: len(between) - len(opening)]
    if not opening.strip() or not tail.startswith(closing.rstrip()):
        return None
    separator = ""
    if not tail.startswith(closing):
        closing, separator = closing.rstrip(), closing[len(closing.rstrip()) :]
    name_end = rest[: len(rest) - len(opening)]
    return CallFormat(
        name="derived",
        body="tagged",
        call=(match["open"], tail[len(closing) :]),
        name_end=name_end,
        arg=(opening, match["middle"], closing),
        arg_separator=separator,
        value_mark=more["mark"] if more["mark"] != more["middle"] else "",
    )


def _with_section(form: CallFormat, inner: str, pair: str | None, before: str, after: str) -> list[CallFormat]:
    """Return the format with each frame and separator that two calls in a turn can be read with."""
    if pair is None:
        return [replace(form, parallel=False)]
    calls = pair[len(before) : len(pair) - len(after)] if after else pair[len(before) :]
    opened, closed = form.call
    core = inner[len(opened) : len(inner) - len(closed)]
    match = re.fullmatch(
        f"(?P<open>.*?){re.escape(core)}(?P<between>.*){re.escape(core)}(?P<close>.*)", calls, re.DOTALL
    )
    if not match or match["open"] != opened:
        return []
    between = match["between"]
    forms = []
    # `between` is the end of a call, a separator, and the beginning of a call: which part of the marks repeats?
    for tail in range(len(closed) + 1):
        for head in range(len(opened) + 1):
            end, begin = closed[:tail], opened[len(opened) - head :] if head else ""
            if len(end) + len(begin) <= len(between) and between.startswith(end) and between.endswith(begin):
                separator = between[len(end) : len(between) - len(begin)]
                section = (opened[: len(opened) - head], closed[tail:])
                forms.append(replace(form, section=section, call=(begin, end), separator=separator))
    return sorted(forms, key=lambda one: (len(one.separator), len("".join(one.section))))[:8]


def _is_sound(form: CallFormat) -> bool:
    """Return whether the marks can be told from text: a mark before the name, and no name in any of them."""
    head = form.head.strip()
    texts = (*form.section, *form.call, *form.arg, form.name_end, form.separator)
    leaks = any(probe in text for text in texts for probe in (_FIRST, _KEY, "vv_text", *_IDS))
    return bool(head) and head[0] in "<[" and len(head) > 2 and not leaks
