"""Which forms of messages a chat template shows: probes tell, short chats of known words, rendered once per template.

Owns the probes. The forms themselves are in message_forms.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any

from edgelm.base.errors import EdgeLMError, RequestError
from edgelm.text.message_forms import CallForm, Message, content_of, typed, with_thought_part

if TYPE_CHECKING:
    from edgelm.text.template import ChatTemplate

# Words that no template writes by itself.
_TOOL, _KEY, _VALUE, _RESULT = "probe_tool", "probe_key", "probe_value", "probe_result"
_TEXT, _THOUGHT = "probe_text", "probe_thought"
_OTHER = "_other"  # what the names of a second call end with
_TOOLS = [  # a tool that the probes do not call: its name in the text is not that of a call
    {
        "type": "function",
        "function": {
            "name": "listed",
            "description": "A tool.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string", "description": "A word."}}},
        },
    }
]


def _probe(*, content: str = "", reasoning: str = "", calls: int = 1, long_ids: bool = False) -> list[Message]:
    """Return a chat with calls and their results, in the common form."""
    ends = ("", _OTHER)[:calls]
    ids = [f"call_0123456789abcdef{number}" if long_ids else f"probeid0{number}" for number in range(calls)]
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message |= {"thinking": reasoning, "reasoning_content": reasoning}
    message["tool_calls"] = [
        {"id": call_id, "type": "function", "function": {"name": _TOOL + end, "arguments": {_KEY: _VALUE + end}}}
        for call_id, end in zip(ids, ends, strict=True)
    ]
    results = [
        {"role": "tool", "tool_call_id": call_id, "name": _TOOL + end, "content": _RESULT + end}
        for call_id, end in zip(ids, ends, strict=True)
    ]
    return [{"role": "user", "content": "Hi"}, message, *results]


class Habits:
    """Which forms of messages one template shows. Each habit is probed when a chat first needs it."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._separators: dict[str, str] = {}  # by role
        self._shown: dict[tuple[str, ...], bool] = {}  # orders of messages

    @cached_property
    def wants_parts(self) -> bool:
        """Whether content is shown as a list of parts only."""
        plain = [{"role": "user", "content": _TEXT}]
        in_parts = self._render([typed(message) for message in plain])
        printed = "'text'" in in_parts  # as an object of Python
        return _TEXT not in self._render(plain) and _TEXT in in_parts and not printed

    @cached_property
    def wants_thought_parts(self) -> bool:
        """Whether reasoning is shown as a part of the content only."""
        answer = {"role": "assistant", "content": _TEXT, "thinking": _THOUGHT, "reasoning_content": _THOUGHT}
        user = {"role": "user", "content": "Hi"}
        if "thinking" not in self._template.source or _THOUGHT in self._render([user, answer]):
            return False
        text = self._render([user, with_thought_part(answer)])
        printed = "'thinking'" in text or '"thinking"' in text  # as an object of Python or JSON
        return _THOUGHT in text and _TEXT in text and not printed

    def separator(self, role: str) -> str:
        """Return what the template writes between two parts of a message's text; nothing if it reads no parts."""
        if role not in self._separators:
            self._separators[role] = self._separator(role)
        return self._separators[role]

    @cached_property
    def shows_developer(self) -> bool:
        """Whether the template has a role `developer`. One that only prints any role has none."""
        return "developer" in self._template.source and self._shows_instructions(["developer", "user"])

    @cached_property
    def shows_system(self) -> bool:
        return self._shows_instructions(["system", "user"])

    @cached_property
    def shows_leading_instructions(self) -> bool:
        return self._shows_instructions(["system", "system", "user"])

    @cached_property
    def shows_later_instructions(self) -> bool:
        return self._shows_instructions(["system", "user", "assistant", "system", "user"])

    @cached_property
    def moves_instructions_to_front(self) -> bool:
        """Whether a system message behind other turns is shown before them, as by the template of DeepSeek R1."""
        text = self._instructions(["user", "assistant", "system", "user"])
        places = [text.find(f"{_TEXT}{number}") for number in range(4)]
        return min(places) == places[2] >= 0

    @cached_property
    def shows_same_role(self) -> bool:
        """Whether two messages of one role may follow each other. Many templates demand that roles alternate."""
        return self._shows_instructions(["user", "user", "assistant", "assistant", "user"])

    @cached_property
    def shows_empty_answer(self) -> bool:
        """Whether the template takes an assistant's message without text and calls."""
        user = {"role": "user", "content": _TEXT}
        return bool(self._render([user, {"role": "assistant", "content": ""}, user]))

    def shows(self, *kinds: str) -> bool:
        """Whether messages of these kinds may follow each other: a kind is a role, or `call` for one with a call."""
        if kinds not in self._shown:
            _, call, result = _probe()
            messages = [
                {"call": call, "tool": result}.get(kind, {"role": kind, "content": f"{_TEXT}{number}"})
                for number, kind in enumerate(kinds)
            ]
            has_calls = "call" in kinds
            self._shown[kinds] = bool(self._render(self._call_form.apply(messages) if has_calls else messages))
        return self._shown[kinds]

    def shape_calls(self, messages: list[Message]) -> list[Message]:
        form = self._call_form
        result = form.apply(messages)
        if form.one_call and self._drops_second_call:
            for message in result:
                if len(message.get("tool_calls") or []) > 1:
                    raise RequestError(
                        "the model's chat template shows one tool call of a message, and not all calls of a message "
                        "have a result",
                        "send a tool message with its tool_call_id for each call",
                    )
        return result

    @cached_property
    def _call_form(self) -> CallForm:
        """The form of messages with calls: each choice is taken only if the template shows more that way."""
        contents: list[tuple[str | None, bool]] = [("", True), (None, True), (None, False)]
        forms = [CallForm(empty, has, strings) for strings, (empty, has) in product((False, True), contents)]
        form = self._best(forms, _probe())
        if self._render(form.apply(_probe())):  # one that fails is to say why
            form = self._better(form, _probe(), calls_as_text=True)
            form = self._better(form, _probe(), results_as_text=True)
        form = self._better(form, _probe(long_ids=True), ids_of_nine=True)
        form = self._better(form, _probe(content=_TEXT), text_apart=True)
        form = self._better(form, _probe(content=_TEXT, reasoning=_THOUGHT), text_as_reasoning=True)
        return self._better(form, _probe(calls=2), one_call=True)

    @cached_property
    def _drops_second_call(self) -> bool:
        """Whether the template neither shows nor refuses a second call."""
        return bool(self._render(replace(self._call_form, one_call=False).apply(_probe(calls=2))))

    def _better(self, form: CallForm, chat: list[Message], **changes: Any) -> CallForm:
        return self._best([form, replace(form, **changes)], chat)

    def _best(self, forms: Sequence[CallForm], chat: list[Message]) -> CallForm:
        """Return the first form in which the template shows most of the calls and results."""
        words = [call["function"]["name"] for call in chat[1]["tool_calls"]]
        words += [call["function"]["arguments"][_KEY] for call in chat[1]["tool_calls"]]
        words += [message["content"] for message in chat[2:]]
        scores = []
        for form in forms:
            text = self._render(form.apply(chat))
            # The other call's words begin with the same letters.
            score = sum(text.replace(word + _OTHER, "").count(word) > 0 for word in words)
            scores.append(score - text.count("{'" + _KEY))  # an object printed by Python: it wants a string
            if scores[-1] == len(words):
                break
        return forms[scores.index(max(scores))]

    def _separator(self, role: str) -> str:
        texts = (f"{_TEXT}0", f"{_TEXT}1")
        parts = {"role": role, "content": content_of(texts)}
        user = {"role": "user", "content": "Hi"}
        if role == "tool":
            *before, result = _probe()
            chat = [*before, {**result, **parts}]
        else:
            chat = [parts] if role == "user" else [user, parts, user] if role == "assistant" else [parts, user]
        _, first, rest = self._render(chat).partition(texts[0])
        between, second, _ = rest.partition(texts[1])
        shown = first and second and not between.strip()  # otherwise it printed an object of Python
        return between if shown else ""

    def _shows_instructions(self, roles: Sequence[str]) -> bool:
        text = self._instructions(roles)
        return all(f"{_TEXT}{number}" in text for number in range(len(roles)))

    def _instructions(self, roles: Sequence[str]) -> str:
        """Return the text of a chat with these roles, whose messages are numbered."""
        return self._render([{"role": role, "content": f"{_TEXT}{number}"} for number, role in enumerate(roles)])

    def _render(self, messages: list[Message]) -> str:
        """Return the text of a probe; empty: the template fails."""
        has_calls = any(message.get("tool_calls") for message in messages)
        for tools in (_TOOLS,) if has_calls else (None, [], _TOOLS):  # some templates fail without tools
            try:
                return self._template.render(messages, tools=tools)
            except EdgeLMError:
                pass
        return ""


habits_of = lru_cache(maxsize=4)(Habits)
